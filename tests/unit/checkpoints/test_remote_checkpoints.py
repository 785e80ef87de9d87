"""Checkpoints in a store: the state after each way an upload can end, and which checkpoint is used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints.remote_checkpoints import RemoteCheckpoints
from ray_yolo.checkpoints.state_file import manifest_text
from ray_yolo.core.errors import CheckpointError, TrainingError
from ray_yolo.storage.lease import LEASE, Terms
from ray_yolo.storage.store import Entry, Fetched, FolderStore
from tests.support.checkpoints import save, value


class Machine:
    """A folder of one worker's machine, and its view of the store."""

    def __init__(self, folder: Path, store: FolderStore, attempt: int = 1) -> None:
        self.folder, self.stored = folder, RemoteCheckpoints(store, attempt)

    def save(self, step: int, *kinds: str, keep: int = 1, number: float | None = None) -> None:
        path = save(self.folder, step, *kinds, value=number)
        self.stored.put(path, keep)
        checkpoint.prune(self.folder, keep)

    def download(self, step: int | None = None) -> tuple[list[str], list[float]]:
        """The problems, and the values of the folder's checkpoints afterwards."""
        problems = self.stored.download(self.folder, step)
        return problems, [value(each / "state.pt") for each in checkpoint.newest_first(self.folder)]


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


@pytest.fixture
def here(tmp_path: Path, store: FolderStore) -> Machine:
    return Machine(tmp_path / "here", store)


@pytest.fixture
def there(tmp_path: Path, store: FolderStore) -> Machine:
    return Machine(tmp_path / "there", store)


def names(store: FolderStore, prefix: str) -> list[str]:
    return [entry.name for entry in store.list(prefix)]


def test_another_machine_gets_the_newest_checkpoint_and_the_weights(here: Machine, there: Machine) -> None:
    assert there.download() == ([], [])
    here.save(1, "last", "best")
    here.save(2, "last")
    assert there.download() == ([], [2])
    there.stored.download_weights(there.folder)
    assert {kind: value(there.folder / "weights" / f"{kind}.pt") for kind in ("last", "best")} == {"last": 2, "best": 1}
    checkpoint.check_weights(there.folder, 2)


def test_a_stored_manifest_names_no_object_outside_the_states(here: Machine, store: FolderStore) -> None:
    here.save(1, "last", keep=2)
    key = "checkpoints/000001-step-1.json"
    stated = json.loads(store.get(key).data)
    store.put("model.pt", b"another object")
    store.put(key, manifest_text(stated | {"sha256": "../model"}).encode())
    with pytest.raises(OSError, match="sha256"):
        here.save(2, "last")
    assert store.get("model.pt").data == b"another object"


def test_removed_checkpoints_are_not_used(
        here: Machine, there: Machine, store: FolderStore) -> None:
    for step in (1, 2, 3):
        here.save(step, "last", keep=3)
    here.stored.remove_newer(1)
    assert there.download() == ([], [1])
    assert len(names(store, "states/")) == 1


def test_after_newer_checkpoints_are_removed_the_weights_are_those_of_the_remaining_one(
        here: Machine, there: Machine, store: FolderStore) -> None:
    here.save(1, "last", "best", keep=2)
    here.save(2, "last", keep=2)
    here.stored.remove_newer(1)
    there.stored.download_weights(there.folder)
    assert value(there.folder / "weights" / "last.pt") == 1
    assert json.loads(store.get("weights/last.json").data)["step"] == 1


def test_where_all_checkpoints_were_removed_training_starts_again(
        here: Machine, there: Machine, store: FolderStore) -> None:
    here.save(1, "last")
    here.stored.remove_newer(0)
    assert contents(store) == []
    assert there.download() == ([], [])


def test_checkpoints_neither_shown_nor_among_the_newest_are_removed(here: Machine, store: FolderStore) -> None:
    for step, kinds in ((1, ("last", "epoch0")), (2, ("last", "best")), (3, ("last",)), (4, ("last",)), (5, ("last",))):
        here.save(step, *kinds, keep=2)
    assert names(store, "checkpoints/") == [f"000001-step-{step}.json" for step in (1, 2, 4, 5)]
    assert len(names(store, "states/")) == 4
    shown = {kind: json.loads(store.get(f"weights/{kind}.json").data)["step"] for kind in ("last", "best", "epoch0")}
    assert shown == {"last": 5, "best": 2, "epoch0": 1}


def test_the_next_saver_keeps_the_weights_of_others(here: Machine, there: Machine) -> None:
    """A worker that takes over has no checkpoint on its machine."""
    here.save(1, "last", "best")
    there.save(2, "last")
    here.download()
    assert checkpoint.steps_of_weights(here.folder) == {"last": 2, "best": 1}


@pytest.mark.parametrize("torn", ["states/", "checkpoints/"])
def test_an_interrupted_upload_leaves_the_previous_checkpoint(
        here: Machine, there: Machine, store: FolderStore, torn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here.save(1, "last")
    put = store.put

    def fails(key: str, data: Any) -> None:
        if key.startswith(torn):
            raise OSError("away")
        put(key, data)

    monkeypatch.setattr(store, "put", fails)
    with pytest.raises(OSError, match="away"):
        here.save(2, "last")
    assert there.download() == ([], [1])
    monkeypatch.undo()
    here.stored.upload_pending(here.folder)
    assert there.download() == ([], [2])


def test_a_damaged_checkpoint_is_set_aside_and_reported(here: Machine, there: Machine, store: FolderStore) -> None:
    here.save(1, "last", keep=2)
    here.save(2, "last", keep=2)
    sha256 = json.loads(store.get("checkpoints/000001-step-2.json").data)["sha256"]
    store.put(f"states/{sha256}.pt", b"other")
    problems, values = there.download()
    assert values == [1]
    assert problems == ["checkpoints/000001-step-2.json: 5 bytes instead of "
                        f"{json.loads(store.get('checkpoints/000001-step-1.json').data)['size']}"]
    assert "damaged-000001-step-2.json" in names(store, "checkpoints/")
    assert there.download() == ([], [1])


def test_a_manifest_that_is_damaged_while_a_training_runs_fails_its_saves_until_the_next_start(
        here: Machine, there: Machine, store: FolderStore) -> None:
    """It was a ValueError without a place, which ended the training."""
    here.save(1, "last", keep=2)
    here.save(2, "last", keep=2)
    store.put("checkpoints/000001-step-2.json", b"{")
    with pytest.raises(OSError, match=r"^checkpoints/000001-step-2.json: the manifest is damaged \("):
        here.save(3, "last")
    problems, _ = there.download()
    assert problems[0].startswith("checkpoints/000001-step-2.json: its manifest is damaged (")
    here.save(4, "last")
    assert there.download() == ([], [4])


def test_an_old_manifest_that_is_damaged_does_not_keep_others(here: Machine, store: FolderStore) -> None:
    """Else nothing would be removed any more, without a word."""
    for step in (1, 2):
        here.save(step, "last", keep=2)
    store.put("checkpoints/000001-step-1.json", b"{")
    for step in (3, 4, 5):
        here.save(step, "last", keep=2)
    assert names(store, "checkpoints/") == ["000001-step-4.json", "000001-step-5.json"]
    assert len(names(store, "states/")) == 3  # that of the damaged one is not known


@pytest.mark.parametrize("content", ["", "[]", "null", "{}"])
def test_a_damaged_manifest_on_this_machine_does_not_condemn_the_stored_one(
        here: Machine, there: Machine, store: FolderStore, content: str) -> None:
    here.save(1, "last")
    there.download()
    [manifest] = there.folder.glob("checkpoints/step-1/MANIFEST.json")
    manifest.write_text(content)
    assert there.stored.download(there.folder) == []
    assert names(store, "checkpoints/") == ["000001-step-1.json"]
    assert there.download() == ([], [1])


def test_a_local_folder_that_is_removed_does_not_condemn_the_stored_checkpoint(
        here: Machine, there: Machine, store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    here.save(1, "last")
    fetch = store.fetch

    def removed_meanwhile(key: str, path: Path) -> Fetched:
        shutil.rmtree(path.parent)
        return fetch(key, path)

    monkeypatch.setattr(store, "fetch", removed_meanwhile)
    with pytest.raises(CheckpointError):
        there.download()
    assert names(store, "checkpoints/") == ["000001-step-1.json"]
    monkeypatch.undo()
    assert there.download() == ([], [1])


def test_without_an_intact_checkpoint_training_does_not_start_over(
        here: Machine, there: Machine, store: FolderStore) -> None:
    here.save(1, "last")
    for name in names(store, "states/"):
        store.delete(f"states/{name}")
    with pytest.raises(CheckpointError):
        there.download()


def test_workers_download_the_chosen_step(here: Machine, there: Machine) -> None:
    here.save(1, "last", keep=2)
    here.save(2, "last", keep=2)
    assert there.download(1) == ([], [1])
    with pytest.raises(CheckpointError):
        there.download(3)


def test_a_folder_mirrors_the_store_and_is_downloaded_once(here: Machine, there: Machine, store: FolderStore,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    save(there.folder, 9, "last")  # of an earlier run
    here.save(1, "last")
    assert there.download() == ([], [1])
    monkeypatch.setattr(store, "fetch", None)
    assert there.download() == ([], [1])


def test_a_superseded_attempt_stores_nothing(here: Machine, there: Machine, tmp_path: Path,
                                             store: FolderStore) -> None:
    here.save(1, "last")
    store.put(LEASE, Terms(2, "b", "elsewhere 7").to_bytes())
    with pytest.raises(TrainingError):
        here.save(3, "last")
    assert there.download() == ([], [1])


def test_a_superseded_manifest_is_ignored_once_the_next_attempt_has_saved(
        here: Machine, tmp_path: Path, store: FolderStore) -> None:
    """The takeover may happen between the check of the lease and the upload of the manifest."""
    second = Machine(tmp_path / "second", store, attempt=2)
    second.save(2, "last", number=2.5)
    here.save(3, "last", keep=2)
    assert second.download() == ([], [2.5])


def test_a_superseded_attempt_that_was_frozen_deletes_nothing_of_the_living_one(
        here: Machine, tmp_path: Path, store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes old checkpoints after its upload. Meanwhile the next attempt trains and saves, with equal states."""
    here.save(1, "last", keep=2)
    here.save(2, "last", keep=2)
    living = Machine(tmp_path / "living", store, attempt=2)
    listed, calls = FolderStore.list, []

    def freeze_after_first_listing(self: FolderStore, prefix: str = "") -> list[Entry]:
        entries = listed(self, prefix)
        calls.append(prefix)
        if len(calls) == 1:
            for step in (1, 3):  # the state of step 1 equals the one that the frozen attempt is about to remove
                living.save(step, "last", keep=5)
        return entries

    monkeypatch.setattr(FolderStore, "list", freeze_after_first_listing)
    here.save(3, "last", keep=2)
    monkeypatch.undo()
    assert [name for name in names(store, "checkpoints/") if name.startswith("000002")] == [
        "000002-step-1.json", "000002-step-3.json"]
    restored = Machine(tmp_path / "restored", store, attempt=3)
    assert restored.download() == ([], [3])
    assert restored.download(1)[1] == [1]


def test_a_frozen_attempt_whose_lease_was_taken_removes_nothing(here: Machine, store: FolderStore) -> None:
    here.save(1, "last")
    before = contents(store)
    store.put(LEASE, Terms(2, "another", "another machine").to_bytes())
    with pytest.raises(TrainingError):
        here.stored.remove_newer(0)
    assert contents(store) == before


def contents(store: FolderStore) -> list[str]:
    return [entry.name for entry in store.walk() if entry.name != LEASE]


def test_a_run_whose_checkpoints_are_gone_does_not_start_again_at_0(
        here: Machine, there: Machine, store: FolderStore) -> None:
    here.save(1, "last")
    for name in names(store, "checkpoints/"):
        store.delete(f"checkpoints/{name}")
    with pytest.raises(CheckpointError):
        there.download()
    here.stored.drop()
    assert there.download() == ([], [])


def test_the_next_start_after_a_damaged_checkpoint_does_not_begin_at_0(
        here: Machine, there: Machine, store: FolderStore) -> None:
    here.save(1)
    for entry in store.list("states/"):
        store.put(f"states/{entry.name}", b"torn")
    for _ in range(2):
        with pytest.raises(CheckpointError):
            there.download()
