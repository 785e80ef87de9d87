"""When a lost worker is replaced alone."""

from __future__ import annotations

from typing import Any

import pytest
from ray.train.torch import TorchConfig

from ray_yolo.config.placement import Placement
from ray_yolo.runtime import in_place
from ray_yolo.runtime.in_place import InPlaceConfig, replaces_in_place


@pytest.mark.parametrize(("num_workers", "gpus", "expected"), [
    (2, 0.0, True), (1, 0.0, False), ((2, 4), 0.0, False), (2, 1.0, False)])
def test_a_fixed_number_of_several_workers_on_cpus_can(num_workers: Any, gpus: float, expected: bool) -> None:
    assert replaces_in_place(Placement(num_workers=num_workers), gpus) is expected


def test_an_older_ray_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "_TorchBackend", object)
    assert not replaces_in_place(Placement(num_workers=2), 0.0)


def test_ray_is_told_and_forms_no_group_of_its_own() -> None:
    backend = InPlaceConfig(backend="gloo").backend_cls
    assert backend.has_replica_groups
    assert not TorchConfig().backend_cls.has_replica_groups
    for hook in (backend.on_start, backend.on_training_start, backend.on_shutdown):
        assert hook(backend(), None, None) is None  # the worker group is not touched
