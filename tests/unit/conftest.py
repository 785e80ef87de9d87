"""What no unit test does: start a process, sleep, or take long. A test that has to is in `tests/process`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
LIMIT = 60
"""Seconds for a test. None takes one on a quiet machine."""
LONGEST_SLEEP = 1.0
"""Seconds that a test may sleep at once."""
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
"""Python's audit events of a process that starts, Ray's among them. multiprocessing's fork server raises none."""
QUESTIONS = {"git", "ldconfig", "uname"}
"""Programs that answer at once: runs record the commit of their folder, libraries ask for the machine and libraries."""

offences: list[str] = []  # of the test that runs


def note_starts(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: it sees every event of the process and cannot be removed."""
    if event not in STARTS:
        return
    program = Path(os.fsdecode(arguments[0])).name if arguments and isinstance(arguments[0], str | bytes | Path) else ""
    if program not in QUESTIONS:
        offences.append(f"it starts a process ({event} {program})")


sys.addaudithook(note_starts)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Watch what raises no audit event, from the first fixture of a test on."""
    start, sleep = BaseProcess.start, time.sleep

    def watched_start(process: BaseProcess) -> None:
        offences.append(f"it starts a process ({process.name})")
        start(process)

    def watched_sleep(seconds: float) -> None:
        began = time.monotonic()
        try:
            sleep(seconds)
        finally:  # a signal may have ended it
            slept = min(seconds, time.monotonic() - began)
            if slept > LONGEST_SLEEP and threading.current_thread() is threading.main_thread():
                offences.append(f"it sleeps {seconds:g} s")

    offences.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseProcess, "start", watched_start)
        patch.setattr(time, "sleep", watched_sleep)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    yield
    if offences:
        pytest.fail(f"{offences[0]}: it belongs in tests/process", pytrace=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT))
