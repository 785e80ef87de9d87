"""YOLOv5-style model YAML, as a safe loader gives it back -> typed rows. Names are looked up in tables; nothing is ever
evaluated.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ray_yolo.core.errors import ConfigError
from ray_yolo.models import rows
from ray_yolo.models.detector import Architecture

Where = Callable[..., str]

MODULES: dict[str, type[rows.LayerRow]] = {
    "Conv": rows.ConvRow, "DWConv": rows.DWConvRow, "Bottleneck": rows.BottleneckRow, "C3": rows.C3Row,
    "SPP": rows.SPPRow, "SPPF": rows.SPPFRow, "Concat": rows.ConcatRow, "nn.Upsample": rows.UpsampleRow,
    "nn.MaxPool2d": rows.MaxPoolRow, "nn.ZeroPad2d": rows.ZeroPadRow, "Detect": rows.DetectRow,
}
PLAIN_NAMES = {"None": None, "True": True, "False": False, "nearest": "nearest"}


class ModelFile(BaseModel):
    """The keys of a model YAML."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    nc: int = Field(80, ge=1)
    depth_multiple: float = Field(1.0, gt=0, le=100)
    width_multiple: float = Field(1.0, gt=0, le=100)
    anchors: Annotated[int, Field(ge=1, le=100)] | list[list[float]]
    backbone: list[object]
    head: list[object] = Field(min_length=1)


def read_architecture(mapping: Mapping[str, object], where: Where = lambda *_: "model") -> Architecture:
    """The architecture that a model YAML describes.

    Args:
        mapping: `nc` (the data set decides in the end), `depth_multiple`, `width_multiple`, `anchors` (per level a flat
            list of widths and heights in pixels, or how many per level are to be fitted), and the lists `backbone` and
            `head` of rows [from, number, module, args].
        where: 'file:line' of a key, by its path, for error messages.

    Raises:
        ConfigError: naming the key or the row, and what is known instead.
    """
    try:
        file = ModelFile.model_validate(mapping)
    except ValidationError as error:
        raise ConfigError(f"{where(*error.errors()[0]['loc'])}: {_first(error)}") from error
    names = {**PLAIN_NAMES, "nc": file.nc, "anchors": _look_up(file.anchors, PLAIN_NAMES, "anchors")}
    table = [_read_row(entry, f"{where(part, index)}: {part}[{index}]", names)
             for part, entries in (("backbone", file.backbone), ("head", file.head))
             for index, entry in enumerate(entries)]
    anchors = file.anchors if isinstance(file.anchors, int) else [_pairs(level, where) for level in file.anchors]
    return Architecture(tuple(table), anchors, file.depth_multiple, file.width_multiple)


def _read_row(entry: object, where: str, names: Mapping[str, object]) -> rows.LayerRow:
    """The typed row of one [from, number, module, args]."""
    match entry:
        case [int() | list() as source, int() as number, str() as module, list() as args]:
            pass
        case _:
            raise ConfigError(f"{where}: a row is [from, number, module, args], but this one is {entry!r}")
    if module not in MODULES:
        near = difflib.get_close_matches(module, MODULES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"{where}: module {module!r} is unknown; did you mean {near}? Known: {', '.join(MODULES)}")
    where, row = f"{where} {module}", MODULES[module]
    values = [_look_up(value, names, where) for value in args]
    if row is rows.DetectRow:
        if values != [names["nc"], names["anchors"]]:
            raise ConfigError(f"{where}: its arguments are [nc, anchors], as given at the top of the file")
        values = []
    wide = issubclass(row, rows.WideRow)
    if number != 1 and not wide:
        raise ConfigError(f"{where}: cannot be repeated; set its number to 1")
    build: Callable[..., rows.LayerRow] = row
    try:
        return build(*values, source=tuple(source) if isinstance(source, list) else (source,),
                     **({"repeats": number} if wide else {}))
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first(error)}") from error


def _look_up(value: object, names: Mapping[str, object], where: str) -> object:
    """A parameter: names become what they stand for, lists become tuples."""
    if isinstance(value, list):
        return tuple(_look_up(item, names, where) for item in value)
    if not isinstance(value, str):
        return value
    if value not in names:
        raise ConfigError(f"{where}: argument {value!r} is not a number; known names: {', '.join(names)}")
    return names[value]


def _pairs(level: Sequence[float], where: Where) -> list[tuple[float, float]]:
    """Flat w, h, w, h, ... as pairs."""
    if len(level) % 2:
        raise ConfigError(f"{where('anchors')}: anchors: a level is a list of w, h, w, h, ..., but one has {len(level)}"
                          " numbers")
    return list(zip(level[::2], level[1::2], strict=True))


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, in one line."""
    detail = error.errors()[0]
    place = [f"argument {part + 1}" if isinstance(part, int) else part for part in detail["loc"]]
    return f"{'.'.join(place)}: {detail['msg']}"
