"""When a signal takes effect: by an exception in the work, after an import of native code."""

from __future__ import annotations

import os
import signal

import pytest

from ray_yolo.core.signals import end_at_once, raise_from_now_on, uninterrupted

pytestmark = pytest.mark.usefixtures("own_signal_handlers")


def test_a_signal_during_an_import_takes_effect_at_its_end() -> None:
    end_at_once()
    raise_from_now_on()
    happened: list[str] = []

    def import_native_code() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            happened.append("imported")

    with pytest.raises(SystemExit):
        import_native_code()
    assert happened == ["imported"]
    with pytest.raises(KeyboardInterrupt):  # its usual effect is back
        os.kill(os.getpid(), signal.SIGINT)


def test_an_ignored_signal_stays_ignored() -> None:
    """As SIGHUP under `nohup`, and SIGINT in a background job."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    end_at_once()
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGHUP)
    raise_from_now_on()
    os.kill(os.getpid(), signal.SIGINT)
