"""A save that ends at any deed: the next start has all of it or nothing, and `weights/` follows."""

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
    """What changes files, counted; at deed number `end` it fails: once with an OSError, or for ever as if killed."""

    DEEDS = ("mkdir", "rename", "replace", "link", "unlink", "rmdir", "fsync")

    def __init__(self, patch: pytest.MonkeyPatch, end: int, fault: type[BaseException]) -> None:
        self.deeds, self.end, self.fault = 0, end, fault
        for name in self.DEEDS:
            patch.setattr(os, name, self.counted(getattr(os, name)))
        self.write, self.write_state = checkpoint.atomic_write, checkpoint.write_state
        patch.setattr(checkpoint, "atomic_write", self.write_in_two)
        patch.setattr(checkpoint, "write_state", self.write_state_in_two)

    def count(self) -> None:
        self.deeds += 1
        if self.deeds == self.end or (self.fault is Killed and self.deeds > self.end):
            raise self.fault(5, "Input/output error")

    def counted(self, deed: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.count()
            return deed(*args, **kwargs)
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


Story = tuple[int, tuple[str, ...], dict[str, float]]  # step, kinds, and what weights/ holds once that is saved
BEFORE = {"last": 2.0, "best": 1.0, "epoch0": 1.0}
STORIES: dict[str, Story] = {
    "another step": (3, ("last",), BEFORE | {"last": 9.0}),
    "a better epoch": (3, ("last", "best", "epoch1"), {"last": 9.0, "best": 9.0, "epoch0": 1.0, "epoch1": 9.0}),
    "the same step": (2, ("last", "best"), BEFORE | {"last": 9.0, "best": 9.0}),
}


def go_on(run_dir: Path, story: Story, end: int, fault: type[BaseException]) -> bool:
    """Save and prune on storage that fails at a deed. Returns whether it came so far."""
    with pytest.MonkeyPatch.context() as patch:
        storage = Storage(patch, end, fault)
        try:
            save(run_dir, story[0], *story[1], value=9.0)
            checkpoint.prune(run_dir, keep=1)
        except fault:
            pass
    return storage.deeds >= end


@pytest.mark.parametrize("hard_links", [True, False])
@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_killed_before_any_deed_of_a_save_the_next_start_finds_all_of_it_or_nothing(
        tmp_path: Path, story: Story, hard_links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hard_links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(95, "not supported")))
    seen, end, came_so_far = [], 1, True
    while came_so_far:
        run_dir = begin(tmp_path / str(end))
        came_so_far = go_on(run_dir, story, end, Killed)
        if end % 3 == 0:  # and again, while the next start mends it
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
                Storage(patch, end // 3, Killed)
                checkpoint.recover(run_dir, "digest")
        step, problems = checkpoint.recover(run_dir, "digest")
        seen.append(shown(run_dir))
        assert problems == []
        assert value(run_dir / "checkpoints" / f"step-{step}" / "state.pt") == seen[-1]["last"]
        end += 1
    assert len(seen) > 15
    done = seen.index(story[2])  # from here on nothing may be lost
    assert seen == [BEFORE] * done + [story[2]] * (len(seen) - done)
    assert 5 < done < len(seen) - 5


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_storage_that_fails_at_any_deed_of_a_save_loses_nothing_that_the_next_save_does_not_show(
        tmp_path: Path, story: Story) -> None:
    end, came_so_far = 1, True
    while came_so_far:
        run_dir = begin(tmp_path / str(end))
        came_so_far = go_on(run_dir, story, end, OSError)
        assert checkpoint.newest_verified(run_dir)[1] == []
        save(run_dir, 4, "last")
        assert shown(run_dir) in (BEFORE | {"last": 4.0}, story[2] | {"last": 4.0})
        end += 1
    assert end > 15
