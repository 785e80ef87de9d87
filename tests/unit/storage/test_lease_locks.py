"""Locks of files."""

import fcntl
from pathlib import Path

from ray_yolo.storage.lease import try_lock


def test_a_file_has_one_writer_or_many_readers(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as one, (tmp_path / "lock").open("w") as other:
        assert [try_lock(one), try_lock(other), try_lock(other, fcntl.LOCK_SH)] == [True, False, False]
        one.close()
        assert try_lock(other, fcntl.LOCK_SH)
        with (tmp_path / "lock").open("w") as third:
            assert [try_lock(third, fcntl.LOCK_SH), try_lock(third)] == [True, False]
