"""What a worker tells of itself, and how it is ended. Lost ones: test_faults.py, test_trainer.py."""

from __future__ import annotations

import os
import signal
import subprocess

from ray_yolo.ops.machine import own_process
from ray_yolo.runtime import members


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
