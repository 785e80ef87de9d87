"""Checkpoints in a store: the state after each way an upload can end, and which checkpoint is used."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_yolo.checkpoints.remote_checkpoints import RemoteCheckpoints
from ray_yolo.config.placement import Placement
from ray_yolo.core.events import CheckpointEvent, Event
from ray_yolo.core.structures import Orders
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.session import run_session
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.storage.store import FolderStore
from tests.support.checkpoints import save
from tests.support.jobs import make_spec
from tests.support.object_storage import DistantStore
from tests.support.workers import Ordered, run_workers, wrap_model
from tests.unit.checkpoints.test_remote_checkpoints import Machine, here, names, store

__all__ = ["here", "store"]  # fixtures


def train(collectives: Collectives, spec: TrainSpec, machines: Path, bucket: Path, stops_at: int) -> dict[str, Any]:
    """Train as a worker of a machine of its own until a step. Returns the digests of the saved states by step."""
    events: list[Event] = []
    spec = replace(spec, run_dir=machines / str(collectives.rank))
    spec.run_dir.mkdir(parents=True)
    calls = iter(range(1, 100))
    run_session(spec, WorkerContext(prepare_model=lambda model: wrap_model(model, collectives),
                          stored=RemoteCheckpoints(FolderStore(bucket), 1)),
                Placement(keep_checkpoints=1), events.append,
                Ordered(collectives, lambda: Orders(stop=next(calls) == stops_at)))
    return {str(event.step): event.digest for event in events if isinstance(event, CheckpointEvent)}


def test_workers_without_a_common_folder_continue_from_the_store(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, epochs=2)
    (uninterrupted,) = run_workers(1, train, spec, tmp_path / "uninterrupted", tmp_path / "other", 0)
    first, _ = run_workers(2, train, spec, tmp_path / "before", tmp_path / "bucket", 4)
    second, silent = run_workers(2, train, spec, tmp_path / "after", tmp_path / "bucket", 0)
    assert (sorted(first), sorted(second), sorted(uninterrupted)) == (["3", "4"], ["6"], ["3", "6"])
    assert second["6"] == uninterrupted["6"]
    assert silent == {}
    assert [path.name for path in (tmp_path / "after" / "1" / "checkpoints").iterdir()] == ["step-4"]


@pytest.mark.parametrize("first", [True, False], ids=["first save of a process", "later save"])
def test_a_save_beside_a_hundred_checkpoints_takes_few_round_trips(tmp_path: Path, first: bool) -> None:
    distant = DistantStore(tmp_path / "store")
    here = Machine(tmp_path / "here", distant)
    for step in range(101):
        here.save(step, "last", keep=100)
    folder = save(here.folder, 101, "last")
    stored = RemoteCheckpoints(distant, 1) if first else here.stored
    distant.requests.clear()
    distant.delay, start = 0.1, time.monotonic()
    stored.put(folder, keep=100)
    seconds = time.monotonic() - start
    print(f"{dict(distant.requests)}: {seconds:.1f} s")
    assert seconds < 2.5
    assert distant.requests["get"] <= (103 if first else 4)
    assert distant.most_at_once <= 32
    assert len(names(distant, "checkpoints/")) == 100
