"""The deadline of an interrupted command."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import pytest

from ray_yolo.core import deadline


def test_without_a_signal_nothing_is_limited() -> None:
    assert deadline.seconds_left() == math.inf
    assert deadline.seconds_left(60.0) == 60.0
    deadline.extend(1.0)
    assert deadline.seconds_left() == math.inf
    assert deadline.wait_for(threading.current_thread, "test") is threading.current_thread()


def test_the_first_signal_starts_it_and_a_save_moves_it_back() -> None:
    deadline.start(5.0, 143)
    deadline.start(50.0, 130)
    assert 4 < deadline.seconds_left() <= 5
    deadline.extend(1.0)
    assert 4 < deadline.seconds_left() <= 5
    deadline.extend(10.0)
    assert 9 < deadline.seconds_left() <= 10
    assert deadline.seconds_left(2.0) == 2.0
    deadline.clear()
    assert deadline.seconds_left() == math.inf


@pytest.mark.parametrize("release", [None, lambda: None])
def test_the_end_of_a_command_ends_it(release: Callable[[], None] | None) -> None:
    deadline.start(5.0, 130)
    deadline.end(release)
    assert deadline.seconds_left() == math.inf


def test_another_interruption_ends_it_too() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    deadline.start(5.0, 130)
    with pytest.raises(KeyboardInterrupt):
        deadline.end(interrupted)
    assert deadline.seconds_left() == math.inf


def test_work_is_waited_for_until_the_deadline() -> None:
    deadline.start(0.3, 143)
    assert deadline.wait_for(lambda: 7, "test") == 7
    with pytest.raises(ZeroDivisionError):
        deadline.wait_for(lambda: 1 // 0, "test")
    start, goes_on = time.monotonic(), threading.Event()
    assert deadline.wait_for(lambda: goes_on.wait(10), "test") is None
    assert time.monotonic() - start < 2
    goes_on.set()
