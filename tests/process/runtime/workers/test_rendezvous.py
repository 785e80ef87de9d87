"""What a worker tells of itself, and how it is ended. Lost ones: test_faults.py, test_trainer.py."""

from __future__ import annotations

import os
import signal
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from ray_yolo.core.system import own_process
from ray_yolo.runtime.workers import watchdog


def test_a_process_that_is_frozen_can_be_ended() -> None:
    process = subprocess.Popen(["sleep", "60"])
    os.kill(process.pid, signal.SIGSTOP)
    watchdog.kill(own_process()._replace(pid=process.pid))
    assert process.wait(10) == -signal.SIGKILL
    watchdog.kill(own_process()._replace(pid=process.pid))  # one that has ended already


def test_a_process_of_another_machine_or_container_of_the_same_name_is_left_alone(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes of that name are asked; on others the process id means another process."""
    process, own = subprocess.Popen(["sleep", "60"]), own_process()
    node = {"NodeID": "ab" * 28, "Alive": True, "NodeManagerHostname": own.node}
    asked: list[Any] = []

    def run(*given: Any) -> None:
        asked.append(given)
        watchdog._kill(*given)

    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=run))
    monkeypatch.setattr(watchdog.ray, "nodes", lambda: [node, {**node, "Alive": False}])
    monkeypatch.setattr(watchdog.ray, "remote", lambda **_: lambda function: task)
    monkeypatch.setattr(watchdog, "answer", lambda found: found)
    boot, namespace = own.space.split()
    for space in (f"{boot} pid:[1]", f"{boot[::-1]} {namespace}"):
        watchdog.kill(own._replace(space=space, pid=process.pid))
    assert len(asked) == 2
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM
