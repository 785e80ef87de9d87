"""The wait for the resources of workers."""

from __future__ import annotations

import time

import pytest

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import ResourcesError
from ray_yolo.runtime import cluster, map_on_workers

PLACEMENT = Placement(num_workers=(1, 4), cpus_per_worker=1.0, workers=0, timeout_seconds=600)


class Clock:
    """A time that only sleeping changes; an interruption comes at `interrupted_at`."""

    def __init__(self, interrupted_at: float = 1e9) -> None:
        self.now, self.interrupted_at, self.sleeps = 0.0, interrupted_at, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1
        if self.now >= self.interrupted_at:
            raise KeyboardInterrupt


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The placement groups that are removed."""
    groups: list[str] = []
    monkeypatch.setattr(map_on_workers, "placement_group", lambda bundles, strategy: f"{len(bundles)} bundles")
    monkeypatch.setattr(map_on_workers, "remove_placement_group", groups.append)
    monkeypatch.setattr(cluster, "room", lambda placement, gpus: 3)
    monkeypatch.setattr(cluster, "describe_wait", lambda given, gpus: f"waiting for {given.min_workers} workers")
    return groups


def begin(monkeypatch: pytest.MonkeyPatch, clock: Clock, free_at: float = 1e9) -> None:
    """Wait for the workers of three parts."""
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    monkeypatch.setattr(map_on_workers, "is_waiting", lambda group: clock.now < free_at)
    parts = map_on_workers.map_on_workers(print, None, ["a", "b", "c"], PLACEMENT, 0.0)
    monkeypatch.setattr(map_on_workers, "ray", None)  # nothing may be started before the resources are free
    next(parts)


def test_an_interruption_ends_the_wait_and_requests_nothing_any_more(
        monkeypatch: pytest.MonkeyPatch, removed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(interrupted_at=30.0)
    with pytest.raises(KeyboardInterrupt):
        begin(monkeypatch, clock)
    assert removed == ["3 bundles"]
    assert clock.sleeps <= 100  # each look costs a request
    assert capsys.readouterr().err == "waiting for 3 workers\n"


def test_the_wait_ends_after_its_time(monkeypatch: pytest.MonkeyPatch, removed: list[str]) -> None:
    with pytest.raises(ResourcesError):
        begin(monkeypatch, Clock())
    assert removed == ["3 bundles"]


def test_a_short_wait_is_not_reported(
        monkeypatch: pytest.MonkeyPatch, removed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AttributeError):  # it is over: the parts would start
        begin(monkeypatch, Clock(), free_at=2.0)
    assert not capsys.readouterr().err
