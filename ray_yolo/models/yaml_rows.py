"""Reads model YAML files of YOLOv5 and Ultralytics as typed rows. Names are looked up in tables, never evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from ray_yolo.config.model_facts import family_of_table
from ray_yolo.config.synonyms import did_you_mean
from ray_yolo.core.errors import ConfigError
from ray_yolo.models import blocks, heads
from ray_yolo.models.detector import Architecture
from ray_yolo.models.rows import Row, row

Where = Callable[..., str]
Multiple = Annotated[float, Field(gt=0, le=100)]
Scale = Annotated[tuple[Multiple, Multiple, blocks.Channels], Field(strict=False)]  # depth, width, most channels

BLOCKS: dict[str, type[nn.Module]] = {
    **{block.__name__: block for block in (
        blocks.Conv, blocks.DWConv, blocks.Bottleneck, blocks.C3, blocks.C2f, blocks.C3k2, blocks.C2PSA, blocks.A2C2f,
        blocks.SPP, blocks.SPPF, blocks.Concat)},
    **{f"nn.{block.__name__}": block for block in (blocks.Upsample, blocks.MaxPool2d, blocks.ZeroPad2d)},
}
HEADS: dict[str, type[heads.Head]] = {
    "yolov5": heads.Detect, "yolov8": heads.AnchorFree, "yolo11": heads.LightAnchorFree, "yolo26": heads.EndToEnd}
"""What `Detect` means, by the family of the table."""
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
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where(*first['loc'])}: {path}: {first['msg']}") from error
    if file.scale and file.scale not in file.scales:
        raise ConfigError(f"{where('scale')}: scale: {file.scale!r} is none of scales: {', '.join(file.scales)}")
    if file.end2end and file.anchors is not None:
        raise ConfigError(f"{where('end2end')}: end2end: a head with anchors has none; remove one of the two")
    if file.end2end != (file.reg_max == 1):
        raise ConfigError(f"{where('reg_max')}: reg_max: must be 1 with end2end: True, else 16")

    names: dict[str, object] = {**PLAIN_NAMES, "nc": file.nc}
    if file.anchors is not None:
        names["anchors"] = _look_up(file.anchors, PLAIN_NAMES, "anchors")
    head = HEADS[family_of_table(mapping)]
    table: list[Row] = []
    for part, entries in (("backbone", file.backbone), ("head", file.head)):
        for index, entry in enumerate(entries):
            table.append(_read_row(entry, f"{where(part, index)}: {part}[{index}]", head, names))
    anchors = [_pairs(level, where) for level in file.anchors] if isinstance(file.anchors, list) else file.anchors
    if not file.scales:
        return Architecture(tuple(table), anchors, file.depth_multiple, file.width_multiple)
    scale = file.scale or next(iter(file.scales))
    return Architecture(tuple(each.of_size(scale) for each in table), anchors, *file.scales[scale])


def _read_row(entry: object, where: str, head: type[heads.Head], names: Mapping[str, object]) -> Row:
    """The row of one [from, number, module, args]; `head` is what `Detect` means."""
    match entry:
        case [int() | list() as source, int() as number, str() as module, list() as args]:
            pass
        case _:
            raise ConfigError(f"{where}: a row is [from, number, module, args], but this one is {entry!r}")
    known = {**BLOCKS, "Detect": head}
    if module not in known:
        near = did_you_mean(module, {name: name for name in known})
        raise ConfigError(f"{where}: module {module!r} is unknown{near or ';'} Known: {', '.join(known)}")
    where = f"{where} {module}"
    values = [_look_up(value, names, where) for value in args]
    if module == "Detect":
        # Its arguments only repeat what the top of the file says. The data set determines the number of classes, the
        # anchors their number.
        keys = [key for key in ("nc", "anchors") if key in names]
        if values != [names[key] for key in keys]:
            raise ConfigError(f"{where}: its arguments are [{', '.join(keys)}], as given at the top of the file")
        values = []
    try:
        return row(known[module], *values, source=source if isinstance(source, list) else [source], repeats=number)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


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

