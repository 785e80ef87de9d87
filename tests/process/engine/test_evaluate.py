"""Validation of a detector with hand-written detections, so that its metrics are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ray_yolo.engine.collectives import Collectives
from tests.support.workers import run_workers
from tests.unit.engine.test_evaluate import Scenes, five, run

__all__ = ["five"]  # fixtures


def numbers(collectives: Collectives, scenes: Scenes) -> dict[str, Any]:
    found = run(collectives, scenes)
    return {**found.summary, "ap": torch.from_numpy(found.metrics.ap), "losses": list(found.losses.values()),
            "detections": torch.from_numpy(found.detections)}


# Of a, right and wrong alternate as + + - + +: precision 1 up to recall 1/2, then 4/5. Of b, both are right at six
# thresholds; at the other four the second is not: precision 1 up to recall 1/2, then falling from 1/2 to 0.
AP_OF_A, AP_OF_B = 0.895, (0.995,) * 6 + (0.625,) * 4


def check(result: dict[str, Any]) -> None:
    """Against the numbers worked by hand; areas are cut into 101 recalls."""
    expected = torch.tensor([(AP_OF_A,) * 10, AP_OF_B], dtype=torch.double)
    assert torch.allclose(result["ap"], expected, atol=0.003)
    assert result["mAP50"] == pytest.approx((0.895 + 0.995) / 2, abs=0.003)
    assert result["mAP50-95"] == pytest.approx((0.895 + 0.847) / 2, abs=0.003)
    assert result["precision"] == pytest.approx((4 / 5 + 1) / 2, abs=1e-6)
    assert result["recall"] == pytest.approx(1, abs=1e-6)
    assert result["losses"] == pytest.approx([31 / 5, 0, 6 / 5])  # over images, not means of batches' means


def test_numbers_worked_by_hand_on_one_worker_and_on_two_over_three_batches(five: Scenes) -> None:
    [alone] = run_workers(1, numbers, five)
    check(alone)
    for worker, result in enumerate(run_workers(2, numbers, five)):
        check(result)
        assert torch.equal(result["ap"], alone["ap"])
        assert torch.equal(result["detections"], alone["detections"][:0] if worker else alone["detections"])
        assert result["losses"] == alone["losses"]
