"""What a worker tells of itself, and how it is ended. Lost ones: test_faults.py, test_trainer.py."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from ray_yolo.core.system import Process, own_process, process_of
from ray_yolo.runtime.workers import watchdog
from ray_yolo.runtime.workers.coordinator import HungWorker


def test_a_process_that_is_frozen_can_be_ended() -> None:
    process = subprocess.Popen(["sleep", "60"])
    os.kill(process.pid, signal.SIGSTOP)
    frozen = process_of(process.pid)
    watchdog.kill(frozen)
    assert process.wait(10) == -signal.SIGKILL
    watchdog.kill(frozen)  # it has ended already


def test_a_process_whose_node_does_not_answer_is_killed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator names a hung worker once."""
    hung = HungWorker(own_process(), "worker 1 hangs")
    names = iter([hung])
    coordinator = SimpleNamespace(worker_statuses=list, describe_stall=str, find_hung_worker=lambda: next(names, None))
    attempts: list[Process] = []
    has_answered = threading.Event()

    def kill(process: Process) -> None:
        attempts.append(process)
        if len(attempts) < 3:
            raise ray.exceptions.GetTimeoutError
        has_answered.set()

    monkeypatch.setattr(watchdog, "kill", kill)
    notices: list[str] = []
    with watchdog.watchdog(coordinator, tmp_path, notices.append):
        assert has_answered.wait(20)
        time.sleep(1.5)
    assert attempts == [hung.process] * 3
    assert notices == ["worker 1 hangs: it is killed, and the others continue"]


def test_a_process_of_another_machine_or_container_of_the_same_name_is_left_alone(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes of that name are asked; on others the process id means another process."""
    process, own = subprocess.Popen(["sleep", "60"]), own_process()
    node = {"NodeID": "ab" * 28, "Alive": True, "NodeManagerHostname": own.node}
    asked: list[Any] = []

    def run(*given: Any) -> None:
        asked.append(given)
        Process.kill(*given)

    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=run))
    monkeypatch.setattr(watchdog.ray, "nodes", lambda: [node, {**node, "Alive": False}])
    monkeypatch.setattr(watchdog.ray, "remote", lambda **_: lambda function: task)
    monkeypatch.setattr(watchdog, "answer", lambda found: found)
    boot, namespace = own.space.split()
    for space in (f"{boot} pid:[1]", f"{boot[::-1]} {namespace}"):
        watchdog.kill(process_of(process.pid)._replace(space=space))
    assert len(asked) == 2
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM
