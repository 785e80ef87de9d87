"""What Ray Train is asked for, and told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.train.torch import TorchConfig

from ray_yolo.runtime import ray_train
from ray_yolo.runtime.ray_train import Asked, InPlaceConfig, can_replace


def test_an_older_ray_and_gpus_cannot_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_replace(0.0)
    assert not can_replace(1.0)
    monkeypatch.setattr(ray_train, "_TorchBackend", object)
    assert not can_replace(0.0)


def test_ray_is_told_and_forms_no_group_of_its_own() -> None:
    backend = InPlaceConfig(backend="gloo").backend_cls
    assert backend.has_replica_groups
    assert not TorchConfig().backend_cls.has_replica_groups
    for hook in (backend.on_start, backend.on_training_start, backend.on_shutdown):
        assert hook(backend(), None, None) is None  # the worker group is not touched


def test_what_ray_asks_is_decided_for_all_workers_together() -> None:
    decided: list[Any] = []
    judge: Any = SimpleNamespace(decide=lambda failures, others_go_on: decided.append((failures, others_go_on)))
    Asked(judge).after_exception(run_context=None, worker_exceptions={1: OSError("odd")})
    assert [(list(failures), others) for failures, others in decided] == [([1], False)]
