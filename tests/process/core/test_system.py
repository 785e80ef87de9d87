"""The identity of a process, on real ones."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from ray_yolo.core import system


def test_a_killed_process_that_is_not_reaped_has_ended() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        process = system.process_of(child.pid)
        assert not process.has_ended
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # leaves it unreaped
        assert Path(f"/proc/{child.pid}").exists()
        assert process.has_ended


def test_a_process_that_has_got_the_id_of_an_ended_one_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        child_itself = system.process_of(child.pid)
        former = child_itself._replace(started=child_itself.started - 1)
        assert former.has_ended
        former.kill()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
        child_itself.kill()
        assert child.wait(10) == -signal.SIGKILL
        child_itself.kill()  # it has ended
