"""How a command ends on a signal: its exit status, and the loss of its terminal."""

from __future__ import annotations

import os
import signal
import stat
import sys
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a command to end: Ctrl-C, a scheduler, and a terminal whose connection is lost."""


def exit_on_sigterm(number: int, frame: Any) -> None:
    """Handler of SIGTERM: raise SystemExit with the signal's number, as the handler does that Ray sets on import."""
    sys.exit(number)


def exit_on_hangup(number: int, frame: Any) -> None:
    """Handler of SIGHUP: raise SystemExit with the exit status. Later ones are ignored: a terminal that closes sends it
    by the shell and by the kernel."""
    signal.signal(number, signal.SIG_IGN)
    leave_terminal()
    sys.exit(128 + number)


def exit_status_of(stop: KeyboardInterrupt | SystemExit) -> int:
    """The exit status of a command that the handler of a signal interrupts."""
    if isinstance(stop, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if stop.code == signal.SIGTERM:
        return 128 + signal.SIGTERM
    return stop.code if isinstance(stop.code, int) else 1


def leave_terminal() -> None:
    """Send output for the terminal to nowhere: after SIGHUP, each write to it is an error. Files and pipes stay."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        if stat.S_ISCHR(os.fstat(number).st_mode):  # `isatty` is false for a terminal that is gone
            os.dup2(null, number)
    os.close(null)
