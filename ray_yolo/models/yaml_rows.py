"""Reads model YAML files of YOLOv5 and Ultralytics as typed rows. Names are looked up in tables, never evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ray_yolo.config.model_facts import family_of_table
from ray_yolo.config.synonyms import did_you_mean
from ray_yolo.core.errors import ConfigError
from ray_yolo.models import rows
from ray_yolo.models.detector import Architecture

Where = Callable[..., str]
Multiple = Annotated[float, Field(gt=0, le=100)]
Scale = Annotated[tuple[Multiple, Multiple, rows.Channels], Field(strict=False)]  # depth, width, most channels

MODULES: dict[str, type[rows.LayerRow]] = {
    "Conv": rows.ConvRow, "DWConv": rows.DWConvRow, "Bottleneck": rows.BottleneckRow, "C3": rows.C3Row,
    "C2f": rows.C2fRow, "C3k2": rows.C3k2Row, "C2PSA": rows.C2PSARow, "A2C2f": rows.A2C2fRow, "SPP": rows.SPPRow,
    "SPPF": rows.SPPFRow, "Concat": rows.ConcatRow, "nn.Upsample": rows.UpsampleRow, "nn.MaxPool2d": rows.MaxPoolRow,
    "nn.ZeroPad2d": rows.ZeroPadRow,
}
HEADS: dict[str, type[rows.HeadRow]] = {
    "yolov5": rows.DetectRow, "yolov8": rows.AnchorFreeRow, "yolo11": rows.LightAnchorFreeRow,
    "yolo26": rows.EndToEndRow}
"""The row of `Detect` by the family of the table."""
PLAIN_NAMES = {"None": None, "True": True, "False": False, "nearest": "nearest"}


class ModelFile(BaseModel):
    """The keys of a model YAML."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    nc: int = Field(80, ge=1)
    depth_multiple: Multiple = 1.0
    width_multiple: Multiple = 1.0
    scales: dict[str, Scale] = {}
    scale: str = ""
    anchors: Annotated[int, Field(ge=1, le=100)] | list[list[float]] | None = None
    end2end: bool = False
    reg_max: Literal[1, 16] = 16
    backbone: list[object]
    head: list[object] = Field(min_length=1)


def read_architecture(mapping: Mapping[str, object], where: Where = lambda *_: "model") -> Architecture:
    """The architecture that a model YAML describes.

    | key | meaning |
    |---|---|
    | `nc` | ignored: the dataset determines the number of classes |
    | `backbone`, `head` | lists of rows [from, number, module, args] |
    | `depth_multiple`, `width_multiple` | multiples of the model's size |
    | `scales`, `scale` | (depth, width, most channels) by letter, and the letter to use (default: the first) |
    | `anchors` | per level a flat list of widths and heights in pixels, or a number of anchors to fit |
    | `end2end`, `reg_max` | True and 1: the end-to-end head |

    Without `anchors` the head is anchor-free: with light class branches if the table has C3k2 or A2C2f.

    Args:
        where: 'file:line' of a key, by its path, for error messages.

    Raises:
        ConfigError: naming the key or the row, and the known alternatives.
    """
    try:
        file = ModelFile.model_validate(mapping)
    except ValidationError as error:
        raise ConfigError(f"{where(*error.errors()[0]['loc'])}: {_first(error)}") from error
    _check_head(file, where)
    names: dict[str, object] = {**PLAIN_NAMES, "nc": file.nc}
    if file.anchors is not None:
        names["anchors"] = _look_up(file.anchors, PLAIN_NAMES, "anchors")
    modules = {**MODULES, "Detect": HEADS[family_of_table(mapping)]}
    table = [_read_row(entry, f"{where(part, index)}: {part}[{index}]", modules, names)
             for part, entries in (("backbone", file.backbone), ("head", file.head))
             for index, entry in enumerate(entries)]
    anchors = [_pairs(level, where) for level in file.anchors] if isinstance(file.anchors, list) else file.anchors
    if not file.scales:
        return Architecture(tuple(table), anchors, file.depth_multiple, file.width_multiple)
    scale = file.scale or next(iter(file.scales))
    return Architecture(tuple(row.of_size(scale) for row in table), anchors, *file.scales[scale])


def _check_head(file: ModelFile, where: Where) -> None:
    """Refuse keys that contradict each other."""
    if file.scale and file.scale not in file.scales:
        raise ConfigError(f"{where('scale')}: scale: {file.scale!r} is none of scales: {', '.join(file.scales)}")
    if file.end2end and file.anchors is not None:
        raise ConfigError(f"{where('end2end')}: end2end: a head with anchors has none; remove one of the two")
    if file.end2end != (file.reg_max == 1):
        raise ConfigError(f"{where('reg_max')}: reg_max: must be 1 with end2end: True, else 16")


def _read_row(entry: object, where: str, modules: Mapping[str, type[rows.LayerRow]], names: Mapping[str, object]
              ) -> rows.LayerRow:
    """The typed row of one [from, number, module, args]."""
    match entry:
        case [int() | list() as source, int() as number, str() as module, list() as args]:
            pass
        case _:
            raise ConfigError(f"{where}: a row is [from, number, module, args], but this one is {entry!r}")
    if module not in modules:
        near = did_you_mean(module, {name: name for name in modules})
        raise ConfigError(f"{where}: module {module!r} is unknown{near or ';'} Known: {', '.join(modules)}")
    where, row = f"{where} {module}", modules[module]
    values = [_look_up(value, names, where) for value in args]
    if issubclass(row, rows.HeadRow):
        keys = [key for key in ("nc", "anchors") if key in names]
        if values != [names[key] for key in keys]:
            raise ConfigError(f"{where}: its arguments are [{', '.join(keys)}], as given at the top of the file")
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
    """An argument: names become their values, lists become tuples."""
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
    """The first error, on one line."""
    detail = error.errors()[0]
    path = [f"argument {part + 1}" if isinstance(part, int) else part for part in detail["loc"]]
    return f"{'.'.join(path)}: {detail['msg']}"
