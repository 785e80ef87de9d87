"""What this process may use of its machine, on machines of files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ray_yolo.core import system


def test_a_killed_process_that_is_not_reaped_has_ended() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        process = system.own_process()._replace(pid=child.pid)
        assert not process.has_ended
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # leaves it unreaped
        assert Path(f"/proc/{child.pid}").exists()
        assert process.has_ended
