"""Work in a thread, while the main thread stays awake for signals."""

import os
import signal
import threading
import time

import pytest

from ray_yolo.runtime.aside import run_aside


def test_it_gives_back_what_the_work_returns_or_raises() -> None:
    assert run_aside(threading.get_ident) != threading.get_ident()
    error = ValueError("of the work")

    def fail() -> None:
        raise error

    with pytest.raises(ValueError, match="of the work") as caught:
        run_aside(fail)
    assert caught.value is error


def test_a_signal_interrupts_the_wait_at_once() -> None:
    began, released = time.monotonic(), threading.Event()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run_aside(lambda: released.wait(30))
    released.set()
    assert time.monotonic() - began < 10
