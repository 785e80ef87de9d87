"""Checkpoints written while training continues."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints import state_file, writer
from ray_yolo.checkpoints.writer import Saver, copied, save_interval
from ray_yolo.core.errors import TrainingError
from ray_yolo.core.events import CheckpointEvent, Event, WarningEvent

LIMIT = 60.0  # seconds of a wait that should be short


class Desk:
    """A saver, its events, and storage that waits for `go` (if `slow`) or fails `refuses` times."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *, slow: bool = False, refuses: int = 0) -> None:
        self.folder, self.events, self.go = folder, list[Event](), threading.Event()
        self.saver = Saver(folder, "recipe", 2, self.events.append)
        write, left = checkpoint.save_checkpoint, [refuses]

        def save(*args: Any) -> Path:
            assert not slow or self.go.wait(LIMIT)
            if left[0]:
                left[0] -= 1
                raise OSError(28, "No space left on device")
            return write(*args)

        patch.setattr(checkpoint, "save_checkpoint", save)

    def save(self, step: int, value: float = 1.0, kinds: tuple[str, ...] = ("last",), *,
             compared: bool = True) -> dict[str, Any]:
        state = {"meta": "{}", "model": {"w": torch.full((3,), value)}}
        self.saver.save(state, step, 0, kinds, compared=compared)
        return state


def saved(folder: Path, step: int) -> list[float]:
    return state_file.read_state(folder / "checkpoints" / f"step-{step}" / "state.pt")["model"]["w"].tolist()


def test_a_save_writes_the_state_at_the_time_of_the_call(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, monkeypatch, slow=True)
    state = desk.save(1)
    state["model"]["w"].zero_()  # training continues before anything is written
    assert not desk.events
    desk.go.set()
    desk.saver.wait(needed=True)
    assert saved(tmp_path, 1) == [1.0] * 3
    [event] = desk.events
    assert isinstance(event, CheckpointEvent)
    assert (event.step, event.kinds) == (1, ("last",))
    assert event.digest == state_file.digest({"model": {"w": torch.ones(3)}})


def test_saves_are_sequential_and_the_oldest_are_removed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, monkeypatch, slow=True)
    desk.save(1)
    second = threading.Thread(target=desk.save, args=(2, 2.0))
    second.start()
    second.join(0.2)
    assert second.is_alive()  # waits for the first one
    desk.go.set()
    second.join(LIMIT)
    desk.save(3, 3.0)
    desk.saver.wait()
    assert [event.step for event in desk.events if isinstance(event, CheckpointEvent)] == [1, 2, 3]
    assert [path.name for path in checkpoint.newest_first(tmp_path)] == ["step-3", "step-2"]


def test_a_save_that_was_not_compared_removes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, monkeypatch)
    for step in (1, 2):
        desk.save(step)
    desk.save(3, compared=False)
    desk.saver.wait(needed=True)
    assert [folder.name for folder in checkpoint.newest_first(tmp_path)] == ["step-3", "step-2", "step-1"]
    desk.save(4)
    desk.saver.wait(needed=True)
    assert [folder.name for folder in checkpoint.newest_first(tmp_path)] == ["step-4", "step-3"]


def test_two_consecutive_failures_are_warnings_and_the_third_ends_training(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, monkeypatch, refuses=5)
    monkeypatch.setattr(writer, "MISSED_SECONDS", 0.0)
    for step in (1, 2, 3):
        desk.save(step)
    with pytest.raises(TrainingError):
        desk.saver.wait()
    assert [type(event) for event in desk.events] == [WarningEvent] * 3


def test_many_failures_within_a_short_time_do_not_end_training(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, monkeypatch, refuses=9)
    monkeypatch.setattr(writer, "MISSED_SECONDS", 3.0)
    for step in range(1, 10):
        desk.save(step)
    desk.saver.wait()
    assert [type(event) for event in desk.events] == [WarningEvent] * 9


def test_a_success_resets_the_failure_count_and_a_needed_save_may_not_fail(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, monkeypatch, refuses=2)
    for step in (1, 2, 3):
        desk.save(step)
    desk.saver.wait(needed=True)
    desk.saver.wait(needed=True)  # nothing is pending
    monkeypatch.undo()
    broken = Desk(tmp_path / "other", monkeypatch, refuses=1)
    broken.save(4)
    with pytest.raises(TrainingError):
        broken.saver.wait(needed=True)


def test_a_copy_shares_nothing() -> None:
    tree = {"a": {"b": torch.ones(2, requires_grad=True)}, "c": "text"}
    copy = copied(tree)
    with torch.no_grad():
        tree["a"]["b"].zero_()
    assert copy["a"]["b"].tolist() == [1.0, 1.0]
    assert not copy["a"]["b"].requires_grad
    assert copy["c"] == "text"


def test_unresponsive_storage_counts_as_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, monkeypatch, slow=True)
    monkeypatch.setattr(writer, "WRITE_SECONDS", 0.1)
    desk.save(1)
    desk.saver.wait()
    [event] = desk.events
    assert isinstance(event, WarningEvent)
    assert "step 1 could not be written (the storage has not answered for 0.1 s)" in event.message
    desk.go.set()


def test_the_interval_of_saves_by_time_follows_from_their_cost() -> None:
    """One complete save a minute; the thread is idle for as long as it writes; training waits for 1 % of the time."""
    for setting, busy, wrote, waited, seconds in [
        ("auto", False, 0.0, 0.0, 60), ("auto", False, 10.0, 0.0, 50), ("auto", False, 25.0, 0.0, 50),
        ("auto", False, 100.0, 0.0, 200), ("auto", False, 1.0, 2.0, 200), ("auto", True, 1.0, 0.0, math.inf),
        (25.0, True, 100.0, 2.0, 25), (0.0, False, 1.0, 0.0, math.inf),
    ]:
        saver: Any = SimpleNamespace(is_busy=busy, wrote=wrote, waited=waited)
        assert save_interval(setting, saver) == seconds, (setting, busy, wrote, waited)


@pytest.mark.parametrize(("copying", "writing", "seconds"), [(2.0, 43.0, 200), (0.25, 44.75, 90), (0.25, 9.75, 50)])
def test_a_save_measures_its_cost_for_that_interval(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copying: float, writing: float, seconds: float) -> None:
    desk, now = Desk(tmp_path, monkeypatch), [7.0]

    def lasting(function: Any, duration: float) -> Any:
        def call(*args: Any) -> Any:
            now[0] += duration
            return function(*args)
        return call

    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(writer, "copied", lasting(dict, copying))
    monkeypatch.setattr(checkpoint, "save_checkpoint", lasting(checkpoint.save_checkpoint, writing))
    assert save_interval("auto", desk.saver) == 60
    desk.save(1)
    desk.saver.wait(needed=True)
    assert save_interval("auto", desk.saver) == seconds
