"""The twelve COCO numbers: worked by hand, and against two reference implementations."""

import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ray_yolo.ops.coco_metrics import coco_metrics
from tests.support.coco_oracle import random_case, reference


def test_a_thousand_random_cases_equal_pycocotools() -> None:
    for seed in range(1000):
        case = random_case(seed)
        assert coco_metrics(*case) == pytest.approx(reference(*case, COCO, COCOeval), abs=1e-6), seed
