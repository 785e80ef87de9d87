"""What a machine knows of the runs of a store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ray_yolo.runs.working_copy import (
    address_of,
    create_working_copy,
    holder_id,
    is_leased,
    refresh,
    working_copy_folder,
    working_copy_of_run,
)
from ray_yolo.storage import lease
from ray_yolo.storage.store import FolderStore


@pytest.fixture
def address(tmp_path: Path) -> str:
    """Of a project with a finished run and one that is trained."""
    store = FolderStore(tmp_path / "bucket")
    for name in ("done", "going"):
        store.put(f"{name}/run.json", name.encode())
        store.put(f"{name}/log/000001-000000.jsonl", b"")
    store.put("done/finished", b"")
    store.put("going/lease.json", lease.Terms(1, "a", "elsewhere 1").to_bytes())
    store.put("begun/lease.json", lease.Terms(1, "b", "elsewhere 2").to_bytes())
    return f"file://{tmp_path}/bucket"


def shown(project: Path) -> dict[str, list[str]]:
    return {folder.name: sorted(path.name for path in folder.iterdir()) for folder in project.iterdir()}


def test_a_project_has_the_records_that_the_store_has(address: str, tmp_path: Path) -> None:
    project, store = tmp_path / "spool", FolderStore(tmp_path / "bucket")
    refresh(project, address, lambda folder: False)
    assert shown(project) == {"done": [".stored-at", "finished", "run.json"], "going": [".stored-at", "run.json"]}
    assert address_of(project / "going") == f"{address}/going"
    modified = (tmp_path / "bucket" / "going" / "run.json").stat().st_mtime
    assert (project / "going" / "run.json").stat().st_mtime == pytest.approx(modified, abs=1e-3)
    store.delete("done/finished")
    store.put("going/run.json", b"another one of this name")
    (project / "going" / "events.jsonl").touch()
    (project / "done" / "events.jsonl").touch()
    (project / "mine").mkdir()  # not a working copy
    create_working_copy(project / "gone", f"{address}/gone")
    refresh(project, address, lambda folder: False)
    assert shown(project) == {"done": [".stored-at", "events.jsonl", "run.json"], "going": [".stored-at", "run.json"],
                              "mine": []}


@pytest.mark.parametrize("saved", ["checkpoints/step-1", "trials/trial0/checkpoints/step-1"])
def test_a_copy_with_checkpoints_is_moved_aside_if_the_store_lacks_its_run(
        address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, saved: str) -> None:
    """A folder of another machine that is not mounted is an empty store."""
    project, store = tmp_path / "spool", FolderStore(tmp_path / "bucket")
    for name in ("gone", "going"):
        create_working_copy(project / name, f"{address}/{name}")
        (project / name / "run.json").write_text("of the former run")
        (project / name / saved).mkdir(parents=True)
    store.delete("done/run.json")
    for _ in range(2):
        refresh(project, address, lambda folder: False)
    assert shown(project) == {"going": [".stored-at", "run.json"]}
    aside = sorted(project.with_name(f"{project.name}.removed").iterdir())
    for folder, name, said in zip(aside, ("going", "gone"), caplog.messages, strict=True):
        assert (folder.name.partition("-")[0], (folder / saved).is_dir(), address_of(folder)) == (name, True, "")
        assert (folder / "run.json").read_text() == "of the former run"
        assert f"{address}/{name}" in said
        assert str(folder) in said


def test_a_working_copy_in_use_stays_as_it_is(address: str, tmp_path: Path) -> None:
    create_working_copy(tmp_path / "spool" / "going", f"{address}/going")
    create_working_copy(tmp_path / "spool" / "new", f"{address}/new")
    refresh(tmp_path / "spool", address, lambda folder: folder.name != "done")
    assert {name: files for name, files in shown(tmp_path / "spool").items() if name != "done"} == {
        "going": [".stored-at"], "new": [".stored-at"]}


def test_a_run_that_is_named_is_the_only_one_that_is_asked_for(address: str, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    project, asked = tmp_path / "spool", list[str]()
    for name in ("gone", "other"):
        create_working_copy(project / name, f"{address}/{name}")
    listed = FolderStore.list
    monkeypatch.setattr(FolderStore, "list", lambda self, prefix="": (asked.append(prefix), listed(self, prefix))[1])
    for name in ("done", "gone"):
        refresh(project, address, lambda folder: False, name)
    assert asked == ["done/", "gone/"]
    assert shown(project) == {"done": [".stored-at", "finished", "run.json"], "other": [".stored-at"]}


def test_the_working_copy_of_an_address_is_the_one_of_its_project(tmp_path: Path) -> None:
    run = working_copy_of_run("s3://bucket/vision/runs/train/exp", "runs/train")
    assert run == working_copy_folder("s3://bucket/vision") / "runs/train/exp"
    assert working_copy_of_run("s3://bucket/exp", "runs/train") == working_copy_folder("s3://bucket") / "exp"
    assert (
        working_copy_of_run("s3://bucket/runs/train/a/b", "runs/train")
        == working_copy_folder("s3://bucket/runs/train/a") / "b"
    )


def test_trials_are_stored_below_their_sweep(tmp_path: Path) -> None:
    create_working_copy(tmp_path, "s3://bucket/exp")
    assert address_of(tmp_path / "trials" / "trial3") == "s3://bucket/exp/trials/trial3"
    assert address_of(tmp_path / "trials") == ""


def test_a_run_is_trained_as_long_as_its_lease_is_renewed(address: str, tmp_path: Path) -> None:
    create_working_copy(tmp_path / "spool", f"{address}/going")
    assert is_leased(tmp_path / "spool")
    then = (tmp_path / "bucket" / "going" / "lease.json").stat().st_mtime - lease.EXPIRES
    os.utime(tmp_path / "bucket" / "going" / "lease.json", (then, then))
    assert not is_leased(tmp_path / "spool")
    assert not is_leased(tmp_path)


def test_the_holder_id_of_a_working_copy_is_stable_and_unique(tmp_path: Path) -> None:
    for name in ("one", "two"):
        create_working_copy(tmp_path / name, "file:///x")
    assert holder_id(tmp_path / "one") == holder_id(tmp_path / "one") != holder_id(tmp_path / "two")


def test_one_address_has_one_working_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path))
    assert working_copy_folder("s3://bucket/x/") == working_copy_folder("s3://bucket/x") != working_copy_folder("s3://bucket/y")
