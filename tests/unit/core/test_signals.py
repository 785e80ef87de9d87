"""When a signal takes effect: at once before the work, by an exception in it, after an import of native code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from ray_yolo.core.signals import end_at_once, raise_from_now_on, uninterrupted

pytestmark = pytest.mark.usefixtures("own_signal_handlers")


def test_a_signal_during_an_import_takes_effect_at_its_end() -> None:
    end_at_once()
    raise_from_now_on()
    happened: list[str] = []
    with pytest.raises(SystemExit), uninterrupted():
        os.kill(os.getpid(), signal.SIGTERM)
        happened.append("imported")
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_work_ends_the_process_itself(number: signal.Signals) -> None:
    """Whatever would catch an exception, such as native code that is being initialised."""
    program = ("import os\nfrom ray_yolo.core.signals import end_at_once\nend_at_once()\n"
               f"try:\n    os.kill(os.getpid(), {number.value})\nexcept BaseException:\n    pass\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert (done.returncode, done.stderr) == (128 + number, b"")
