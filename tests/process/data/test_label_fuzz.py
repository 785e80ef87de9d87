"""Thousands of random label files from fixed seeds: each gives valid labels or a clear error."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_yolo.core.structures import Finding
from ray_yolo.labels.coco import CocoFile
from ray_yolo.labels.rows import ImageLabels, LabelRules, Labels, UnreadableLabelsError
from ray_yolo.labels.rules import Code
from ray_yolo.labels.voc import parse_voc
from ray_yolo.labels.yolo_txt import parse_labels
from tests.support.fuzz import NUMBERS, damage, pick, replace_one, tally
from tests.support.pictures import smooth_picture, write_image

pytestmark = pytest.mark.timeout(120)

SIZE = (48, 64)  # (height, width)
NAMES = ("cat", "dog", "owl")
GLUE = (" ", " ", " ", " ", "\t", "  ", ",", ";", "\u00a0", "\u3000", "", "\x0b", "\x1c", "\0", "\u2028", "\r")
COLUMNS = (1, 4, 5, 5, 5, 6, 7, 7, 8, 9, 3001)

VOC = ("<?xml version='1.0' encoding='utf-8'?><annotation><size><width>64</width></size><object><name>cat</name>"
       "<bndbox><xmin>3</xmin><ymin>4</ymin><xmax>30</xmax><ymax>40</ymax></bndbox></object></annotation>")
ENCODINGS = ("utf-8", "utf-8", "latin-1", "gbk", "utf-16", "base64", "")

COCO = {"images": [{"id": 1, "file_name": "a.png", "height": 48, "width": 64}],
        "categories": [{"id": 5, "name": "cat"}, {"id": 9, "name": "dog"}, {"id": 2, "name": "owl"}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 9, "bbox": [3, 4, 30, 20], "iscrowd": 0,
                         "segmentation": [[3, 4, 33, 4, 20, 24]]}]}
JSON_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1e-9, 1e308, 10**400, float("nan"), float("inf"), "", "5", "\ud800", "a\0b", "x" * 5000,
    "../a.png", [], {}, [[]], [3, 4, 1e-30, 20], [1e300, 0, 1e300, 5], [[10**400] * 6], [[float("nan")] * 8])


def check_labels(labels: Labels) -> None:
    """Finite boxes inside the image, with an area, of named classes."""
    boxes, count = labels.boxes, len(labels.classes)
    assert boxes.dtype == np.float32
    assert boxes.shape == (count, 4)
    assert np.isfinite(boxes).all()
    assert (boxes >= 0).all()
    assert (boxes <= (SIZE[1], SIZE[0]) * 2).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all()
    assert ((boxes[:, 2:] - boxes[:, :2]).prod(axis=1) > 0).all()
    assert ((labels.classes >= 0) & (labels.classes < len(NAMES))).all()
    assert len(labels.polygons) in (0, count)
    assert all(np.isfinite(outline).all() for outline in labels.polygons)


def check_result(read: ImageLabels, findings: Sequence[Finding] = ()) -> None:
    """`check_labels`; a dropped row is raised as `UnreadableLabelsError`, for `tally`."""
    check_labels(read.labels)
    if dropped := [finding for finding in (*findings, *read.findings) if finding.dropped]:
        raise UnreadableLabelsError(Code[dropped[0].code], dropped[0].where, *dropped[0].values)


def rows(rng: np.random.Generator, count: int) -> Iterator[bytes]:
    """Rows that are right or nearly right, ones of odd numbers, damaged ones, noise."""
    for number in range(count):
        words = [str(rng.integers(0, 4)), *(f"{share:.{rng.integers(1, 18)}g}" for share in rng.random(4))]
        glue = " "
        if number % 4 == 1:
            words[rng.integers(len(words))] = pick(rng, NUMBERS)
        elif number % 4 == 2:
            words, glue = [pick(rng, NUMBERS) for _ in range(pick(rng, COLUMNS))], pick(rng, GLUE)
        row = glue.join(words).encode()
        if number % 4 == 3:
            row = damage(rng, row) if rng.random() < 0.8 else rng.bytes(int(rng.integers(1, 60)))
        yield row


def xmls(rng: np.random.Generator, count: int) -> Iterator[bytes]:
    """VOC's file with one value replaced and another encoding, or damaged."""
    for number in range(count):
        text = VOC.replace(pick(rng, (">3<", ">4<", ">30<", ">40<", ">cat<")), f">{pick(rng, NUMBERS)}<")
        yield text.replace("utf-8", pick(rng, ENCODINGS)).encode() if number % 2 else damage(rng, VOC.encode())


def jsons(rng: np.random.Generator, count: int) -> Iterator[bytes]:
    """COCO's file with one value replaced, or damaged."""
    for number in range(count):
        content = COCO if number % 2 else replace_one(rng, COCO, JSON_VALUES)
        text = json.dumps(content).encode()
        yield damage(rng, text) if number % 2 else text


def test_ten_thousand_rows_are_valid_labels_or_errors() -> None:
    ends = tally(rows(np.random.default_rng(0), 10_000),
                 lambda row: check_result(parse_labels(row, SIZE, LabelRules(NAMES), "a.txt")))
    assert min(ends["read"], ends["left out"]) > 500
    assert ends["refused"] == 0


def test_xml_files_are_valid_labels_or_errors() -> None:
    ends = tally(xmls(np.random.default_rng(1), 5000),
                 lambda content: check_result(parse_voc(content, SIZE, LabelRules(NAMES), "a.xml")))
    assert min(ends["read"], ends["left out"]) > 100
    assert ends["refused"] == 0


def test_coco_files_are_valid_labels_or_errors(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", smooth_picture(*SIZE))

    def read(content: bytes) -> None:
        (tmp_path / "a.json").write_bytes(content)
        file = CocoFile(tmp_path / "a.json", tmp_path, NAMES)
        for path in file.paths:
            result = file.read(path, SIZE)
            check_result(result, file.findings)

    ends = tally(jsons(np.random.default_rng(2), 3000), read)
    assert min(ends["read"], ends["left out"], ends["refused"]) > 100
