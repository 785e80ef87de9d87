"""How a command ends on a signal: at once or by an exception, its exit status, and the loss of its terminal."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a command to end: Ctrl-C, a scheduler, and a terminal whose connection is lost."""


def end_at_once() -> None:
    """From now on, a signal of `STOPS` ends this process itself, until `raise_from_now_on`.

    Imports take seconds, and an exception cannot end them: native code that is being initialised drops it, and the
    command goes on, or aborts. What has not begun has nothing to tidy up.
    """
    for stop in STOPS:
        if stop == signal.SIGTERM or signal.getsignal(stop) != signal.SIG_IGN:  # ignored: SIGHUP under nohup
            signal.signal(stop, _exit_at_once)


def raise_from_now_on() -> None:
    """The work begins: from now on, a signal that would end this process itself raises an exception instead."""
    handlers = signal.default_int_handler, exit_on_sigterm, exit_on_hangup
    for stop, handler in zip(STOPS, handlers, strict=True):
        if signal.getsignal(stop) is _exit_at_once:
            signal.signal(stop, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Context of the import of a native library after the work has begun: a signal takes effect at its end."""
    if threading.current_thread() is not threading.main_thread():  # there, signals raise nothing
        yield
        return
    received: list[int] = []
    handlers = {stop: signal.getsignal(stop) for stop in STOPS}
    for stop, handler in handlers.items():
        if handler not in (signal.SIG_IGN, None):  # None: not set by Python
            signal.signal(stop, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for stop, handler in handlers.items():
            if handler is not None:
                signal.signal(stop, handler)
        for number in received:
            os.kill(os.getpid(), number)


def _exit_at_once(number: int, frame: Any) -> None:
    """Handler of a signal before the work begins: there is nothing to save yet."""
    os._exit(128 + number)


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
