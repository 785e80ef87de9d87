"""Commands that lose their terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

CODE = """
import os, sys, time
from ray_yolo.cli import run
from ray_yolo.core.signals import raise_from_now_on
note = os.fdopen(os.dup(int(sys.argv[1])), "w", buffering=1)
def main():
    raise_from_now_on()
    try:
        print("ready", flush=True)
        time.sleep(30)
    finally:
        print("an orderly end", flush=True)
        print("an orderly end", file=sys.stderr, flush=True)
        time.sleep(0.5)
        note.write("saved\\n")
sys.exit(run(main))
"""


@pytest.mark.parametrize("times", [1, 3])
def test_the_end_of_its_terminal_is_an_orderly_end(times: int) -> None:
    controlling, terminal = pty.openpty()
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", CODE, str(writing)], stdin=terminal, stdout=terminal,
                               stderr=terminal, pass_fds=(writing,), start_new_session=True)
    os.close(terminal)
    os.close(writing)
    assert b"ready" in os.read(controlling, 100)
    os.close(controlling)  # from now on each write to the terminal is an error
    for _ in range(times):
        os.kill(process.pid, signal.SIGHUP)
        time.sleep(0.05)
    assert process.wait(20) == 129
    assert os.read(reading, 100) == b"saved\n"
    os.close(reading)


def test_under_nohup_the_command_goes_on() -> None:
    code = "import os, signal, sys; from ray_yolo.cli import run; sys.exit(run(lambda: os.kill(os.getpid(), 1) or 7))"
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 7
    finally:
        signal.signal(signal.SIGHUP, handler)
