"""When a lost worker is replaced alone."""

from __future__ import annotations

import pytest
from ray.train.torch import TorchConfig

from ray_yolo.runtime import in_place
from ray_yolo.runtime.in_place import InPlaceConfig, can_replace


def test_an_older_ray_and_gpus_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_replace(0.0)
    assert not can_replace(1.0)
    monkeypatch.setattr(in_place, "_TorchBackend", object)
    assert not can_replace(0.0)


def test_ray_is_told_and_forms_no_group_of_its_own() -> None:
    backend = InPlaceConfig(backend="gloo").backend_cls
    assert backend.has_replica_groups
    assert not TorchConfig().backend_cls.has_replica_groups
    for hook in (backend.on_start, backend.on_training_start, backend.on_shutdown):
        assert hook(backend(), None, None) is None  # the worker group is not touched
