"""The one rule for consumers of a log that fail: pauses, who must act, and a single warning."""

import pytest

from ray_yolo.core.errors import InputError
from ray_yolo.sinks import retry as retry_module
from ray_yolo.sinks.retry import RecordError, Retry


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(retry_module, "time", clock)
    return clock


def failing(error):
    def work():
        raise error
    return work


def test_pauses_double_up_to_a_minute_and_begin_again(clock):
    warnings = []
    retry = Retry("MLflow", warnings.append)
    pauses = []
    for _ in range(7):
        assert not retry.attempt(failing(OSError("away")))
        assert not retry.is_due
        pauses.append(retry.due - clock.now)
        clock.now = retry.due
        assert retry.is_due
    assert pauses == [2, 4, 8, 16, 32, 60, 60]
    assert retry.attempt(lambda: None)
    assert retry.error is None
    retry.attempt(failing(OSError("away")))
    assert retry.due - clock.now == 2
    assert warnings == ["MLflow: OSError: away. Training continues; this is tried again."]


def test_an_error_of_the_user_waits_for_news(clock):
    retry = Retry("MLflow", lambda _: None)
    retry.attempt(failing(InputError("log in")))
    clock.now += 1e6
    assert (retry.needs_user, retry.is_due) == (True, False)
    retry.note_news()
    assert (retry.needs_user, retry.is_due) == (False, True)


def test_news_do_not_shorten_the_pause_of_a_server(clock):
    retry = Retry("MLflow", lambda _: None)
    retry.attempt(failing(OSError("away")))
    retry.note_news()
    assert not retry.is_due


@pytest.mark.parametrize(("error", "ended", "is_last", "text"), [
    (InputError("log in"), False, False, "log in. Training continues without."),
    (InputError("log in"), True, False, "log in"),
    (OSError("full"), False, False, "OSError: full. Training continues; this is tried again."),
    (OSError("full"), True, False, "OSError: full. This is tried again."),
    (OSError("full"), True, True, "OSError: full"),
    (RecordError("https://ann:s3cr3t@host is away"), True, False, "https://***@host is away. This is tried again.")])
def test_a_warning_says_what_happens_then(error, ended, is_last, text):
    warnings = []
    Retry("MLflow", warnings.append).attempt(failing(error), ended=ended, is_last=is_last)
    assert warnings == [f"MLflow: {text}"]


def test_a_removed_folder_makes_a_failure_silent():
    retry = Retry("MLflow", pytest.fail, is_gone=lambda: True)
    assert not retry.attempt(failing(OSError("no such folder")))
    assert retry.error is None
