"""YOLOv5 (layout of v6.0) in its five sizes."""

from __future__ import annotations

from ray_yolo.models.detector import Architecture
from ray_yolo.models.rows import C3Row, ConcatRow, ConvRow, DetectRow, SPPFRow, UpsampleRow
from ray_yolo.models.yolov3 import ANCHORS_PX

ROWS = (
    ConvRow(64, kernel=6, stride=2, padding=2),
    ConvRow(128, kernel=3, stride=2),
    C3Row(128, repeats=3),
    ConvRow(256, kernel=3, stride=2),
    C3Row(256, repeats=6),  # 4: P3
    ConvRow(512, kernel=3, stride=2),
    C3Row(512, repeats=9),  # 6: P4
    ConvRow(1024, kernel=3, stride=2),
    C3Row(1024, repeats=3),
    SPPFRow(1024, kernel=5),
    ConvRow(512),  # 10: P5
    UpsampleRow(),
    ConcatRow(source=(-1, 6)),
    C3Row(512, shortcut=False, repeats=3),
    ConvRow(256),
    UpsampleRow(),
    ConcatRow(source=(-1, 4)),
    C3Row(256, shortcut=False, repeats=3),  # 17: head, stride 8
    ConvRow(256, kernel=3, stride=2),
    ConcatRow(source=(-1, 14)),
    C3Row(512, shortcut=False, repeats=3),  # 20: head, stride 16
    ConvRow(512, kernel=3, stride=2),
    ConcatRow(source=(-1, 10)),
    C3Row(1024, shortcut=False, repeats=3),  # 23: head, stride 32
    DetectRow(source=(17, 20, 23)),
)

MODELS = {
    "yolov5n": Architecture(ROWS, ANCHORS_PX, depth=0.33, width=0.25),
    "yolov5s": Architecture(ROWS, ANCHORS_PX, depth=0.33, width=0.50),
    "yolov5m": Architecture(ROWS, ANCHORS_PX, depth=0.67, width=0.75),
    "yolov5l": Architecture(ROWS, ANCHORS_PX, depth=1.00, width=1.00),
    "yolov5x": Architecture(ROWS, ANCHORS_PX, depth=1.33, width=1.25),
}
