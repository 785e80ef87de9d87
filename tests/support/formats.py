"""One data set written in each of the formats that are read: YOLO text files, COCO JSON, Pascal VOC XML.

Boxes have whole pixels, so that no format has to round them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from ray_yolo.core.structures import Annotation, AnnotationIndex
from tests.support.jobs import make_index

NAMES = ("dark & dull", "bright <1>")  # which XML has to escape
COCO_IDS = (90, 7)  # sparse, and in another order than the classes
SPLITS = {"train": (37, 0), "val": (11, 1)}  # images, seed


def write_yolo(root: Path) -> tuple[Path, dict[str, AnnotationIndex]]:
    """`images/` and `labels/`. Returns the YAML file, and what each split's images show."""
    shown = {split: _draw(root / "images" / split, split) for split in SPLITS}
    for split, index in shown.items():
        for item in items(index):
            if len(item.classes):
                write(root / "labels" / split / f"{Path(item.path).stem}.txt", yolo_rows(item))
    return _describe(root, "images/train", "images/val"), shown


def write_coco(root: Path) -> tuple[Path, dict[str, AnnotationIndex]]:
    """`annotations/instances_*.json`, its rows in no order of images; see `write_yolo`."""
    shown = {split: _draw(root / split, split) for split in SPLITS}
    for split, index in shown.items():
        write(root / "annotations" / f"instances_{split}.json", json.dumps(coco_content(index)))
    return _describe(root, "annotations/instances_train.json", "annotations/instances_val.json"), shown


def write_voc(root: Path) -> tuple[Path, dict[str, AnnotationIndex]]:
    """`JPEGImages/` and `Annotations/`; see `write_yolo`."""
    shown = {split: _draw(root / split / "JPEGImages", split) for split in SPLITS}
    for split, index in shown.items():
        for item in items(index):
            write(root / split / "Annotations" / f"{Path(item.path).stem}.xml", voc_xml(item))
    return _describe(root, "train/JPEGImages", "val/JPEGImages"), shown


FORMATS: dict[str, Callable[[Path], tuple[Path, dict[str, AnnotationIndex]]]] = {
    "yolo": write_yolo, "coco": write_coco, "voc": write_voc}


def _draw(folder: Path, split: str) -> AnnotationIndex:
    """The split's images; the last one is background."""
    num_images, seed = SPLITS[split]
    index = make_index(folder, num_images, seed)
    labels = int(index.offsets[-2])
    return replace(index, names=NAMES, offsets=np.minimum(index.offsets, labels), classes=index.classes[:labels],
                   boxes=index.boxes[:labels])


def items(index: AnnotationIndex) -> list[Annotation]:
    return [index[number] for number in range(len(index))]


def yolo_rows(item: Annotation) -> str:
    height, width = item.size
    return "\n".join(f"{kind} {(x1 + x2) / 2 / width} {(y1 + y2) / 2 / height} {(x2 - x1) / width} {(y2 - y1) / height}"
                     for kind, (x1, y1, x2, y2) in zip(item.classes, item.boxes.tolist(), strict=True))


def coco_content(index: AnnotationIndex) -> dict[str, object]:
    images = [{"id": 1000 - number, "file_name": Path(item.path).name, "height": item.size[0], "width": item.size[1]}
              for number, item in enumerate(items(index))]
    rows = [{"id": 10 * number + place, "image_id": 1000 - number, "category_id": COCO_IDS[kind], "iscrowd": 0,
             "bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)}
            for number, item in enumerate(items(index))
            for place, (kind, (x1, y1, x2, y2)) in enumerate(zip(item.classes, item.boxes.tolist(), strict=True))]
    rows.sort(key=lambda row: row["id"] % 10)  # every image's first label, then every image's second
    return {"images": images, "annotations": rows,
            "categories": [{"id": number, "name": name} for number, name in zip(COCO_IDS, NAMES, strict=True)]}


def voc_xml(item: Annotation) -> str:
    """VOC's pixels count from 1, and the last one belongs to the box."""
    objects = "".join(
        f"<object><name>{escape(NAMES[kind])}</name><bndbox><xmin>{x1 + 1:.0f}</xmin><ymin>{y1 + 1:.0f}</ymin>"
        f"<xmax>{x2:.0f}</xmax><ymax>{y2:.0f}</ymax></bndbox></object>\n"
        for kind, (x1, y1, x2, y2) in zip(item.classes, item.boxes.tolist(), strict=True))
    return f"<annotation><filename>{Path(item.path).name}</filename>\n{objects}</annotation>\n"


def _describe(root: Path, train: str, val: str) -> Path:
    return write(root / "data.yaml", f"train: {train}\nval: {val}\nnames: {json.dumps(NAMES)}\n")


def write(path: Path, text: str) -> Path:
    """Write a text file, its folders too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
