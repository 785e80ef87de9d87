"""What is completed after the end of a command."""

from pathlib import Path
from threading import Thread

import pytest

from ray_yolo.runs.working_copy import FINISHED, create_working_copy
from ray_yolo.sinks.completion import complete_records
from ray_yolo.storage.store import open_store


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The run folders whose TensorBoard files were completed."""
    folders: list[Path] = []
    monkeypatch.setattr("ray_yolo.sinks.completion.complete", folders.append)
    return folders


def test_what_was_drawn_after_the_end_is_stored(
        tmp_path: Path, completed: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    address = f"file://{tmp_path}/bucket/runs/train/exp"
    (folder := tmp_path / "exp").mkdir()
    create_working_copy(folder, address)
    (folder / FINISHED).touch()
    (folder / "results.png").write_bytes(b"curves")
    (folder / "weights").mkdir()
    (folder / "weights" / "last.pt").write_bytes(b"stored by the training")
    complete_records(folder, None)
    store = open_store(address)
    assert store.get("results.png").data == b"curves"
    assert [entry.name for entry in store.list("weights/")] == []
    assert completed == [folder]


def test_a_run_that_is_about_to_finish_is_waited_for(tmp_path: Path, completed: list[Path]) -> None:
    waiting = Thread(target=complete_records, args=(tmp_path, None), kwargs={"wait_seconds": 60.0}, daemon=True)
    waiting.start()
    assert completed == []
    (tmp_path / FINISHED).touch()
    waiting.join(60)
    assert completed == [tmp_path]


def test_a_run_that_does_not_finish_stays_as_it_is(tmp_path: Path, completed: list[Path]) -> None:
    complete_records(tmp_path, None, wait_seconds=0.2)
    assert completed == []
