"""The model zoo as tables of rows: YOLOv3 (Darknet-53), YOLOv5 (layout of v6.0), YOLOv8, YOLO11, YOLO12, YOLO26."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from ray_yolo.models import rows
from ray_yolo.models.detector import Architecture

ANCHORS_PX = (  # fitted to COCO at 640 pixels; YOLOv3's and YOLOv5's
    ((10, 13), (16, 30), (33, 23)),
    ((30, 61), (62, 45), (59, 119)),
    ((116, 90), (156, 198), (373, 326)),
)
P6_ANCHORS_PX = (  # at 1280 pixels
    ((19, 27), (44, 40), (38, 94)),
    ((96, 68), (86, 152), (180, 137)),
    ((140, 301), (303, 264), (238, 542)),
    ((436, 615), (739, 380), (925, 792)),
)
TINY_ANCHORS_PX = (
    ((10, 14), (23, 27), (37, 58)),
    ((81, 82), (135, 169), (344, 319)),
)


Block = Callable[..., rows.WideRow]


def _stages(block: Block, *stages: tuple[int, int]) -> Iterator[rows.LayerRow]:
    """A convolution of stride 2 and blocks for each (channels, repeats)."""
    for channels, repeats in stages:
        yield rows.ConvRow(channels, kernel=3, stride=2)
        yield block(channels, shortcut=True, repeats=repeats)


def _yolov3(pooling: rows.LayerRow) -> tuple[rows.LayerRow, ...]:
    """YOLOv3; `pooling` is row 12."""
    return (
        rows.ConvRow(32, kernel=3),
        *_stages(rows.BottleneckRow, (64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)),  # 6: P3, 8: P4
        rows.BottleneckRow(1024, shortcut=False),
        pooling,
        rows.ConvRow(1024, kernel=3),
        rows.ConvRow(512),
        rows.ConvRow(1024, kernel=3),  # 15: head, stride 32
        rows.ConvRow(256, source=(-2,)),
        rows.UpsampleRow(),
        rows.ConcatRow(source=(-1, 8)),
        rows.BottleneckRow(512, shortcut=False),
        rows.BottleneckRow(512, shortcut=False),
        rows.ConvRow(256),
        rows.ConvRow(512, kernel=3),  # 22: head, stride 16
        rows.ConvRow(128, source=(-2,)),
        rows.UpsampleRow(),
        rows.ConcatRow(source=(-1, 6)),
        rows.BottleneckRow(256, shortcut=False),
        rows.BottleneckRow(256, shortcut=False, repeats=2),  # 27: head, stride 8
        rows.DetectRow(source=(27, 22, 15)),
    )


TINY: tuple[rows.LayerRow, ...] = (
    *chain.from_iterable((rows.ConvRow(channels, kernel=3), rows.MaxPoolRow(2, 2))
                         for channels in (16, 32, 64, 128, 256)),  # 8: P4
    rows.ConvRow(512, kernel=3),
    rows.ZeroPadRow((0, 1, 0, 1)),
    rows.MaxPoolRow(2, 1),
    rows.ConvRow(1024, kernel=3),
    rows.ConvRow(256),
    rows.ConvRow(512, kernel=3),  # 15: head, stride 32
    rows.ConvRow(128, source=(-2,)),
    rows.UpsampleRow(),
    rows.ConcatRow(source=(-1, 8)),
    rows.ConvRow(256, kernel=3),  # 19: head, stride 16
    rows.DetectRow(source=(19, 15)),
)


def _pyramid(
    stem: rows.LayerRow,
    block: Block,
    backbone: Sequence[tuple[int, int]],
    head: type[rows.HeadRow],
    *,
    reduced: bool,
) -> tuple[rows.LayerRow, ...]:
    """YOLOv5 and YOLOv8: a backbone, path aggregation from coarse to fine and back, a head on P3 and coarser levels.

    Args:
        backbone: (channels, repeats) of the stages from P2 on.
        reduced: with 1x1 convolutions before upsampling.
    """
    table = [stem, *_stages(block, *backbone), rows.SPPFRow(backbone[-1][0])]
    widths = [channels for channels, _ in backbone[1:-1]]  # of P3 and coarser levels except the last
    joints = []
    for level, channels in reversed(list(enumerate(widths, 1))):  # joins a level of the backbone
        if reduced:
            table.append(rows.ConvRow(channels))
        joints.append(len(table) - 1)
        table += [rows.UpsampleRow(), rows.ConcatRow(source=(-1, 2 * level + 2)),
                  block(channels, shortcut=False, repeats=3)]
    outputs = [len(table) - 1]
    for channels, coarser in zip(widths, [*widths[1:], backbone[-1][0]], strict=True):
        table += [rows.ConvRow(channels, kernel=3, stride=2), rows.ConcatRow(source=(-1, joints.pop())),
                  block(coarser, shortcut=False, repeats=3)]
        outputs.append(len(table) - 1)
    return (*table, head(source=tuple(outputs)))


_STEM = rows.ConvRow(64, kernel=6, stride=2, padding=2)
_P5 = ((128, 3), (256, 6), (512, 9), (1024, 3))
_yolov5 = partial(_pyramid, _STEM, rows.C3Row, _P5, reduced=True)
_yolov5_p6 = partial(_pyramid, _STEM, rows.C3Row, (*_P5[:-1], (768, 3), (1024, 3)), reduced=True)
V5_SIZES = {"n": (0.33, 0.25), "s": (0.33, 0.50), "m": (0.67, 0.75), "l": (1.00, 1.00), "x": (1.33, 1.25)}
V8_SIZES = {"n": (0.33, 0.25, 1024), "s": (0.33, 0.50, 1024), "m": (0.67, 0.75, 768), "l": (1.00, 1.00, 512),
            "x": (1.00, 1.25, 512)}

V11_SIZES = {"n": (0.50, 0.25, 1024), "s": (0.50, 0.50, 1024), "m": (0.50, 1.00, 512), "l": (1.00, 1.00, 512),
             "x": (1.00, 1.50, 512)}  # of YOLO12 and YOLO26, too


def _neck(coarse: rows.WideRow, fine: rows.WideRow, last: rows.WideRow, levels: tuple[int, int, int],
          head: type[rows.HeadRow]) -> tuple[rows.LayerRow, ...]:
    """Path aggregation from P5 to P3 and back, and the head, for YOLO11 and later.

    Args:
        coarse, fine, last: the blocks of P4, P3 and P5.
        levels: rows of P3, P4 and P5 in the backbone.
    """
    p3, p4, p5 = levels
    return (rows.UpsampleRow(), rows.ConcatRow(source=(-1, p4)), coarse,
            rows.UpsampleRow(), rows.ConcatRow(source=(-1, p3)), fine,
            rows.ConvRow(256, kernel=3, stride=2), rows.ConcatRow(source=(-1, p5 + 3)), coarse,
            rows.ConvRow(512, kernel=3, stride=2), rows.ConcatRow(source=(-1, p5)), last,
            head(source=(p5 + 6, p5 + 9, p5 + 12)))


_STAGES_11 = (
    rows.ConvRow(64, kernel=3, stride=2), rows.ConvRow(128, kernel=3, stride=2),
    rows.C3k2Row(256, expansion=0.25, repeats=2), rows.ConvRow(256, kernel=3, stride=2),
    rows.C3k2Row(512, expansion=0.25, repeats=2), rows.ConvRow(512, kernel=3, stride=2))  # 4: P3
_MIDDLE, _DEEP = rows.C3k2Row(512, c3k=True, repeats=2), rows.C3k2Row(1024, c3k=True, repeats=2)
_DOWN = rows.ConvRow(1024, kernel=3, stride=2)
_ROWS_11 = (
    *_STAGES_11, _MIDDLE, _DOWN, _DEEP, rows.SPPFRow(1024), rows.C2PSARow(1024, repeats=2),
    *_neck(rows.C3k2Row(512, repeats=2), rows.C3k2Row(256, repeats=2), _DEEP, (4, 6, 10), rows.LightAnchorFreeRow))
_ROWS_12 = (  # area attention in place of convolutions on P4 and P5
    *_STAGES_11, rows.A2C2fRow(512, areas=4, repeats=4), _DOWN, rows.A2C2fRow(1024, repeats=4),
    *_neck(rows.A2C2fRow(512, attention=False, repeats=2), rows.A2C2fRow(256, attention=False, repeats=2), _DEEP,
           (4, 6, 8), rows.LightAnchorFreeRow))
_ROWS_26 = (  # YOLO11 with C3 blocks in the neck, attention in its last block, and a pair of heads
    *_STAGES_11, _MIDDLE, _DOWN, _DEEP, rows.SPPFRow(1024, residual=True), rows.C2PSARow(1024, repeats=2),
    *_neck(_MIDDLE, rows.C3k2Row(256, c3k=True, repeats=2), rows.C3k2Row(1024, attention=True), (4, 6, 10),
           rows.EndToEndRow))


def _in_sizes(name: str, table: Sequence[rows.LayerRow], sizes: Mapping[str, tuple[float, float, int]]
              ) -> dict[str, Architecture]:
    """The anchor-free models of a table."""
    return {f"{name}{size}": Architecture(tuple(row.of_size(size) for row in table), None, *by)
            for size, by in sizes.items()}


YOLOV3 = {
    "yolov3": Architecture(_yolov3(rows.ConvRow(512)), ANCHORS_PX),
    "yolov3-spp": Architecture(_yolov3(rows.SPPRow(512)), ANCHORS_PX),
    "yolov3-tiny": Architecture(TINY, TINY_ANCHORS_PX),
}
YOLOV5 = {f"yolov5{size}": Architecture(_yolov5(rows.DetectRow), ANCHORS_PX, *by) for size, by in V5_SIZES.items()} | {
    f"yolov5{size}6": Architecture(_yolov5_p6(rows.DetectRow), P6_ANCHORS_PX, *by) for size, by in V5_SIZES.items()}
_V8_ROWS = _pyramid(rows.ConvRow(64, kernel=3, stride=2), rows.C2fRow, ((128, 3), (256, 6), (512, 6), (1024, 3)),
                    rows.AnchorFreeRow, reduced=False)
YOLOV8 = _in_sizes("yolov8", _V8_ROWS, V8_SIZES) | {
    f"yolov5{size}{tail}": Architecture(table(rows.AnchorFreeRow), None, *by)
    for tail, table in (("u", _yolov5), ("6u", _yolov5_p6)) for size, by in V5_SIZES.items()}
YOLO11, YOLO12, YOLO26 = (_in_sizes(name, table, V11_SIZES) for name, table in (
    ("yolo11", _ROWS_11), ("yolo12", _ROWS_12), ("yolo26", _ROWS_26)))
