"""Training on TorchTrainer: its configuration, and lost workers of real processes, with bit-identical weights."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from ray_yolo.core.events import (
    CheckpointEvent,
    EndEvent,
    Event,
    StacksEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
    WorkerEvent,
)
from ray_yolo.runs.event_log import read_events, surviving
from ray_yolo.runs.usage import measure_usage
from tests.support.run_log import only
from tests.support.train_command import command, finish, log_of, start, tensors

SHORT, LONG = 60, 300  # epochs of three steps; in the long one a replacement has time to come up, twice
STALL_SECONDS = 4


def argv_of(folder: Path, num_workers: int | str, epochs: int) -> list[str]:
    return [*command(folder, folder, num_workers), "--epochs", str(epochs), "--set", "augment.mosaic=0", "--mlflow-uri",
            "off", "--cpus-per-worker", "0.5", "--stall-seconds", str(STALL_SECONDS), "--noval"]


def uninterrupted(folder: Path, epochs: int) -> Path:
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


def check(folder: Path, uninterrupted: Path, epochs: int) -> list[Event]:
    """Same bits, and no step missing or done twice. Returns the log.

    What the recording worker had to say of its last step may end with it: each generation says where it goes on.
    """
    events, expected = read_events(log_of(folder)), tensors(uninterrupted)
    assert all(torch.equal(value, expected[name]) for name, value in tensors(folder).items())
    starts, steps = only(StartEvent, events), [event.step for event in only(StepEvent, surviving(events))]
    assert len(set(steps)) == len(steps)
    assert set(range(1, 3 * epochs + 1)) - set(steps) <= {start.step for start in starts}
    assert only(EndEvent, events)[-1].status == "done"
    assert all(after.step > before.step for before, after in itertools.pairwise(starts))
    return events


@pytest.mark.ray
@pytest.mark.faults
def test_when_a_worker_is_killed_the_other_continues_with_the_next_step(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_NODE_MARKET_TYPE", "spot")  # of the command's own Ray
    process = start(argv_of(tmp_path, 2, SHORT), tmp_path)
    hit(wait_for_steps(process, tmp_path, 1), 0, signal.SIGKILL)  # the one that records
    finish(process)
    events = check(tmp_path, uninterrupted(tmp_path / "calm", SHORT), SHORT)
    assert [event.num_workers for event in only(StartEvent, events)][:2] == [2, 1]
    assert [event.members for event in only(StartEvent, events)][:2] == [(0, 1), (1,)]
    assert {event.market_type for event in only(WorkerEvent, events)} == {"spot"}
    assert measure_usage(events).hours.keys() == {"spot"}
    [message] = [event.message for event in only(WarningEvent, events) if "it is replaced" in event.message]
    assert message.startswith("worker 0 on ")


@pytest.mark.ray
@pytest.mark.faults
def test_a_killed_and_a_frozen_worker_are_replaced_while_the_others_continue(tmp_path: Path) -> None:
    process = start(argv_of(tmp_path, 3, LONG), tmp_path)
    hit(wait_for_steps(process, tmp_path, 1), 1, signal.SIGKILL)
    frozen = hit(wait_for_steps(process, tmp_path, 3), 0, signal.SIGSTOP)
    wait_for_steps(process, tmp_path, 5)  # its successor has its number, and no state
    finish(process)
    events = check(tmp_path, uninterrupted(tmp_path / "calm", LONG), LONG)
    assert [event.num_workers for event in only(StartEvent, events)] == [3, 2, 3, 2, 3]
    messages = [event.message for event in only(WarningEvent, events)]
    assert sum("it is replaced while the others continue" in text for text in messages) == 2
    assert sum(f"(process {frozen}) has not moved for" in text for text in messages) == 1
    assert {event.worker for event in only(StacksEvent, events)} >= {1, 2}
    assert "MainThread" in only(StacksEvent, events)[0].stacks


@pytest.mark.ray
@pytest.mark.faults
def test_a_single_worker_restarts_from_the_newest_checkpoint(tmp_path: Path) -> None:
    process = start([*argv_of(tmp_path, 1, SHORT), "--placement-strategy", "STRICT_PACK", "--max-failures", "1"],
                    tmp_path)
    killed = wait_for_steps(process, tmp_path, 1)
    hit(killed, 0, signal.SIGKILL)
    finish(process)
    events, expected = read_events(log_of(tmp_path)), tensors(uninterrupted(tmp_path / "calm", SHORT))
    assert all(torch.equal(value, expected[name]) for name, value in tensors(tmp_path).items())
    _, second = only(StartEvent, events)
    assert not second.regrouped
    assert second.step >= max(event.step for event in only(CheckpointEvent, killed))
    [message] = [event.message for event in only(WarningEvent, events) if "all workers restart" in event.message]
    assert f"all workers restart from step {second.step}" in message
    assert only(EndEvent, events)[-1].status == "done"
