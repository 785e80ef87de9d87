"""The deadline of an interrupted command."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDS = {"interrupted": "deadline.start(60.0, 143); deadline.end_with({0}); sys.exit({0})",
        "a command": "deadline.leave({0})",
        "a command whose output is not written": "sys.stdout = open('/dev/full', 'w'); print(1); deadline.leave({0})",
        "a script": "sys.exit({0})"}


@pytest.mark.parametrize(("status", "end", "returned", "takes_down"), [
    (143, "interrupted", 143, False), (3, "interrupted", 3, False), (0, "a command", 0, False),
    (3, "a command", 3, False), (0, "a command whose output is not written", 120, True), (0, "a script", 0, True)])
def test_a_command_does_not_wait_for_what_python_takes_down(status: int, end: str, returned: int, takes_down: bool
                                                            ) -> None:
    code = f"""if True:
        import atexit, sys, time
        from ray_yolo.core import deadline
        deadline.end_process_at_deadline()
        class Slow:
            def __del__(self, sleep=time.sleep):
                sleep(1)
                print("slow", flush=True, file=sys.__stderr__)
        slow = Slow()
        atexit.register(print, "orderly", file=sys.stderr, flush=True)
        {ENDS[end].format(status)}"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "orderly" in done.stderr, "slow" in done.stderr) == (returned, True, takes_down)


@pytest.mark.parametrize("ends", [True, False], ids=["a command", "a script"])
def test_a_command_that_hangs_ends_soon_after_its_deadline(ends: bool) -> None:
    code = f"""if True:
        import threading, time
        from ray_yolo.core import deadline
        if {ends}:
            deadline.end_process_at_deadline()
        print("begun")
        deadline.start(0.2, 143)
        time.sleep(3)
        print("went on")"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == ((143, "begun\n") if ends else (0, "begun\nwent on\n"))
