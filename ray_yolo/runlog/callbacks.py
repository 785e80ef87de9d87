"""A user's own functions, called on the driver as a training goes on.

A Python path, `package.module:object` or `file.py:object` (the object may be left out: then it is the module), names
something with any of

    on_run_start(run_dir, recipe)    once a start of the command, before the first step
    on_epoch_end(event)              once for each epoch, with its event: epoch, step, train, val, metrics, ...
    on_run_end(result)               the `TrainResult`, or None if the training did not end

They are called one after the other by a thread that reads the event log: training never waits for them, and an
exception in one is a warning.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ray_yolo.config.recipe import Recipe
from ray_yolo.errors import InputError
from ray_yolo.runlog.background import Background
from ray_yolo.runlog.events import follow, read_events
from ray_yolo.runlog.results_files import EVENTS_FILE

HOOKS = ("on_run_start", "on_epoch_end", "on_run_end")
Hooks = dict[str, Callable[..., Any]]

_PATIENCE_SECONDS = 600.0


class Callbacks:
    """The functions of one training, as `load_callbacks` gives them.

    Args:
        warn: told of an exception in a function, and of one that does not come back.
    """

    def __init__(self, hooks: Hooks, run_dir: Path, warn: Callable[[str], None]) -> None:
        self._hooks, self._run_dir, self._warn = hooks, run_dir, warn
        past = read_events(run_dir / EVENTS_FILE) if self._hooks else []
        self._log = follow(run_dir / EVENTS_FILE, after_seq=past[-1]["seq"] if past else -1)
        self._told = {event["epoch"] for event in past if event["type"] == "epoch"}
        self._thread: Background | None = None
        self._recipe: Recipe | None = None  # until on_run_start was called
        self._over = False
        self._result: Any = None

    def start(self, recipe: Recipe) -> None:
        """Call `on_run_start`, and from now on `on_epoch_end` as epochs end."""
        if self._hooks:
            self._recipe = recipe
            self._thread = Background("callbacks", self._work, interval_seconds=0.3, warn=self._warn)

    def finish(self, result: Any = None, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        """Call what is left, `on_run_end` last, and wait for that. Call it when the log is complete.

        Args:
            result: what `on_run_end` is given.
            patience_seconds: how long to wait for the user's functions.
        """
        if self._thread is None:
            return
        self._result, self._over = result, True
        if not self._thread.finish(patience_seconds):
            self._warn(f"callbacks: not back after {patience_seconds:g} s; they are left behind")

    def _work(self) -> None:
        over = self._over  # read before the log: what is in it then is everything
        if self._recipe is not None:
            recipe, self._recipe = self._recipe, None
            self._call("on_run_start", self._run_dir, recipe)
        for event in next(self._log):
            if event["type"] == "epoch" and event["epoch"] not in self._told:  # a restart tells the last one again
                self._told.add(event["epoch"])
                self._call("on_epoch_end", event)
        if over:
            self._over = False
            self._call("on_run_end", self._result)

    def _call(self, name: str, *arguments: Any) -> None:
        hook = self._hooks.get(name)
        try:
            if hook is not None:
                hook(*arguments)
        except (Exception, SystemExit) as error:
            self._warn(f"callbacks: {name}: {type(error).__name__}: {error}")


def load_callbacks(path: str) -> Hooks:
    """The functions that a path names, by their names; none for an empty path. A file is executed by each call.

    Raises:
        InputError: if it cannot be imported or has none of the functions.
    """
    if not path:
        return {}
    place, _, name = path.partition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, name) if name else module
        found = found() if isinstance(found, type) else found
    except Exception as error:
        raise InputError(f"callbacks: {path}: cannot be imported ({type(error).__name__}: {error}); give "
                         "package.module:object or file.py:object") from error
    hooks = {hook: getattr(found, hook) for hook in HOOKS if callable(getattr(found, hook, None))}
    if not hooks:
        raise InputError(f"callbacks: {path}: has no function named {', '.join(HOOKS[:-1])} or {HOOKS[-1]}")
    return hooks


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"callbacks_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and the like look themselves up there
    spec.loader.exec_module(module)
    return module
