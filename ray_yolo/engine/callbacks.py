"""A user's functions in the middle of a training. The first worker calls them, and training waits for each.

`sinks.callbacks` has the functions that the driver calls, and says what each gets.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BATCH_END, STEP_END, VAL_END = IN_TRAINING = ("on_batch_end", "on_step_end", "on_val_end")
STOP = "stop"
"""The return value of a function that ends the training."""

Hooks = dict[str, Callable[..., object]]


class TrainingCallbacks:
    """The functions that a worker calls if it is the first one.

    Args:
        warn: receives the text of an exception in a function, each text once.
    """

    def __init__(self, hooks: Mapping[str, Callable[..., object]] | None = None,
                 warn: Callable[[str], None] = lambda text: None) -> None:
        self._hooks, self._warn = hooks or {}, warn
        self._warned: set[str] = set()
        self.stopped_by = ""
        """The function that has ended the training; '' while none has."""

    def call(self, name: str, make_event: Callable[[], dict[str, Any]]) -> None:
        """Call a function, if there is one, with an event that is made for it alone."""
        hook = self._hooks.get(name)
        if hook is None:
            return
        try:
            if hook(make_event()) == STOP:
                self.stopped_by = self.stopped_by or name
        except (Exception, SystemExit) as error:
            text = complaint(name, error)
            if text not in self._warned:
                self._warned.add(text)
                self._warn(text)


def complaint(name: str, error: BaseException) -> str:
    """A line about an exception in a user's function, with the line of the user's file where it came from."""
    text = f"callbacks: {name}: {type(error).__name__}: {error}"
    _, *frames = traceback.extract_tb(error.__traceback__)  # the first is of the call itself
    if not frames:  # the function does not take what it is called with
        return text
    last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f"{text} ({Path(last.filename).name}, line {last.lineno}: {last.line})"
