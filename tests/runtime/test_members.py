"""Workers that are lost, or hang, while others go on: real processes on Ray, and the bits of the calm training."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ray_yolo.events import EndEvent, StacksEvent, StartEvent, StepEvent, WarningEvent, WorkerEvent
from ray_yolo.runlog.event_log import read_events
from ray_yolo.runtime import members
from ray_yolo.runtime.roster import own_process
from tests.runtime.test_kill import command, finish, log_of, start, tensors
from tests.support.run_log import only

pytestmark = pytest.mark.ray

EPOCHS = 200  # of three steps; the last word holds, and --mosaic 0 makes them short
STALL_SECONDS = 4


def argv_of(folder: Path, num_workers: int) -> list[str]:
    return [*command(folder, folder, num_workers), "--epochs", str(EPOCHS), "--set", "augment.mosaic=0", "--mlflow-uri",
            "off", "--cpus-per-worker", "0.5", "--stall-seconds", str(STALL_SECONDS), "--noval"]


def wait_for(process: subprocess.Popen[bytes], folder: Path, seen: Callable[[list], bool]) -> list:
    """The log, once something has been seen in it."""
    while not seen(events := read_events(log_of(folder))):
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.02)
    return events


def steps_after(events: list, starts: int) -> int:
    """Steps since the given number of starts."""
    places = [place for place, event in enumerate(events) if isinstance(event, StartEvent)]
    return len(only(StepEvent, events[places[starts - 1]:])) if len(places) >= starts else 0


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calm")
    finish(start(argv_of(folder, 0), folder))
    return folder


def test_a_killed_and_a_frozen_worker_are_replaced_while_the_others_go_on(calm: Path, tmp_path: Path) -> None:
    process = start(argv_of(tmp_path, 3), tmp_path)
    events = wait_for(process, tmp_path, lambda events: steps_after(events, 1) > 10)
    killed = next(event.pid for event in only(WorkerEvent, events) if event.worker == 1)
    os.kill(killed, signal.SIGKILL)
    # two go on, and are three again when the new one is up
    events = wait_for(process, tmp_path, lambda events: steps_after(events, 3) > 5)
    frozen = next(event.pid for event in only(WorkerEvent, events) if event.worker == 0)  # the one that records
    os.kill(frozen, signal.SIGSTOP)
    wait_for(process, tmp_path, lambda events: steps_after(events, 5) > 5)  # its successor has its number, and no state
    finish(process)

    events = read_events(log_of(tmp_path))
    expected = tensors(calm)
    assert all(torch.equal(value, expected[name]) for name, value in tensors(tmp_path).items())
    steps = [event.step for event in only(StepEvent, events)]
    assert steps == list(range(1, 3 * EPOCHS + 1))  # none missing, none twice
    starts = only(StartEvent, events)
    assert [event.num_workers for event in starts] == [3, 2, 3, 2, 3]
    assert all(after.step > before.step for before, after in zip(starts[:-1], starts[1:], strict=True))
    assert only(EndEvent, events)[-1].status == "done"
    told = [event.message for event in only(WarningEvent, events)]
    assert sum("it is replaced, and the others go on" in text for text in told) == 2
    assert sum(f"(process {frozen}) has not moved for" in text for text in told) == 1
    assert {event.worker for event in only(StacksEvent, events)} >= {1, 2}
    assert "MainThread" in only(StacksEvent, events)[0].stacks


def test_a_process_that_is_frozen_can_be_ended() -> None:
    process = subprocess.Popen(["sleep", "60"])
    os.kill(process.pid, signal.SIGSTOP)
    members.end(own_process()._replace(pid=process.pid))
    assert process.wait(10) == -signal.SIGKILL
    members.end(own_process()._replace(pid=process.pid))  # one that has ended already


def test_stacks_name_threads_and_functions() -> None:
    text = members.stacks()
    assert "MainThread:" in text
    assert "test_stacks_name_threads_and_functions" in text
