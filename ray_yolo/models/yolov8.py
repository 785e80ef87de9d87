"""YOLOv8 in its five sizes, and YOLOv5 with the same head."""

from __future__ import annotations

from ray_yolo.models import yolov5
from ray_yolo.models.detector import Architecture
from ray_yolo.models.rows import AnchorFreeRow, C2fRow, ConcatRow, ConvRow, SPPFRow, UpsampleRow

ROWS = (
    ConvRow(64, kernel=3, stride=2),
    ConvRow(128, kernel=3, stride=2),
    C2fRow(128, repeats=3),
    ConvRow(256, kernel=3, stride=2),
    C2fRow(256, repeats=6),  # 4: P3
    ConvRow(512, kernel=3, stride=2),
    C2fRow(512, repeats=6),  # 6: P4
    ConvRow(1024, kernel=3, stride=2),
    C2fRow(1024, repeats=3),
    SPPFRow(1024, kernel=5),  # 9: P5
    UpsampleRow(),
    ConcatRow(source=(-1, 6)),
    C2fRow(512, shortcut=False, repeats=3),
    UpsampleRow(),
    ConcatRow(source=(-1, 4)),
    C2fRow(256, shortcut=False, repeats=3),  # 15: head, stride 8
    ConvRow(256, kernel=3, stride=2),
    ConcatRow(source=(-1, 12)),
    C2fRow(512, shortcut=False, repeats=3),  # 18: head, stride 16
    ConvRow(512, kernel=3, stride=2),
    ConcatRow(source=(-1, 9)),
    C2fRow(1024, shortcut=False, repeats=3),  # 21: head, stride 32
    AnchorFreeRow(source=(15, 18, 21)),
)

SIZES = {"n": (0.33, 0.25, 1024), "s": (0.33, 0.50, 1024), "m": (0.67, 0.75, 768), "l": (1.00, 1.00, 512),
         "x": (1.00, 1.25, 512)}

MODELS = {f"yolov8{size}": Architecture(ROWS, None, *multiples) for size, multiples in SIZES.items()} | {
    f"{name}u": Architecture((*table.rows[:-1], AnchorFreeRow(source=table.rows[-1].source)), None, table.depth,
                             table.width)
    for name, table in yolov5.MODELS.items()}
