"""Work in a thread, while the main thread stays awake for signals."""

import os
import signal
import threading
import time
from collections.abc import Iterator

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


@pytest.fixture
def _told_to_stop() -> Iterator[None]:
    """SIGUSR1 raises in the main thread, as the commands' SIGTERM does."""
    def stop(*_: object) -> None:
        raise SystemExit(15)

    before = signal.signal(signal.SIGUSR1, stop)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_told_to_stop")
def test_a_signal_interrupts_the_wait_at_once() -> None:
    began, released = time.monotonic(), threading.Event()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    with pytest.raises(SystemExit):
        run_aside(lambda: released.wait(30))
    released.set()
    assert time.monotonic() - began < 10
