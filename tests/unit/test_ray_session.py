"""Tests that need Ray share one, which ends with the last of them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import ray

from ray_yolo.runtime import cluster, ray_internals
from tests import conftest

WITH_RAY, OTHER = (SimpleNamespace(nodeid=f"tests/{file}::test", path=file)
                   for file in ("process/runtime/test_trainer.py", "unit/ops/test_nms.py"))


def test_ray_ends_with_the_last_file_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[bool]()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(
        shutdown=lambda: ended.append(True), is_initialized=lambda: True, cluster_resources=lambda: {"CPU": 4.0},
        available_resources=lambda: {"CPU": 4.0}))
    for pair in ((WITH_RAY, WITH_RAY), (OTHER, OTHER), (OTHER, WITH_RAY), (WITH_RAY, None)):
        conftest.pytest_runtest_teardown(*pair)
    assert ended == []
    conftest.pytest_runtest_teardown(WITH_RAY, OTHER)
    assert ended == [True]


def test_a_file_that_leaves_a_cpu_held_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, reply in (("is_initialized", True), ("cluster_resources", {"CPU": 4.0}),
                        ("available_resources", {"CPU": 3.0})):
        monkeypatch.setattr(ray, name, lambda reply=reply: reply)
    freed = list[str]()
    monkeypatch.setattr(cluster, "placement_groups", lambda: [SimpleNamespace(id="its group")])
    monkeypatch.setattr(cluster, "free", freed.extend)
    monkeypatch.setattr(ray_internals, "holdings", list)
    with pytest.raises(AssertionError, match=r"test_trainer\.py has left on Ray: .*its group"):
        conftest.assert_cpus_are_free("test_trainer.py", patience_seconds=0.0)
    assert freed == ["its group"]
