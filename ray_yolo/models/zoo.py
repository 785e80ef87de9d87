"""The model zoo: YOLOv3 on Darknet-53, YOLOv5 (layout of v6.0) and YOLOv8 in their sizes, as tables of rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

from ray_yolo.models import rows
from ray_yolo.models.detector import Architecture

ANCHORS_PX = (  # fitted to COCO at 640 pixels; YOLOv3's and YOLOv5's
    ((10, 13), (16, 30), (33, 23)),
    ((30, 61), (62, 45), (59, 119)),
    ((116, 90), (156, 198), (373, 326)),
)
TINY_ANCHORS_PX = (
    ((10, 14), (23, 27), (37, 58)),
    ((81, 82), (135, 169), (344, 319)),
)


def _stages(block: type[rows.WideRow], *sizes: tuple[int, int]) -> Iterator[rows.Row]:
    """For each (channels, repeats) a convolution that halves the image, and blocks."""
    for channels, repeats in sizes:
        yield rows.ConvRow(channels, kernel=3, stride=2)
        yield block(channels, repeats=repeats)


def _yolov3(pooling: rows.Row) -> tuple[rows.Row, ...]:
    """YOLOv3 with this row 12."""
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


TINY: tuple[rows.Row, ...] = (
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


def _pyramid(stem: rows.Row, block: type[rows.C3Row], p4_repeats: int, head: type[rows.HeadRow], *, reduced: bool
             ) -> tuple[rows.Row, ...]:
    """YOLOv5 and its successors: a backbone, a way from coarse to fine and back (path aggregation), a head on P3, P4
    and P5. `reduced`: there are 1x1 convolutions before upsampling."""
    table = [stem, *_stages(block, (128, 3), (256, 6), (512, p4_repeats), (1024, 3)), rows.SPPFRow(1024)]
    joints = []
    for channels, level in ((512, 6), (256, 4)):  # joins P4 and P3 of the backbone
        if reduced:
            table.append(rows.ConvRow(channels))
        joints.append(len(table) - 1)
        table += [rows.UpsampleRow(), rows.ConcatRow(source=(-1, level)), block(channels, shortcut=False, repeats=3)]
    outputs = [len(table) - 1]
    for channels in (256, 512):
        table += [rows.ConvRow(channels, kernel=3, stride=2), rows.ConcatRow(source=(-1, joints.pop())),
                  block(2 * channels, shortcut=False, repeats=3)]
        outputs.append(len(table) - 1)
    return (*table, head(source=tuple(outputs)))


_yolov5 = partial(_pyramid, rows.ConvRow(64, kernel=6, stride=2, padding=2), rows.C3Row, 9, reduced=True)
V5_SIZES = {"n": (0.33, 0.25), "s": (0.33, 0.50), "m": (0.67, 0.75), "l": (1.00, 1.00), "x": (1.33, 1.25)}
V8_SIZES = {"n": (0.33, 0.25, 1024), "s": (0.33, 0.50, 1024), "m": (0.67, 0.75, 768), "l": (1.00, 1.00, 512),
            "x": (1.00, 1.25, 512)}

YOLOV3 = {
    "yolov3": Architecture(_yolov3(rows.ConvRow(512)), ANCHORS_PX),
    "yolov3-spp": Architecture(_yolov3(rows.SPPRow(512)), ANCHORS_PX),
    "yolov3-tiny": Architecture(TINY, TINY_ANCHORS_PX),
}
YOLOV5 = {f"yolov5{size}": Architecture(_yolov5(rows.DetectRow), ANCHORS_PX, *by) for size, by in V5_SIZES.items()}
_V8_ROWS = _pyramid(rows.ConvRow(64, kernel=3, stride=2), rows.C2fRow, 6, rows.AnchorFreeRow, reduced=False)
YOLOV8 = {f"yolov8{size}": Architecture(_V8_ROWS, None, *by) for size, by in V8_SIZES.items()} | {
    f"yolov5{size}u": Architecture(_yolov5(rows.AnchorFreeRow), None, *by) for size, by in V5_SIZES.items()}
