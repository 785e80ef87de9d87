"""Trackers: records of a run that installed packages make, each by an entry point of `ray_yolo.records`.

    [project.entry-points."ray_yolo.records"]
    team = "team_tracker:TeamTracker"

The entry point names a function or class that takes the run folder, and returns an object with `update(events, ended)`
as in `sinks.base.Record`. `--trackers team` uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from ray_yolo.core.errors import InputError
from ray_yolo.core.events import Event

GROUP = "ray_yolo.records"


class Tracker(Protocol):
    """What a package has to offer."""

    def update(self, events: Sequence[Event], ended: bool) -> None:
        """Make the tracker agree with the log; see `sinks.base.Record.update`."""


class TrackerRecord:
    """The record of a run with one tracker.

    The tracker is loaded at the first update: one that cannot be loaded any more then fails alone.
    """

    uses_time = True

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        self._tracker: Tracker | None = None

    def update(self, events: Sequence[Event], ended: bool) -> None:
        """Update the tracker.

        Raises:
            InputError: if it is not installed.
            Exception: any of the tracker.
        """
        if self._tracker is None:
            self._tracker = load_tracker(self.name)(self._folder)
        self._tracker.update(events, ended)


def load_tracker(name: str) -> Callable[[Path], Tracker]:
    """What the entry point of this name offers.

    Raises:
        InputError: if there is none or several, or it cannot be imported.
    """
    entries = entry_points(group=GROUP)
    named = [entry for entry in entries if entry.name == name]
    if not named:
        known = ", ".join(sorted({entry.name for entry in entries})) or "none"
        raise InputError(f"trackers: {name!r} is not installed (installed: {known}); a package offers one by an entry "
                         f"point of {GROUP}")
    packages = [entry.dist.name if entry.dist else entry.value for entry in named]
    if len(named) > 1:
        raise InputError(f"trackers: {name!r} is offered by {' and by '.join(sorted(packages))}; uninstall one of them")
    [entry], [package] = named, packages
    try:
        build = entry.load()
    except Exception as error:  # the code of others
        extras = f"; pip install '{package}[{','.join(entry.extras)}]'" if entry.extras else ""
        raise InputError(f"trackers: {name!r} of the package {package} cannot be imported ({type(error).__name__}: "
                         f"{error}){extras}") from error
    if not callable(build):
        raise InputError(f"trackers: {name!r} of the package {package} is not a function that takes the run folder")
    checked: Callable[[Path], Tracker] = build
    return checked
