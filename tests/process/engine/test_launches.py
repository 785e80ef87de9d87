"""The operations that a training step queues on a device, by phase. On a GPU each is at least one kernel launch, and a
step of 16 images is bound by their number, so it may fall and must not rise.

Counted on `meta` tensors, which run the same code as a GPU's tensors without values. Views are no launches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ray_yolo.config.recipe import Recipe
from ray_yolo.models.batch_norm import Statistics
from ray_yolo.models.families import build_model, find_family
from ray_yolo.ops.ema import Ema

GOLDEN = Path(__file__).parents[2] / "golden" / "launches.json"
MODELS = ("yolov3-tiny", "yolov5n", "yolov5n6", "yolov5nu", "yolov8n", "yolo11n", "yolo12n", "yolo26n")
NOTHING = {f"aten.{name}" for name in ("empty.memory_format", "empty_like.default", "new_empty.default",
                                       "empty_strided.default")}
CLASSES, SIDE = 3, 64


class Counter(TorchDispatchMode):
    """Counts the operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and str(function) not in NOTHING:
            self.count += 1
        return function(*args, **(kwargs or {}))


def launches(name: str) -> dict[str, int]:
    """The operations of one microbatch and of one update of the statistics and the average, by phase."""
    counts: dict[str, int] = {}

    @contextmanager
    def phase(title: str) -> Iterator[None]:
        with Counter() as counter:
            yield
        counts[title] = counter.count

    family = find_family(name)
    without_autocast = patch.object(torch, "autocast", lambda *_, **__: nullcontext())  # `meta` has none
    with torch.device("meta"), without_autocast:
        model = build_model(name, CLASSES)
        loss = family.build_loss(model.head, Recipe(model=name, data="unused").loss, CLASSES, SIDE)
        statistics = Statistics(model)
        average = Ema(model, 0.9999, 2000)
        images = torch.empty(2, 3, SIDE, SIDE)
        targets = torch.empty(4, 6)
        average.update(model, 1)  # lists its tensors
        loss.terms(torch.ones(len(loss.names), 1), torch.ones(()))  # moves its gains to the device
        with phase("forward"):
            levels = model(images)
        with phase("loss"):
            sums = loss.measure(levels, targets, (SIDE, SIDE))
            total = loss.terms(sums.numerators, sums.counts).sum()
        with phase("backward"):
            total.backward()
        with phase("statistics"):
            statistics.apply(statistics.recorded(0), 1)
        with phase("average"):
            average.update(model, 2)
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_a_step_needs_no_more_launches_than_recorded(name: str) -> None:
    recorded = json.loads(GOLDEN.read_text())[name]
    counted = launches(name)
    more = {phase: f"{counted[phase]}, recorded {recorded[phase]}" for phase in recorded
            if counted[phase] > recorded[phase]}
    assert counted.keys() == recorded.keys()
    assert not more, f"{more}: fewer are better; if more are needed, write why, and run this file as a program"


def test_an_operation_more_is_counted() -> None:
    """Negative control."""
    values = torch.ones(3, device="meta")
    with Counter() as counter:
        (values.view(3) + 1).mul_(2)
    assert counter.count == 2


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: launches(name) for name in MODELS}, indent=1) + "\n")
