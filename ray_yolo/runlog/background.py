"""A daemon thread of the driver that repeats one piece of work, whatever becomes of it.

For everything that must never touch training: the progress display, the result files, the tracking server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ray_yolo.errors import RayYoloError
from ray_yolo.redact import redact

_LONGEST_PAUSE_SECONDS = 60.0
_LONGEST_REASON = 300  # characters; some libraries put whole HTML pages into their messages


class Background:
    """Does `work` every `interval_seconds`.

    Work that fails costs one warning and is tried again, at first soon, then once a minute; it must take up where it
    failed. After an error of ours (`RayYoloError`), which says what the user has to do first, it is not tried again.
    """

    def __init__(self, name: str, work: Callable[[], None], *, interval_seconds: float,
                 warn: Callable[[str], None]) -> None:
        self._name, self._work, self._interval_seconds = name, work, interval_seconds
        self._warn, self._warned = warn, False
        self._finishing, self._abandoned, self._done = threading.Event(), threading.Event(), threading.Event()
        threading.Thread(target=self._run, name=f"ray_yolo {name}", daemon=True).start()

    def finish(self, patience_seconds: float, last_success: Callable[[], float] = lambda: 0.0) -> bool:
        """Have the work done one last time, and wait for that, `patience_seconds` after the last success at most.

        `last_success` gives `time.monotonic` of the last part of the work that succeeded, where it has parts.

        Returns:
            True if the last round succeeded. False: patience ran out, and the thread ends when it can.
        """
        asked = time.monotonic()
        self._finishing.set()
        while not self._done.wait(0.02):
            if self._abandoned.is_set() or time.monotonic() - max(asked, last_success()) > patience_seconds:
                self._abandoned.set()
                return False
        return True

    def _run(self) -> None:
        pause = self._interval_seconds
        while not self._abandoned.is_set():
            last_round = self._finishing.wait(pause)
            try:
                self._work()
            except RayYoloError as error:
                self._warn(f"{self._name}: {redact(str(error))}. Training goes on without.")
                self._abandoned.set()
            except Exception as error:  # whatever a foreign library raises, the thread has to live on
                if not self._warned:
                    self._warn(f"{self._name}: {reason_of(error)}. Training goes on; this is tried again.")
                self._warned = True
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                self._abandoned.wait(self._interval_seconds if last_round else 0)
            else:
                pause = self._interval_seconds
                if last_round:
                    self._done.set()
                    return


def reason_of(error: BaseException) -> str:
    """What an exception says, on one line and without secrets."""
    return redact(f"{type(error).__name__}: {error}".splitlines()[0][:_LONGEST_REASON])
