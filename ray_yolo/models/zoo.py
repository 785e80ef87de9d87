"""The model zoo as tables of rows: YOLOv3 (Darknet-53), YOLOv5 (layout of v6.0), YOLOv8, YOLO11, YOLO12, YOLO26."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch import nn

from ray_yolo.models.blocks import (
    C2PSA,
    C3,
    SPP,
    SPPF,
    A2C2f,
    Bottleneck,
    C2f,
    C3k2,
    Concat,
    Conv,
    MaxPool2d,
    Upsample,
    ZeroPad2d,
)
from ray_yolo.models.detector import Architecture
from ray_yolo.models.heads import AnchorFree, Anchors, Detect, EndToEnd, Head, LightAnchorFree
from ray_yolo.models.rows import MOST_CHANNELS, Row, row

ANCHORS_PX = (  # fitted to COCO at 640 pixels; YOLOv3's and YOLOv5's
    ((10, 13), (16, 30), (33, 23)),
    ((30, 61), (62, 45), (59, 119)),
    ((116, 90), (156, 198), (373, 326)),
)
P6_ANCHORS_PX = (  # they fit images of 1280 pixels
    ((19, 27), (44, 40), (38, 94)),
    ((96, 68), (86, 152), (180, 137)),
    ((140, 301), (303, 264), (238, 542)),
    ((436, 615), (739, 380), (925, 792)),
)
TINY_ANCHORS_PX = (
    ((10, 14), (23, 27), (37, 58)),
    ((81, 82), (135, 169), (344, 319)),
)


Block = type[nn.Module]


def _stages(block: Block, *stages: tuple[int, int]) -> Iterator[Row]:
    """A convolution of stride 2 and blocks for each (channels, repeats)."""
    for channels, repeats in stages:
        yield row(Conv, channels, kernel=3, stride=2)
        yield row(block, channels, shortcut=True, repeats=repeats)


def _yolov3(pooling: Row) -> tuple[Row, ...]:
    """YOLOv3; `pooling` is row 12."""
    return (
        row(Conv, 32, kernel=3),
        *_stages(Bottleneck, (64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)),  # 6: P3, 8: P4
        row(Bottleneck, 1024, shortcut=False),
        pooling,
        row(Conv, 1024, kernel=3),
        row(Conv, 512),
        row(Conv, 1024, kernel=3),  # 15: head, stride 32
        row(Conv, 256, source=(-2,)),
        row(Upsample),
        row(Concat, source=(-1, 8)),
        row(Bottleneck, 512, shortcut=False),
        row(Bottleneck, 512, shortcut=False),
        row(Conv, 256),
        row(Conv, 512, kernel=3),  # 22: head, stride 16
        row(Conv, 128, source=(-2,)),
        row(Upsample),
        row(Concat, source=(-1, 6)),
        row(Bottleneck, 256, shortcut=False),
        row(Bottleneck, 256, shortcut=False, repeats=2),  # 27: head, stride 8
        row(Detect, source=(27, 22, 15)),
    )


TINY: tuple[Row, ...] = (
    row(Conv, 16, kernel=3), row(MaxPool2d, 2, 2),
    row(Conv, 32, kernel=3), row(MaxPool2d, 2, 2),
    row(Conv, 64, kernel=3), row(MaxPool2d, 2, 2),
    row(Conv, 128, kernel=3), row(MaxPool2d, 2, 2),
    row(Conv, 256, kernel=3),  # 8: P4
    row(MaxPool2d, 2, 2),
    row(Conv, 512, kernel=3),
    row(ZeroPad2d, (0, 1, 0, 1)),
    row(MaxPool2d, 2, 1),
    row(Conv, 1024, kernel=3),
    row(Conv, 256),
    row(Conv, 512, kernel=3),  # 15: head, stride 32
    row(Conv, 128, source=(-2,)),
    row(Upsample),
    row(Concat, source=(-1, 8)),
    row(Conv, 256, kernel=3),  # 19: head, stride 16
    row(Detect, source=(19, 15)),
)


def _pyramid(
    stem: Row,
    block: Block,
    backbone: Sequence[tuple[int, int]],
    head: type[Head],
    *,
    reduced: bool,
) -> tuple[Row, ...]:
    """YOLOv5 and YOLOv8: a backbone, path aggregation from coarse to fine and back, a head on P3 and coarser levels.

    Args:
        backbone: (channels, repeats) of the stages from P2 on.
        reduced: with 1x1 convolutions before upsampling.
    """
    table = [stem, *_stages(block, *backbone), row(SPPF, backbone[-1][0])]
    widths = [channels for channels, _ in backbone[1:-1]]  # those of P3 and coarser levels except the last
    joints = []
    for level, channels in reversed(list(enumerate(widths, 1))):  # joins a level of the backbone
        if reduced:
            table.append(row(Conv, channels))
        joints.append(len(table) - 1)
        table += [row(Upsample), row(Concat, source=(-1, 2 * level + 2)),
                  row(block, channels, shortcut=False, repeats=3)]
    outputs = [len(table) - 1]
    for channels, coarser in zip(widths, [*widths[1:], backbone[-1][0]], strict=True):
        table += [row(Conv, channels, kernel=3, stride=2), row(Concat, source=(-1, joints.pop())),
                  row(block, coarser, shortcut=False, repeats=3)]
        outputs.append(len(table) - 1)
    return (*table, row(head, source=outputs))


_STEM = row(Conv, 64, kernel=6, stride=2, padding=2)
_P5 = ((128, 3), (256, 6), (512, 9), (1024, 3))
_yolov5 = partial(_pyramid, _STEM, C3, _P5, reduced=True)
_yolov5_p6 = partial(_pyramid, _STEM, C3, (*_P5[:-1], (768, 3), (1024, 3)), reduced=True)

# (depth multiple, width multiple, most channels) by the letter of a size
V5_SIZES = {"n": (0.33, 0.25, MOST_CHANNELS), "s": (0.33, 0.50, MOST_CHANNELS), "m": (0.67, 0.75, MOST_CHANNELS),
            "l": (1.00, 1.00, MOST_CHANNELS), "x": (1.33, 1.25, MOST_CHANNELS)}
V8_SIZES = {"n": (0.33, 0.25, 1024), "s": (0.33, 0.50, 1024), "m": (0.67, 0.75, 768), "l": (1.00, 1.00, 512),
            "x": (1.00, 1.25, 512)}
V11_SIZES = {"n": (0.50, 0.25, 1024), "s": (0.50, 0.50, 1024), "m": (0.50, 1.00, 512), "l": (1.00, 1.00, 512),
             "x": (1.00, 1.50, 512)}  # YOLO12 and YOLO26 have the same.


def _neck(coarse: Row, fine: Row, last: Row, levels: tuple[int, int, int], head: type[Head]) -> tuple[Row, ...]:
    """Path aggregation from P5 to P3 and back, and the head, for YOLO11 and later.

    Args:
        coarse, fine, last: the blocks of P4, P3 and P5.
        levels: rows of P3, P4 and P5 in the backbone.
    """
    p3, p4, p5 = levels
    return (
        row(Upsample), row(Concat, source=(-1, p4)), coarse,
        row(Upsample), row(Concat, source=(-1, p3)), fine,
        row(Conv, 256, kernel=3, stride=2), row(Concat, source=(-1, p5 + 3)), coarse,
        row(Conv, 512, kernel=3, stride=2), row(Concat, source=(-1, p5)), last,
        row(head, source=(p5 + 6, p5 + 9, p5 + 12)),
    )


_STAGES_11 = (
    row(Conv, 64, kernel=3, stride=2),
    row(Conv, 128, kernel=3, stride=2),
    row(C3k2, 256, expansion=0.25, repeats=2),
    row(Conv, 256, kernel=3, stride=2),
    row(C3k2, 512, expansion=0.25, repeats=2),  # 4: P3
    row(Conv, 512, kernel=3, stride=2),
)
_MIDDLE = row(C3k2, 512, c3k=True, repeats=2)
_DOWN = row(Conv, 1024, kernel=3, stride=2)
_DEEP = row(C3k2, 1024, c3k=True, repeats=2)
_ROWS_11 = (
    *_STAGES_11,
    _MIDDLE,  # 6: P4
    _DOWN,
    _DEEP,
    row(SPPF, 1024),
    row(C2PSA, 1024, repeats=2),  # 10: P5
    *_neck(row(C3k2, 512, repeats=2), row(C3k2, 256, repeats=2), _DEEP, (4, 6, 10), LightAnchorFree),
)
_ROWS_12 = (  # area attention in place of convolutions on P4 and P5
    *_STAGES_11,
    row(A2C2f, 512, areas=4, repeats=4),  # 6: P4
    _DOWN,
    row(A2C2f, 1024, repeats=4),  # 8: P5
    *_neck(row(A2C2f, 512, attention=False, repeats=2), row(A2C2f, 256, attention=False, repeats=2), _DEEP, (4, 6, 8),
           LightAnchorFree),
)
_ROWS_26 = (  # YOLO11 with C3 blocks in the neck, attention in its last block, and a pair of heads
    *_STAGES_11,
    _MIDDLE,  # 6: P4
    _DOWN,
    _DEEP,
    row(SPPF, 1024, residual=True),
    row(C2PSA, 1024, repeats=2),  # 10: P5
    *_neck(_MIDDLE, row(C3k2, 256, c3k=True, repeats=2), row(C3k2, 1024, attention=True), (4, 6, 10), EndToEnd),
)


def _in_sizes(name: str, table: Sequence[Row], sizes: Mapping[str, tuple[float, float, int]],
              anchors_px: Anchors | None = None, *, suffix: str = "") -> dict[str, Architecture]:
    """The models of a table by name: `name`, the letter of the size, `suffix`."""
    models = {}
    for size, multiples in sizes.items():
        rows = tuple(each.of_size(size) for each in table)
        models[f"{name}{size}{suffix}"] = Architecture(rows, anchors_px, *multiples)
    return models


YOLOV3 = {
    "yolov3": Architecture(_yolov3(row(Conv, 512)), ANCHORS_PX),
    "yolov3-spp": Architecture(_yolov3(row(SPP, 512)), ANCHORS_PX),
    "yolov3-tiny": Architecture(TINY, TINY_ANCHORS_PX),
}
YOLOV5 = {
    **_in_sizes("yolov5", _yolov5(Detect), V5_SIZES, ANCHORS_PX),
    **_in_sizes("yolov5", _yolov5_p6(Detect), V5_SIZES, P6_ANCHORS_PX, suffix="6"),
}
_V8_STAGES = ((128, 3), (256, 6), (512, 6), (1024, 3))
_ROWS_8 = _pyramid(row(Conv, 64, kernel=3, stride=2), C2f, _V8_STAGES, AnchorFree, reduced=False)
YOLOV8 = {  # and YOLOv5's tables with the head of YOLOv8
    **_in_sizes("yolov8", _ROWS_8, V8_SIZES),
    **_in_sizes("yolov5", _yolov5(AnchorFree), V5_SIZES, suffix="u"),
    **_in_sizes("yolov5", _yolov5_p6(AnchorFree), V5_SIZES, suffix="6u"),
}
YOLO11 = _in_sizes("yolo11", _ROWS_11, V11_SIZES)
YOLO12 = _in_sizes("yolo12", _ROWS_12, V11_SIZES)
YOLO26 = _in_sizes("yolo26", _ROWS_26, V11_SIZES)
