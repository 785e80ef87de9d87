"""Every label file says what its maker meant, or there is a finding: one table over all formats and situations."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ray_yolo.config.sections import AugmentConfig
from ray_yolo.core.errors import DatasetError
from ray_yolo.core.structures import AnnotationIndex, SampleKey
from ray_yolo.data.dataset import TrainDataset, ValDataset, cut_batches
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.index import read_index
from ray_yolo.labels.rows import LabelOptions
from tests.support.label_cases import CASES, Case

STILL = AugmentConfig(mosaic=0, scale=0, translate=1e-9, fliplr=0, hsv_h=0, hsv_s=0, hsv_v=0)  # boxes follow outlines
IMGSZ = 96  # pictures keep their size


def test_the_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_label_file_is_read_as_it_was_meant(case: Case, tmp_path: Path) -> None:
    if case.refused:
        with pytest.raises(DatasetError, match=case.refused):
            read_index(case.write(tmp_path), "train", options=LabelOptions(**case.options))
        return
    description = case.write(tmp_path)
    index, val = (read_index(description, split, options=LabelOptions(**case.options)) for split in ("train", "val"))
    assert val.digest == index.digest
    names = [Path(path).name for path in index.paths]
    assert names == (["b.png"] if case.boxes is None else ["a.png", "b.png"])
    assert_findings(case, index)
    if case.boxes is None:
        return
    read = np.column_stack([index[0].classes, index[0].boxes])
    assert read.shape == (len(case.boxes), 5), read
    assert np.allclose(read, np.array(case.boxes).reshape(-1, 5), atol=1e-4), read
    assert sum(len(outline) > 0 for outline in index[0].polygons) == case.outlined
    assert_training_and_validation_agree(index)


def assert_findings(case: Case, index: AnnotationIndex) -> None:
    lines = [f"{finding.where}: {finding.what}" for finding in index.findings]
    assert len(lines) == len(case.findings), lines
    for pattern, line in zip(case.findings, lines, strict=True):
        assert re.search(pattern, line), line
    assert any(finding.image for finding in index.findings) == (case.boxes is None)


def assert_training_and_validation_agree(index: AnnotationIndex) -> None:
    """Both get the same boxes, but for sides up to two pixels and the tolerance between a bbox and its outline."""
    store = ImageStore(index, IMGSZ)
    sample = TrainDataset(index, store, STILL, IMGSZ, 0, 1)[SampleKey(0, 0, 0)]
    batches = cut_batches(index, IMGSZ, 1, 32)
    number = next(number for number, batch in enumerate(batches) if batch.indices == (0,))
    validated = ValDataset(index, store, batches)[number]
    ratio, pad = validated["ratios"][0].numpy(), validated["pads"][0].numpy()
    boxes = (validated["targets"][:, 2:].numpy() - pad[[1, 0, 1, 0]]) / ratio[[1, 0, 1, 0]]
    assert np.allclose(boxes, index[0].boxes, atol=1e-3)
    height, width = index[0].size
    margin = np.array([(IMGSZ - width) // 2, (IMGSZ - height) // 2] * 2)
    large = (index[0].boxes[:, 2:] - index[0].boxes[:, :2]).min(axis=1) > 2
    tolerance = 2.05 if index[0].polygons else 0.05
    assert np.allclose(sample["boxes"].numpy(), index[0].boxes[large] + margin, atol=tolerance)
