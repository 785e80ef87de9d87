"""A row of a model table: a block with its arguments, its input rows and its repeats.

The signature of a block's `__init__` is the schema of its row:

| parameter | meaning |
|---|---|
| `inputs: int` | channels of the first input row; filled in when the model is built |
| `inputs: Sequence[int]` | channels of all input rows; of heads |
| `outputs` | the number of channels that the row sets: the width multiple scales it |
| `repeats` | repeats inside the block; the depth multiple scales them |
| the others before `*` | the arguments of a row, checked against their annotations |

A block with `outputs` and without `repeats` that is repeated becomes a sequence of blocks. Channels and repeats in a
table are those before the multiples of a model size. Rows are immutable values.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from torch import nn

from ray_yolo.core.errors import ConfigError
from ray_yolo.models.blocks import Count

FILLED_IN = ("inputs", "repeats")  # parameters that are not arguments of a row
MOST_CHANNELS = 2**15
STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)


def parameters_of(block: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """The parameters of a block before `*`, by name and in order."""
    parameters = inspect.signature(block, eval_str=True).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY}


_schemas: dict[type[nn.Module], type[BaseModel]] = {}  # each block's is made once
_SOURCES, _REPEATS = TypeAdapter(tuple[int, ...]), TypeAdapter(Count)


def schema_of(block: type[nn.Module]) -> type[BaseModel]:
    """The arguments of a block's row: one field for each parameter that a table may set, in order."""
    if block in _schemas:
        return _schemas[block]
    definitions: dict[str, Any] = {}
    for name, parameter in parameters_of(block).items():
        if name in FILLED_IN:
            continue
        required = parameter.default is parameter.empty
        definitions[name] = (parameter.annotation, ... if required else parameter.default)
    _schemas[block] = create_model(block.__name__, __config__=STRICT, **definitions)
    return _schemas[block]


@dataclass(frozen=True)
class Row:
    """One layer of a table. `row` makes and checks it."""

    block: type[nn.Module]
    arguments: BaseModel  # an instance of `schema_of(block)`
    source: tuple[int, ...] = (-1,)  # indices of input rows; negative ones count back from this row
    repeats: int = 1

    def __str__(self) -> str:
        """`Conv(64, 3, 2)`, with repeats and sources that differ from their defaults."""
        values = [str(value) for value in self._values().values()]
        if self.repeats != 1:
            values.append(f"repeats={self.repeats}")
        if self.source != (-1,):
            values.append(f"source={self.source}")
        return f"{self.block.__name__}({', '.join(values)})"

    @property
    def channels(self) -> int | None:
        """The number of channels that the row sets, or None if its inputs determine it."""
        return getattr(self.arguments, "outputs", None)

    def build(self, channels: Sequence[int]) -> nn.Module:
        """The layer for input rows with these numbers of channels."""
        parameters = parameters_of(self.block)
        if "inputs" not in parameters:
            return self.block(**self._values())
        if parameters["inputs"].annotation is not int:
            return self.block(channels, **self._values())
        if "repeats" in parameters:
            return self.block(channels[0], repeats=self.repeats, **self._values())
        first = self.block(channels[0], **self._values())
        if self.repeats == 1:
            return first
        others = [self.block(self.channels, **self._values()) for _ in range(self.repeats - 1)]
        return nn.Sequential(first, *others)

    def scaled(self, depth: float, width: float, most: int = MOST_CHANNELS) -> Row:
        """The row after the multiples of a model size.

        Channels: min(channels, most) x width, rounded up to a multiple of 8.
        Repeats above 1: max(round(repeats x depth), 1).

        Raises:
            ValidationError: if that many channels or repeats are not allowed.
        """
        if self.channels is None:
            return self
        wide = math.ceil(min(self.channels, most) * width / 8) * 8
        deep = max(round(self.repeats * depth), 1) if self.repeats > 1 else 1
        return replace(self, arguments=_checked(self.block, {**self._values(), "outputs": wide}),
                       repeats=_REPEATS.validate_python(deep, strict=True))

    def of_size(self, size: str) -> Row:
        """The row in a model of this size (a letter): `true_in_sizes` of the block names the arguments that the
        authors' larger sizes switch on. Most rows are equal in all sizes."""
        switched_on: dict[str, Any] = {}
        for name, sizes in getattr(self.block, "true_in_sizes", {}).items():
            if size in sizes:
                switched_on[name] = True
        return self.with_arguments(**switched_on) if switched_on else self

    def with_arguments(self, **changes: Any) -> Row:
        """The same row with other arguments.

        Raises:
            ValidationError: naming the argument that does not fit.
        """
        return replace(self, arguments=_checked(self.block, {**self._values(), **changes}))

    def _values(self) -> dict[str, Any]:
        return dict(self.arguments)


def row(block: type[nn.Module], *positional: Any, source: Sequence[int] = (-1,), repeats: int = 1, **named: Any
        ) -> Row:
    """The row of a block, with its arguments by position or by name.

    Raises:
        ConfigError: naming the argument that does not fit the block, by its position and name.
    """
    names = list(schema_of(block).model_fields)
    if len(positional) > len(names):
        raise ConfigError(f"argument {len(names) + 1}: Unexpected: {block.__name__} has {len(names)}"
                          + (f" ({', '.join(names)})" if names else ""))
    values = dict(zip(names, positional, strict=False))
    try:
        sources = _SOURCES.validate_python(tuple(source), strict=True)
    except ValidationError as error:
        raise ConfigError(f"source: {error.errors()[0]['msg']}") from error
    if repeats != 1 and "outputs" not in names:
        raise ConfigError("cannot be repeated; set its number to 1")
    try:
        arguments = _checked(block, {**values, **named})
    except ValidationError as error:  # its first part becomes `argument 2 (kernel): ...`
        detail = error.errors()[0]
        name, *inner = map(str, detail["loc"])
        place = f"argument {names.index(name) + 1} ({name})" if name in names else name
        raise ConfigError(f"{'.'.join([place, *inner])}: {detail['msg']}") from error
    try:
        count = _REPEATS.validate_python(repeats, strict=True)
    except ValidationError as error:
        raise ConfigError(f"repeats: {error.errors()[0]['msg']}") from error
    return Row(block, arguments, sources, count)


def _checked(block: type[nn.Module], values: dict[str, Any]) -> BaseModel:
    return schema_of(block).model_validate(values)
