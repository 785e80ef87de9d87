"""A save interrupted at any file operation: the next start finds all of it or nothing, and `weights/` follows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_yolo.checkpoints import local as checkpoint
from tests.support.checkpoints import begin, save, shown, value


class Killed(BaseException):
    """Stands for kill -9: nothing below catches it."""


class Storage:
    """Counts file operations; number `end` fails: once with an OSError, or all from there on as if killed."""

    OPERATIONS = ("mkdir", "rename", "replace", "link", "unlink", "rmdir", "fsync")

    def __init__(self, patch: pytest.MonkeyPatch, end: int, fault: type[BaseException]) -> None:
        self.operations, self.end, self.fault = 0, end, fault
        for name in self.OPERATIONS:
            patch.setattr(os, name, self.counted(getattr(os, name)))
        self.write, self.write_state = checkpoint.atomic_write, checkpoint.write_state
        patch.setattr(checkpoint, "atomic_write", self.write_in_two)
        patch.setattr(checkpoint, "write_state", self.write_state_in_two)

    def count(self) -> None:
        self.operations += 1
        if self.operations == self.end or (self.fault is Killed and self.operations > self.end):
            raise self.fault(5, "Input/output error")

    def counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.count()
            return operation(*args, **kwargs)
        return counting

    def write_in_two(self, path: Path, data: str) -> None:
        self.count()
        path.write_text(data[: len(data) // 2])
        self.count()
        self.write(path, data)

    def write_state_in_two(self, path: Path, state: Any) -> Any:
        self.count()
        path.write_bytes(b"torn")
        self.count()
        return self.write_state(path, state)


Case = tuple[int, tuple[str, ...], dict[str, float]]  # step, kinds, and the contents of weights/ after the save
BEFORE = {"last": 2.0, "best": 1.0, "epoch0": 1.0}
CASES: dict[str, Case] = {
    "another step": (3, ("last",), BEFORE | {"last": 9.0}),
    "a better epoch": (3, ("last", "best", "epoch1"), {"last": 9.0, "best": 9.0, "epoch0": 1.0, "epoch1": 9.0}),
    "the same step": (2, ("last", "best"), BEFORE | {"last": 9.0, "best": 9.0}),
}


def save_and_prune(run_dir: Path, case: Case, end: int, fault: type[BaseException]) -> bool:
    """Save and prune on storage that fails at an operation. Returns whether that was reached."""
    with pytest.MonkeyPatch.context() as patch:
        storage = Storage(patch, end, fault)
        try:
            save(run_dir, case[0], *case[1], value=9.0)
            checkpoint.prune(run_dir, keep=1)
        except fault:
            pass
    return storage.operations >= end


@pytest.mark.parametrize("hard_links", [True, False])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_save_killed_at_any_operation_is_complete_or_absent_at_the_next_start(
        tmp_path: Path, case: Case, hard_links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hard_links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(95, "not supported")))
    seen, end, reached = [], 1, True
    while reached:
        run_dir = begin(tmp_path / str(end))
        reached = save_and_prune(run_dir, case, end, Killed)
        if end % 3 == 0:  # and again, during the next start's recovery
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
                Storage(patch, end // 3, Killed)
                checkpoint.recover(run_dir, "digest")
        step, problems = checkpoint.recover(run_dir, "digest")
        seen.append(shown(run_dir))
        assert problems == []
        assert value(run_dir / "checkpoints" / f"step-{step}" / "state.pt") == seen[-1]["last"]
        end += 1
    assert len(seen) > 15
    done = seen.index(case[2])  # from here on nothing may be lost
    assert seen == [BEFORE] * done + [case[2]] * (len(seen) - done)
    assert 5 < done < len(seen) - 5


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_after_a_storage_failure_at_any_operation_the_next_save_shows_everything(
        tmp_path: Path, case: Case) -> None:
    end, reached = 1, True
    while reached:
        run_dir = begin(tmp_path / str(end))
        reached = save_and_prune(run_dir, case, end, OSError)
        assert checkpoint.newest_verified(run_dir)[1] == []
        save(run_dir, 4, "last")
        assert shown(run_dir) in (BEFORE | {"last": 4.0}, case[2] | {"last": 4.0})
        end += 1
    assert end > 15
