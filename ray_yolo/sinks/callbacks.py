"""A user's own functions, called during training.

`YOLO.train(callbacks={"on_epoch_end": function})` takes functions by name. On the command line a Python path,
`package.module:object` or `file.py:object` (without `:object`, the module itself), names an object with any of::

    on_run_start(run_dir, recipe)    driver; at each start of the command, before the first step
    on_batch_end(event)              first worker; after forward and backward of each microbatch that it computes:
                                     epoch, step, microbatch, images, loss by term
    on_step_end(event)               first worker; after each optimiser step: epoch, step, batch, images, loss by term,
                                     lr, seconds, gradient_norm, skipped, ...
    on_val_end(event)                first worker; after the validation of an epoch: epoch, step, metrics, per_class,
                                     val (losses), images (paths), and detections, an array with rows of image's
                                     number, x1, y1, x2, y2 in pixels, score, class, bits
    on_epoch_end(event)              driver; after each epoch, with its event: epoch, step, train, val, metrics, ...
    on_run_end(result)               driver; the `TrainResult`, or None if the training did not end

The driver is the process of the command, or of `YOLO.train`. A thread that reads the event log calls its functions one
by one, and training never waits for them. The first worker is the driver itself where training runs in its process
(`num_workers=0`). On Ray it is a process of its own, which gets a copy of the functions: what they store stays there,
and a worker that takes the place of a lost one begins with another copy. A Python path has to exist there, too.
Training waits for these functions. Epochs are counted from 0, steps from 1.

A function that returns `"stop"` ends the training after the step in progress or the next one. Everything is saved,
weights are written as at any end, and the run is done: `on_run_end` gets its result. With `--nosave`, a function of the
driver can only pause a training, and nothing of it is kept. An exception becomes a warning with its line, and training
continues.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import EpochEvent, Event
from ray_yolo.engine.callbacks import IN_TRAINING, STOP, Hooks, complaint
from ray_yolo.runs.event_log import EVENTS_FILE, epoch_rows, read_events
from ray_yolo.sinks.base import Sink

HOOKS = ("on_run_start", *IN_TRAINING, "on_epoch_end", "on_run_end")


class Callbacks(Sink):
    """The functions of one training, as returned by `load_callbacks`.

    Args:
        warn: receives the text of an exception in a function.
    """

    name, interval_seconds, limit_seconds = "callbacks", 0.3, 600.0

    def __init__(self, hooks: Hooks, run_dir: Path, recipe: Recipe, warn: Callable[[str], None]) -> None:
        self._hooks, self._run_dir, self._recipe, self._warn = hooks, run_dir, recipe, warn
        self._known = {row.epoch for row in epoch_rows(read_events(run_dir / EVENTS_FILE))}
        self._new: list[EpochEvent] = []
        self._started = False
        self.result: Any = None
        """The argument of `on_run_end`."""
        self.stopped_by = ""
        """The function that has ended the training; '' while none has."""

    def event(self, event: Event) -> None:
        """Queue a new epoch; a restart reports the last one again."""
        if isinstance(event, EpochEvent) and event.epoch not in self._known:
            self._known.add(event.epoch)
            self._new.append(event)

    def update(self, last: bool = False) -> None:
        """Call the functions that are due."""
        if not self._started:
            self._started = True
            self._call("on_run_start", self._run_dir, self._recipe)
        while self._new:
            self._call("on_epoch_end", self._new.pop(0).model_dump(mode="json"))
        if last:
            self._call("on_run_end", self.result)

    def _call(self, name: str, *arguments: Any) -> None:
        hook = self._hooks.get(name)
        try:
            if hook is not None and hook(*arguments) == STOP:
                self.stopped_by = self.stopped_by or name
        except (Exception, SystemExit) as error:
            self._warn(complaint(name, error))


def load_callbacks(path: str) -> Hooks:
    """The functions of the object at a path, by name; none for an empty path. Each call executes a file again.

    Raises:
        InputError: if it cannot be imported or has none of the functions.
    """
    if not path:
        return {}
    source, _, name = path.partition(":")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        target = getattr(module, name) if name else module
        target = target() if isinstance(target, type) else target
    except Exception as error:
        raise InputError(f"callbacks: {path}: cannot be imported ({type(error).__name__}: {error}); give "
                         "package.module:object or file.py:object") from error
    hooks = {hook: getattr(target, hook) for hook in HOOKS if callable(getattr(target, hook, None))}
    if not hooks:
        raise InputError(f"callbacks: {path}: has no function named {', '.join(HOOKS[:-1])} or {HOOKS[-1]}")
    for other in dir(target):
        if other.startswith("on_") and other not in HOOKS and callable(getattr(target, other)):
            raise InputError(f"callbacks: {path}: {other} is never called; the names are {', '.join(HOOKS)}; rename it "
                             f"(_{other} is left alone)")
    return hooks


def check_functions(functions: Mapping[str, object]) -> Hooks:
    """The functions that a caller gave by name.

    Raises:
        InputError: for a name that is never called, or a value that cannot be called.
    """
    hooks: Hooks = {}
    for name, function in functions.items():
        if name not in HOOKS:
            raise InputError(f"callbacks: {name!r} is never called; the names are {', '.join(HOOKS)}")
        if not callable(function):
            raise InputError(f"callbacks: {name}: {function!r} is not a function")
        hooks[name] = function
    return hooks


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"callbacks_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
