"""YOLOv3 on Darknet-53, with and without spatial pyramid pooling, and YOLOv3-tiny."""

from __future__ import annotations

from ray_yolo.models.detector import Architecture
from ray_yolo.models.rows import (
    BottleneckRow,
    ConcatRow,
    ConvRow,
    DetectRow,
    MaxPoolRow,
    Row,
    SPPRow,
    UpsampleRow,
    ZeroPadRow,
)

DARKNET53: tuple[Row, ...] = (
    ConvRow(32, kernel=3),
    ConvRow(64, kernel=3, stride=2),
    BottleneckRow(64),
    ConvRow(128, kernel=3, stride=2),
    BottleneckRow(128, repeats=2),
    ConvRow(256, kernel=3, stride=2),
    BottleneckRow(256, repeats=8),  # 6: P3
    ConvRow(512, kernel=3, stride=2),
    BottleneckRow(512, repeats=8),  # 8: P4
    ConvRow(1024, kernel=3, stride=2),
    BottleneckRow(1024, repeats=4),
)


def _with_neck(pooling: Row) -> tuple[Row, ...]:
    """The table of YOLOv3 with this row 12."""
    return (
        *DARKNET53,
        BottleneckRow(1024, shortcut=False),
        pooling,
        ConvRow(1024, kernel=3),
        ConvRow(512),
        ConvRow(1024, kernel=3),  # 15: head, stride 32
        ConvRow(256, source=(-2,)),
        UpsampleRow(),
        ConcatRow(source=(-1, 8)),
        BottleneckRow(512, shortcut=False),
        BottleneckRow(512, shortcut=False),
        ConvRow(256),
        ConvRow(512, kernel=3),  # 22: head, stride 16
        ConvRow(128, source=(-2,)),
        UpsampleRow(),
        ConcatRow(source=(-1, 6)),
        BottleneckRow(256, shortcut=False),
        BottleneckRow(256, shortcut=False, repeats=2),  # 27: head, stride 8
        DetectRow(source=(27, 22, 15)),
    )


TINY: tuple[Row, ...] = (
    ConvRow(16, kernel=3),
    MaxPoolRow(2, 2),
    ConvRow(32, kernel=3),
    MaxPoolRow(2, 2),
    ConvRow(64, kernel=3),
    MaxPoolRow(2, 2),
    ConvRow(128, kernel=3),
    MaxPoolRow(2, 2),
    ConvRow(256, kernel=3),  # 8: P4
    MaxPoolRow(2, 2),
    ConvRow(512, kernel=3),
    ZeroPadRow((0, 1, 0, 1)),
    MaxPoolRow(2, 1),
    ConvRow(1024, kernel=3),
    ConvRow(256),
    ConvRow(512, kernel=3),  # 15: head, stride 32
    ConvRow(128, source=(-2,)),
    UpsampleRow(),
    ConcatRow(source=(-1, 8)),
    ConvRow(256, kernel=3),  # 19: head, stride 16
    DetectRow(source=(19, 15)),
)

ANCHORS_PX = (  # fitted to COCO at 640 pixels; YOLOv5's too
    ((10, 13), (16, 30), (33, 23)),
    ((30, 61), (62, 45), (59, 119)),
    ((116, 90), (156, 198), (373, 326)),
)
TINY_ANCHORS_PX = (
    ((10, 14), (23, 27), (37, 58)),
    ((81, 82), (135, 169), (344, 319)),
)

MODELS = {
    "yolov3": Architecture(_with_neck(ConvRow(512)), ANCHORS_PX),
    "yolov3-spp": Architecture(_with_neck(SPPRow(512)), ANCHORS_PX),
    "yolov3-tiny": Architecture(TINY, TINY_ANCHORS_PX),
}
