"""Files on their way to a store; what comes from there is tested with runs (test_stored_run)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.core.errors import RayYoloError
from ray_yolo.runs.remote_run import put_results
from ray_yolo.storage.store import FolderStore


def test_results_are_stored_whatever_their_folders_are_called(tmp_path: Path) -> None:
    """A class may have the name of a folder of a run; what is Ray's, and hidden, stays."""
    folder = tmp_path / "exp"
    names = {"results.json", "crops/weights/a.jpg", "crops/log/b.jpg", "labels/c.txt"}
    for name in (*names, "ray/state", ".stored-at"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    put_results(folder, f"file://{tmp_path}/bucket/runs/val/exp")
    store = FolderStore(tmp_path / "bucket" / "runs/val/exp")
    assert {entry.name for entry in store.walk()} == names
    assert store.get("crops/log/b.jpg").data == b"crops/log/b.jpg"


def test_results_that_storage_refuses_stay(tmp_path: Path) -> None:
    folder = tmp_path / "exp"
    folder.mkdir()
    (folder / "results.json").write_text("{}")
    (tmp_path / "bucket").write_text("")  # no folder
    with pytest.raises(RayYoloError):
        put_results(folder, f"file://{tmp_path}/bucket/runs/val/exp")
    assert (folder / "results.json").exists()
