"""Warnings of code that knows of no run (data sets, caches, torch), as events of the run in which they are given.

Loggers and `warnings` write to stderr, which nobody reads on a worker or in a loader process. Here each text is told
once for each session, loader processes included.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

import ray_yolo
from ray_yolo.core.redact import printable
from ray_yolo.data.dataset import worker_init

MOST = 100
"""Different texts that are told; a storage that has gone would have one for each image."""
_LOG = logging.getLogger(ray_yolo.__name__)
_SOURCES = tuple(f"{Path(str(package.__file__)).parent}{os.sep}" for package in (ray_yolo, torch))
_LAST_SECONDS = 1.0


class _WarningHandler(logging.Handler):
    """Tells each text once."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._notify = notify
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())

    def say(self, text: str) -> None:
        text = printable(" ".join(text.splitlines()))
        if text not in self._told and len(self._told) <= MOST:
            self._told.add(text)
            enough = len(self._told) > MOST
            self._notify(f"more than {MOST} different warnings; the rest is not told" if enough else text)

    def listen(self) -> None:
        """Have what is logged and warned in this process; warnings of other packages go where they went."""
        before = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, lineno: int,
                 file: TextIO | None = None, line: str | None = None) -> None:
            if filename.startswith(_SOURCES):
                self.say(str(message))
            else:
                before(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        _LOG.addHandler(self)


@contextmanager
def forward_warnings(notify: Callable[[str], None], loader_processes: int) -> Iterator[Callable[[int], None]]:
    """While it lasts, `tell` gets the warnings of ray_yolo and torch in this process.

    Gives what each loader process is to be begun with, so that `tell` gets theirs as well.
    """
    teller = _WarningHandler(notify)
    with warnings.catch_warnings():
        teller.listen()
        try:
            if loader_processes:
                with _loader_texts(teller) as texts:
                    yield partial(_begin_loader, texts)
            else:
                yield worker_init
        finally:
            _LOG.removeHandler(teller)


@contextmanager
def _loader_texts(teller: _WarningHandler) -> Iterator[Any]:
    """A queue of texts that loader processes give to `teller`."""
    texts = multiprocessing.get_context("forkserver").Queue()  # putting into it never waits
    texts.cancel_join_thread()  # nor does a process that ends: what is still on its way then is lost

    def read() -> None:
        for text in iter(texts.get, None):
            teller.say(text)

    reader = threading.Thread(target=read, name="ray_yolo notices", daemon=True)
    reader.start()
    try:
        yield texts
    finally:
        texts.put(None)
        reader.join(_LAST_SECONDS)


def _begin_loader(texts: Any, number: int) -> None:
    worker_init(number)
    texts.cancel_join_thread()
    _WarningHandler(texts.put).listen()
