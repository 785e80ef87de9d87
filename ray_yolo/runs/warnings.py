"""Forwards warnings of code without access to a run (data sets, caches, torch) into the event log of the run.

Loggers and `warnings` write to stderr, which is lost on workers and in loader processes. Here each text is forwarded
once per session, including texts of loader processes.
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
"""Different texts that are forwarded; storage that fails would give one for each image."""
_LOG = logging.getLogger(ray_yolo.__name__)
_SOURCES = tuple(f"{Path(str(package.__file__)).parent}{os.sep}" for package in (ray_yolo, torch))
_JOIN_SECONDS = 1.0


@contextmanager
def forward_warnings(notify: Callable[[str], None], loader_processes: int) -> Iterator[Callable[[int], None]]:
    """Within this context `notify` receives the warnings of ray_yolo and torch in this process.

    Yields the init function for loader processes; it forwards their warnings as well.
    """
    handler = _WarningHandler(notify)
    with warnings.catch_warnings():
        handler.install()
        try:
            if loader_processes:
                with _loader_queue(handler) as texts:
                    yield partial(_init_loader, texts)
            else:
                yield worker_init
        finally:
            _LOG.removeHandler(handler)


class _WarningHandler(logging.Handler):
    """Forwards each text once."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._notify = notify
        self._forwarded: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.forward(record.getMessage())

    def forward(self, text: str) -> None:
        text = printable(" ".join(text.splitlines()))
        if text not in self._forwarded and len(self._forwarded) <= MOST:
            self._forwarded.add(text)
            is_full = len(self._forwarded) > MOST
            self._notify(f"more than {MOST} different warnings; the rest is not shown" if is_full else text)

    def install(self) -> None:
        """Receive the log records and warnings of this process; warnings of other packages keep their handler.

        `forward_warnings` undoes it: `catch_warnings` restores `showwarning`.
        """
        original = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, lineno: int,
                 file: TextIO | None = None, line: str | None = None) -> None:
            if filename.startswith(_SOURCES):
                self.forward(str(message))
            else:
                original(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        _LOG.addHandler(self)


@contextmanager
def _loader_queue(handler: _WarningHandler) -> Iterator[Any]:
    """A queue through which loader processes send texts to `handler`."""
    texts = multiprocessing.get_context("forkserver").Queue()  # `put` never waits
    texts.cancel_join_thread()  # a process that ends does not wait either; texts in flight are lost

    def read() -> None:
        for text in iter(texts.get, None):
            handler.forward(text)

    reader = threading.Thread(target=read, name="ray_yolo warnings", daemon=True)
    reader.start()
    try:
        yield texts
    finally:
        texts.put(None)
        reader.join(_JOIN_SECONDS)


def _init_loader(texts: Any, number: int) -> None:
    worker_init(number)
    texts.cancel_join_thread()
    _WarningHandler(texts.put).install()
