"""No second training starts in a folder in which workers of a killed driver still train."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from ray_yolo.runs.worker_lock import WORKERS_LOCK, await_former_workers, hold_folder


def test_workers_of_one_driver_do_not_wait_for_each_other_and_leave_nothing(tmp_path: Path) -> None:
    notices = list[str]()
    await_former_workers(tmp_path, notices.append)
    with hold_folder(tmp_path), hold_folder(tmp_path):
        pass
    await_former_workers(tmp_path, notices.append)
    assert not notices
    assert (tmp_path / WORKERS_LOCK).read_text() == ""


def test_storage_without_locks_does_not_prevent_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, kind: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with hold_folder(tmp_path), hold_folder(tmp_path / "missing"):
        pass
