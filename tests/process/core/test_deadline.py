"""The deadline of an interrupted command."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("status", "interrupted"), [(143, True), (3, True), (0, False)])
def test_an_interrupted_command_does_not_wait_for_what_python_takes_down(status: int, interrupted: bool) -> None:
    code = f"""if True:
        import atexit, sys, time
        from ray_yolo.core import deadline
        deadline.end_process_at_deadline()
        class Slow:
            def __del__(self, sleep=time.sleep):
                sleep(1)
                print("slow", flush=True)
        slow = Slow()
        atexit.register(print, "orderly", flush=True)
        if {interrupted}:
            deadline.start(60.0, 143)
            deadline.end_with({status})
        sys.exit({status})"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (status, "orderly\n" + "slow\n" * (not interrupted))


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
