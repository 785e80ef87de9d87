"""When work that failed is done again, and what the user reads about it: one rule for every consumer of a log.

| outcome | next attempt | warning, once |
|---|---|---|
| done | as soon as there is something new | none |
| `RayYoloError`: the user must change something | after something new only | its text |
| any other error, of a server, a disk, a library | after a pause of 2, 4, ... 60 s | its type and first line |
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ray_yolo.core.errors import RayYoloError
from ray_yolo.core.redact import reason_of, redact

Warn = Callable[[str], None]

LONGEST_PAUSE_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 2.0


class RecordError(Exception):
    """A record could not be made, and it is tried again. The text is for the user."""


class Retry:
    """The attempts of one consumer.

    Args:
        name: begins the warning.
        warn: receives the warning of the first failure.
        first_pause: seconds after the first failure; they double with each further one.
        is_gone: whether the folder of the log was removed, so that a failure means nothing.
    """

    def __init__(self, name: str, warn: Warn, first_pause: float = _FIRST_PAUSE_SECONDS,
                 is_gone: Callable[[], bool] = lambda: False) -> None:
        self._name, self._warn, self._is_gone = name, warn, is_gone
        self.first_pause = self._pause = first_pause
        self._has_warned = False
        self.error: Exception | None = None
        """Of the last attempt."""
        self.due = 0.0
        """When the next attempt is due, by `time.monotonic`; infinite until the user has changed something."""

    @property
    def needs_user(self) -> bool:
        """Whether only new events, after the user has changed something, make the next attempt due."""
        return math.isinf(self.due)

    @property
    def is_due(self) -> bool:
        """Whether no pause is left."""
        return time.monotonic() >= self.due

    def note_news(self) -> None:
        """There is something new. A pause after a failure of a server or disk stays."""
        if self.needs_user:
            self.due = 0.0

    def attempt(self, work: Callable[[], object], *, ended: bool = False, is_last: bool = False) -> bool:
        """Do the work. Returns whether it was done; its error becomes a warning and a pause.

        Args:
            ended: whether training is over; the warning says what that means for it.
            is_last: whether there is no further attempt.
        """
        try:
            work()
        except Exception as error:  # of any library: the other consumers must still get their turn
            if self._is_gone():
                return False
            self.error = error
            asks_user = isinstance(error, RayYoloError)
            self.due = math.inf if asks_user else time.monotonic() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            text = redact(str(error)) if isinstance(error, (RayYoloError, RecordError)) else reason_of(error)
            self.warn_once(text + _outlook(asks_user, ended, is_last))
            return False
        self.error, self.due, self._pause = None, 0.0, self.first_pause
        return True

    def warn_once(self, text: str) -> None:
        """Warn, unless there was a warning before."""
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"{self._name}: {text}")


def _outlook(asks_user: bool, ended: bool, is_last: bool) -> str:
    """What happens after a failure, as the end of a warning."""
    if is_last:
        return ""
    if asks_user:
        return "" if ended else ". Training continues without."
    return ". This is tried again." if ended else ". Training continues; this is tried again."
