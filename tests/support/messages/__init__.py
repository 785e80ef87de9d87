"""Messages as tables of cases: the call or file that causes a message, and its text; a module for each kind of input.

Errors are by their kind of input, warnings in `warned`.

`tests/unit/test_messages.py` checks them all: a changed text is one changed row. Command lines that need files or a
folder of data are in `tests/process/test_mistakes.py`, label files in `tests/support/label_cases.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ray_yolo.core.errors import InputError

ANY = "…"
"""In a message: text that a library says, or that a case does not determine."""


@dataclass(frozen=True)
class Warned:
    """A cause, and the whole text of its one warning.

    Attributes:
        cause: logs the warning. The current folder is empty, and its own.
    """

    name: str
    message: str
    cause: Callable[[], object]

    @property
    def pattern(self) -> str:
        """A regular expression of the whole text."""
        return ".*".join(map(re.escape, self.message.split(ANY)))


@dataclass(frozen=True)
class Refusal(Warned):
    """The same of an error, which the cause raises."""

    error: type[Exception] = InputError
