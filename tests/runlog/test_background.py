import threading
import time

import pytest

from ray_yolo.errors import InputError
from ray_yolo.runlog.background import Background


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


@pytest.fixture
def warnings():
    return []


def test_work_is_repeated_and_done_a_last_time_after_finish_was_asked_for(warnings):
    rounds = []
    thread = Background("work", lambda: rounds.append(time.monotonic()), interval_seconds=0.01, warn=warnings.append)
    wait_until(lambda: len(rounds) >= 3)
    asked = time.monotonic()
    assert thread.finish(5.0)
    assert rounds[-1] >= asked
    assert warnings == []


def test_a_failure_costs_one_warning_and_the_work_goes_on(warnings):
    rounds = []

    def work():
        rounds.append(0)
        if len(rounds) < 4:
            raise ConnectionError("https://ann:s3cr3t@host is away\nsecond line")

    thread = Background("MLflow", work, interval_seconds=0.001, warn=warnings.append)
    wait_until(lambda: len(rounds) >= 4)
    assert thread.finish(5.0)
    assert warnings == ["MLflow: ConnectionError: https://***@host is away. Training goes on; this is tried again."]


def test_an_error_without_a_message_is_told_too(warnings):
    def work():
        raise ValueError

    Background("work", work, interval_seconds=0.001, warn=warnings.append).finish(0.05)
    assert warnings == ["work: ValueError: . Training goes on; this is tried again."]


def test_work_that_never_succeeds_is_waited_for_no_longer_than_patience(warnings):
    def work():
        raise OSError("no")

    thread = Background("work", work, interval_seconds=0.01, warn=warnings.append)
    began = time.monotonic()
    assert not thread.finish(0.2)
    assert 0.2 <= time.monotonic() - began < 1.0


def test_an_error_of_ours_is_told_at_once_and_not_tried_again(warnings):
    rounds = []

    def work():
        rounds.append(0)
        raise InputError("it is no database; move it away")

    thread = Background("MLflow", work, interval_seconds=0.001, warn=warnings.append)
    wait_until(lambda: warnings)
    began = time.monotonic()
    assert not thread.finish(60.0)
    assert time.monotonic() - began < 1.0
    assert len(rounds) == 1
    assert warnings == ["MLflow: it is no database; move it away. Training goes on without."]


def test_work_that_hangs_is_waited_for_no_longer_than_patience(warnings):
    release = threading.Event()
    thread = Background("work", release.wait, interval_seconds=0.01, warn=warnings.append)
    assert not thread.finish(0.1)
    release.set()


def test_signs_of_success_extend_patience(warnings):
    answered = [0.0]
    release = threading.Event()

    def work():
        while not release.wait(0.01):
            answered[0] = time.monotonic()

    thread = Background("work", work, interval_seconds=0.01, warn=warnings.append)
    threading.Timer(0.5, release.set).start()
    assert thread.finish(0.2, lambda: answered[0])


def test_an_abandoned_thread_ends(warnings):
    def work():
        raise OSError("no")

    before = threading.active_count()
    Background("work", work, interval_seconds=0.01, warn=warnings.append).finish(0.0)
    wait_until(lambda: threading.active_count() == before)
