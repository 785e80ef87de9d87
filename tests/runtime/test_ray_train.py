"""What Ray Train asks about workers that have failed; what it is asked for: tests/test_flag_effects.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ray_yolo.runtime.ray_train import Asked


def test_what_ray_asks_is_decided_for_all_workers_together() -> None:
    decided: list[Any] = []
    judge: Any = SimpleNamespace(decide=lambda failures, others_go_on: decided.append((failures, others_go_on)))
    Asked(judge).after_exception(run_context=None, worker_exceptions={1: OSError("odd")})
    assert [(list(failures), others) for failures, others in decided] == [([1], False)]
