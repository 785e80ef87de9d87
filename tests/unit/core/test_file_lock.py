"""Locks of files."""

import fcntl
from pathlib import Path
from types import SimpleNamespace

import pytest

from ray_yolo.core import file_lock
from ray_yolo.core.file_lock import try_lock, wait_for_lock


def test_a_file_has_one_writer_or_many_readers(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as one, (tmp_path / "lock").open("w") as other:
        assert [try_lock(one), try_lock(other), try_lock(other, fcntl.LOCK_SH)] == [True, False, False]
        one.close()
        assert try_lock(other, fcntl.LOCK_SH)
        with (tmp_path / "lock").open("w") as third:
            assert [try_lock(third, fcntl.LOCK_SH), try_lock(third)] == [True, False]


def test_a_lock_is_waited_for_and_a_long_wait_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, notices = [0.0], list[float]()
    with (tmp_path / "lock").open("w") as holder, (tmp_path / "lock").open("w") as waiting:

        def sleep(_: float) -> None:
            now[0] += 0.25
            if now[0] == 2.0:
                holder.close()

        monkeypatch.setattr(file_lock, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        assert try_lock(holder)
        assert not wait_for_lock(waiting, 0.5, notice=lambda: notices.append(now[0]))
        assert (now, notices) == ([0.5], [])
        assert wait_for_lock(waiting, 60.0, notice=lambda: notices.append(now[0]))
        assert (now, notices) == ([2.0], [1.5])
