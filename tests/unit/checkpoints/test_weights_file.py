"""Weights by their address: a verified copy on each machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints.remote_checkpoints import RemoteCheckpoints
from ray_yolo.checkpoints.weights_file import absolute_weights, local_file
from ray_yolo.core.errors import CheckpointError
from ray_yolo.storage.store import FolderStore
from tests.support.checkpoints import save, value


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderStore:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    return FolderStore(tmp_path / "exp")


@pytest.fixture
def best(tmp_path: Path, store: FolderStore) -> str:
    """The address of a run's best weights, while it is trained."""
    run_dir = tmp_path / "run"
    RemoteCheckpoints(store, 1).put(save(run_dir, 3, "last", "best"), 2)
    return f"file://{tmp_path}/exp/weights/best.pt"


def end(tmp_path: Path, store: FolderStore) -> None:
    checkpoint.slim_weights(tmp_path / "run", ["model"])
    for path in (tmp_path / "run" / "weights").iterdir():
        store.put(f"weights/{path.name}", path)


def test_weights_of_a_run_in_training_are_the_state_that_the_pointer_names(
        best: str, tmp_path: Path, store: FolderStore) -> None:
    assert value(local_file(best)) == 3
    RemoteCheckpoints(store, 1).put(save(tmp_path / "run", 4, "best"), 2)
    assert value(local_file(best)) == 4


def test_weights_of_a_finished_run_are_their_own_file(best: str, tmp_path: Path, store: FolderStore) -> None:
    local_file(best)
    end(tmp_path, store)
    assert local_file(best).read_bytes() == (tmp_path / "run" / "weights" / "best.pt").read_bytes()


def test_a_cached_file_is_not_downloaded_again(best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = local_file(best)
    monkeypatch.setattr(FolderStore, "fetch", None)
    assert local_file(best) == path


def test_an_object_that_mismatches_its_manifest_is_refused(best: str, tmp_path: Path, store: FolderStore) -> None:
    end(tmp_path, store)
    store.put("weights/best.pt", b"other")
    for _ in range(2):
        with pytest.raises(CheckpointError):
            local_file(best)


def test_a_file_without_a_manifest_is_downloaded_every_time(tmp_path: Path, store: FolderStore) -> None:
    for content in (b"1", b"2"):
        store.put("yolov5s.pt", content)
        assert local_file(f"file://{tmp_path}/exp/yolov5s.pt").read_bytes() == content


def test_a_path_stays_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_file("best.pt") == tmp_path / "best.pt"
    assert absolute_weights("best.pt") == str(tmp_path / "best.pt")
    assert absolute_weights("s3://bucket/best.pt") == "s3://bucket/best.pt"
