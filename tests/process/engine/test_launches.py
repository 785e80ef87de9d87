"""The operations that a training step queues on a device, by phase. On a GPU each is at least one kernel launch, and a
step of 16 images is bound by their number, so it may fall and must not rise.

Counted on `meta` tensors, which run the same code as a GPU's tensors without values. Views are no launches.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.benchmarks.launch_counter import Counter
from tests.benchmarks.launches import own_phases

GOLDEN = Path(__file__).parents[2] / "golden" / "launches.json"
MODELS = ("yolov3-tiny", "yolov5n", "yolov5n6", "yolov5nu", "yolov8n", "yolo11n", "yolo12n", "yolo26n")


@pytest.mark.parametrize("name", MODELS)
def test_a_step_needs_no_more_launches_than_recorded(name: str) -> None:
    recorded = json.loads(GOLDEN.read_text())[name]
    counted = own_phases(name).launches
    more = {phase: f"{counted[phase]}, recorded {recorded[phase]}" for phase in recorded
            if counted[phase] > recorded[phase]}
    assert counted.keys() == recorded.keys()
    assert not more, f"{more}: fewer are better; if more are needed, write why, and run this file as a program"


def test_an_operation_more_is_counted() -> None:
    """Negative control."""
    values = torch.ones(3, device="meta")
    with Counter() as counter:
        (values.view(3) + 1).mul_(2)
    assert (counter.count, counter.waits) == (2, 0)


def test_the_host_waits_for_numbers_and_for_shapes_that_depend_on_values() -> None:
    values = torch.tensor([1.0, 0.0, 2.0])
    with Counter() as counter:
        float(values[0])
        values.nonzero()
        values[values > 0]
        values[values > 1] = 0.0  # by a number: `masked_fill_`, which does not wait
        if values.sum() > 0:
            values.add_(1)
    assert counter.waits == 4


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: own_phases(name).launches for name in MODELS}, indent=1) + "\n")
