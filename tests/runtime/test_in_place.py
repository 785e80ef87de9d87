"""When Ray replaces a lost worker alone: real processes on Ray, and the bits of the calm training."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train.torch import TorchConfig

from ray_yolo.config.placement import Placement
from ray_yolo.events import EndEvent, Event, StacksEvent, StartEvent, StepEvent, WarningEvent, WorkerEvent
from ray_yolo.runlog.event_log import read_events, surviving
from ray_yolo.runtime import in_place
from ray_yolo.runtime.in_place import InPlaceConfig, can_replace, replaces_in_place
from tests.runtime.test_kill import command, finish, log_of, start, tensors
from tests.support.run_log import only

SHORT, LONG = 60, 300  # epochs of three steps; in the long one a replacement has time to come up, twice
STALL_SECONDS = 4


@pytest.mark.parametrize(("num_workers", "gpus", "expected"), [
    (2, 0.0, True), (1, 0.0, False), ((2, 4), 0.0, False), (2, 1.0, False)])
def test_a_fixed_number_of_several_workers_on_cpus_can(num_workers: Any, gpus: float, expected: bool) -> None:
    assert replaces_in_place(Placement(num_workers=num_workers), gpus) is expected


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


def argv_of(folder: Path, num_workers: int, epochs: int) -> list[str]:
    return [*command(folder, folder, num_workers), "--epochs", str(epochs), "--set", "augment.mosaic=0", "--mlflow-uri",
            "off", "--cpus-per-worker", "0.5", "--stall-seconds", str(STALL_SECONDS), "--noval"]


def calm(folder: Path, epochs: int) -> Path:
    """The same training without a fault, in one process."""
    folder.mkdir()
    finish(start(argv_of(folder, 0, epochs), folder))
    return folder


def wait_for_steps(process: subprocess.Popen[bytes], folder: Path, generation: int) -> list[Event]:
    """The log, once a generation (from 1) has taken some steps."""
    while True:
        events = read_events(log_of(folder))
        places = [place for place, event in enumerate(events) if isinstance(event, StartEvent)]
        if len(places) >= generation and len(only(StepEvent, events[places[generation - 1]:])) > 5:
            return events
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.02)


def hit(events: list[Event], worker: int, signum: int) -> int:
    """Send a signal to a worker. Returns its process id."""
    pid = next(event.pid for event in only(WorkerEvent, events) if event.worker == worker)
    os.kill(pid, signum)
    return pid


def check(folder: Path, calm: Path, epochs: int) -> list[Event]:
    """Same bits, and no step missing or done twice. Returns the log.

    What the recording worker had to say of its last step may end with it: each generation says where it goes on.
    """
    events, expected = read_events(log_of(folder)), tensors(calm)
    assert all(torch.equal(value, expected[name]) for name, value in tensors(folder).items())
    starts, steps = only(StartEvent, events), [event.step for event in only(StepEvent, surviving(events))]
    assert len(set(steps)) == len(steps)
    assert set(range(1, 3 * epochs + 1)) - set(steps) <= {start.step for start in starts}
    assert only(EndEvent, events)[-1].status == "done"
    assert all(after.step > before.step for before, after in itertools.pairwise(starts))
    return events


@pytest.mark.ray
@pytest.mark.faults
def test_when_a_worker_is_killed_the_other_goes_on_with_the_next_step(tmp_path: Path) -> None:
    process = start(argv_of(tmp_path, 2, SHORT), tmp_path)
    hit(wait_for_steps(process, tmp_path, 1), 0, signal.SIGKILL)  # the one that records
    finish(process)
    events = check(tmp_path, calm(tmp_path / "calm", SHORT), SHORT)
    assert [event.num_workers for event in only(StartEvent, events)][:2] == [2, 1]
    [told] = [event.message for event in only(WarningEvent, events) if "it is replaced" in event.message]
    assert told.startswith("worker 0 on ")


@pytest.mark.ray
@pytest.mark.faults
def test_a_killed_and_a_frozen_worker_are_replaced_while_the_others_go_on(tmp_path: Path) -> None:
    process = start(argv_of(tmp_path, 3, LONG), tmp_path)
    hit(wait_for_steps(process, tmp_path, 1), 1, signal.SIGKILL)
    frozen = hit(wait_for_steps(process, tmp_path, 3), 0, signal.SIGSTOP)
    wait_for_steps(process, tmp_path, 5)  # its successor has its number, and no state
    finish(process)
    events = check(tmp_path, calm(tmp_path / "calm", LONG), LONG)
    assert [event.num_workers for event in only(StartEvent, events)] == [3, 2, 3, 2, 3]
    told = [event.message for event in only(WarningEvent, events)]
    assert sum("it is replaced, and the others go on" in text for text in told) == 2
    assert sum(f"(process {frozen}) has not moved for" in text for text in told) == 1
    assert {event.worker for event in only(StacksEvent, events)} >= {1, 2}
    assert "MainThread" in only(StacksEvent, events)[0].stacks
