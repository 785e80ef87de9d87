"""The configuration tree as flat paths, the way users name its fields: `epochs`, `optimizer.lr0`, `num_workers`, and
YOLOv5's names of hyper-parameters.

Everything that speaks of a field (flags, YAML keys, --set, error messages, help) asks here, so that none of them can
name a field that does not exist.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ray_yolo.config.sections import SECTIONS

_GENES = ("lr0 lrf momentum weight_decay warmup_epochs warmup_momentum warmup_bias_lr box cls cls_pw obj obj_pw "
          "anchor_t fl_gamma label_smoothing hsv_h hsv_s hsv_v degrees translate scale shear perspective flipud fliplr "
          "mosaic mixup copy_paste")
GENES = {name: f"{section}.{name}" for name in _GENES.split()
         for section, model in SECTIONS.items() if name in model.model_fields}
"""Names of YOLOv5's `hyp.*.yaml` files, in their order -> path in the recipe."""

LEGACY_GENES = {
    "iou_t": "YOLOv5's loss does not read it either",
    "anchors": "anchors come from the model file and from autoanchor",
}
"""Keys of YOLOv5's files that are accepted and ignored -> why; whoever reads such a file says so."""

TRANSPARENT = ("recipe", "placement", "sweep")  # sections whose names users leave out

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "multiple of"}


class ConfigField(NamedTuple):
    """One value of the tree: where it lies in the model, and what pydantic knows of it."""

    keys: tuple[str, ...]
    info: FieldInfo

    @property
    def types(self) -> tuple[Any, ...]:
        """The alternatives of its type, without None: (int,), (Literal['a', 'b'],), (float, Literal['auto'])."""
        annotation = self.info.annotation
        union = get_origin(annotation) in (Union, types.UnionType)
        return tuple(kind for kind in (get_args(annotation) if union else (annotation,)) if kind is not type(None))

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that its value may be, as far as they are listed: ('none', 'ram', 'disk')."""
        return tuple(word for kind in self.types if get_origin(kind) is Literal for word in get_args(kind))

    @property
    def expected(self) -> str:
        """What a value must be, in words: 'a whole number >= 1', 'one of SGD, Adam, AdamW', 'a number or auto'."""
        words = [_words(kind) for kind in self.types]
        if "" in words:
            return " ".join((self.info.description or "").split()).rstrip(".")
        bounds = [f"{sign} {getattr(limit, name)}" for limit in self.info.metadata
                  for name, sign in _SIGNS.items() if hasattr(limit, name)]
        return " ".join([" or ".join(words), " and ".join(bounds)]).strip()


def _words(kind: Any) -> str:
    """A type in words; '' for those that the field's own description explains better."""
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    return _WORDS.get(kind, "")


def config_fields(model: type[BaseModel]) -> dict[str, ConfigField]:
    """Every leaf of a model's tree by its dotted path; the sections in TRANSPARENT leave no trace in it."""
    return {".".join(key for key in field.keys if key not in TRANSPARENT): field for field in _leaves(model, ())}


def _leaves(model: type[BaseModel], above: tuple[str, ...]) -> Iterable[ConfigField]:
    for name, info in model.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from _leaves(section, (*above, name))
        else:
            yield ConfigField((*above, name), info)


def canonical(key: str) -> str:
    """The path that a user's key stands for: itself, a YOLOv5 gene's (`lr0`), or one below `recipe.`/`placement.`."""
    for section in TRANSPARENT:
        key = key.removeprefix(f"{section}.")
    return GENES.get(key, key)


def explain_unknown(key: str, fields: dict[str, ConfigField]) -> str:
    """Why a key is none of the fields, with the nearest that is."""
    inside = [path for path in fields if path.startswith(f"{key}.")]
    if inside:
        return f"{key!r} is a section; give one of its fields: {', '.join(inside)}"
    last_words = {path.rpartition(".")[2]: path for path in reversed(fields)}
    word = key.rpartition(".")[2] if key.rpartition(".")[2] in last_words else key
    return f"unknown setting {key!r}{did_you_mean(word, last_words | {path: path for path in fields})}"


def did_you_mean(word: str, spellings: dict[str, str]) -> str:
    """'; did you mean X?' with the meaning of the nearest spelling, or nothing if none is near."""
    near = difflib.get_close_matches(word[:100], spellings, n=1)
    return f"; did you mean {spellings[near[0]]}?" if near else ""
