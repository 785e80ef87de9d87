"""Which run a command continues, which one it makes."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_yolo.checkpoints.remote_checkpoints import RemoteCheckpoints
from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.config.sections import OptimizerConfig
from ray_yolo.core import files
from ray_yolo.core.errors import InputError, StorageError
from ray_yolo.runs import folders, run_dir
from ray_yolo.runs.event_log import EventLog
from ray_yolo.runs.folders import output_folder, storage_folder
from ray_yolo.runs.run_dir import Run, begin_run, find_run
from ray_yolo.runs.run_record import RunRecord, SweepRecord, read_record
from ray_yolo.runs.working_copy import address_of
from ray_yolo.storage.store import FolderStore
from tests.support import run_log
from tests.support.checkpoints import save

RECIPE, OTHER = Recipe(seed=1), Recipe(seed=2)
Open = Callable[..., Run]


def made_up(digest: str) -> RunRecord:
    """The record of a training that never took place."""
    return RunRecord(digest=digest, asked=RECIPE, recipe=RECIPE, architecture=None, anchors=None, num_parameters=1,
                     names=("a",), labels="", command="", provenance={})


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Open]:
    opened: list[Run] = []

    def open_and_record(recipe: Recipe = RECIPE, **placement: object) -> Run:
        where = Placement(storage_path=str(tmp_path), project="p", **placement)
        run = find_run(recipe, where) or begin_run(where, made_up(recipe_digest(recipe)))
        opened.append(run)
        return run

    yield open_and_record
    for run in opened:
        run.release()


def test_the_same_command_continues_its_unfinished_run(start: Open) -> None:
    run = start()
    run.release()
    again = start()
    assert again.folder == run.folder
    assert start(OTHER).folder != run.folder


@pytest.mark.parametrize("name", ["", "mine"])
def test_looking_for_a_run_makes_nothing(tmp_path: Path, name: str) -> None:
    assert find_run(RECIPE, Placement(storage_path=str(tmp_path), name=name)) is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_record_leaves_nothing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(files, "sync", full_disk)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()  # a user's
    for name in ("", "mine"):
        with pytest.raises(InputError):
            begin_run(Placement(storage_path=str(tmp_path), project=".", name=name), made_up("0"))
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine", tmp_path / "mine" / "notes.txt"]


def test_a_second_command_of_a_name_is_refused(tmp_path: Path) -> None:
    placement = Placement(storage_path=str(tmp_path), name="mine")
    run = begin_run(placement, made_up("0"))
    with pytest.raises(InputError):
        begin_run(placement, made_up("1"))
    run.release()
    with pytest.raises(InputError):
        begin_run(placement, made_up("1"))
    assert read_record(run.folder) == made_up("0")


def test_a_finished_run_is_followed_by_a_new_one(start: Open) -> None:
    run = start()
    run.finish()
    run.release()
    assert [run.folder.name, start().folder.name] == ["exp", "exp2"]


def test_a_run_in_training_is_left_alone(start: Open) -> None:
    run = start()
    assert start().folder != run.folder
    with pytest.raises(InputError):
        start(resume=str(run.folder))


def test_a_named_run_continues_until_it_is_finished(start: Open) -> None:
    run = start(name="mine")
    run.release()
    again = start(name="mine")
    assert again.folder == run.folder
    again.finish()
    again.release()
    with pytest.raises(InputError):
        start(name="mine")
    fresh = start(name="mine", exist_ok=True)
    assert fresh.folder == run.folder
    assert (run.folder.with_name("mine.old1") / "finished").exists()


def test_a_named_run_of_another_recipe_is_refused(start: Open) -> None:
    start(name="mine").release()
    with pytest.raises(InputError):
        start(OTHER, name="mine")


def test_resume_takes_folder_checkpoint_or_auto(start: Open, tmp_path: Path) -> None:
    run = start(name="mine")
    (run.folder / "weights").mkdir()
    (run.folder / "weights" / "last.pt").touch()
    run.release()
    for resume in (str(run.folder), str(run.folder / "weights" / "last.pt"), "auto"):
        with pytest.raises(InputError):
            start(OTHER, resume=resume)
        again = start(resume=resume)
        assert again.folder == run.folder
        again.release()
    with pytest.raises(InputError):
        start(resume=str(tmp_path / "nothing"))
    run.finish()
    with pytest.raises(InputError):
        start(resume=str(run.folder))
    with pytest.raises(InputError):
        start(resume="auto")


def test_resume_refuses_older_states(start: Open) -> None:
    run = start(name="mine")
    for step in (1, 2):
        save(run.folder, step, "last", f"epoch{step}")
    run.release()
    for older in ("checkpoints/step-1", "checkpoints/step-1/state.pt", "weights/epoch2.pt"):
        with pytest.raises(InputError):
            start(resume=str(run.folder / older))
    start(resume=str(run.folder / "checkpoints" / "step-2"))


def test_resume_takes_only_settings_of_the_run(tmp_path: Path) -> None:
    """Settings that are given as they are by default count, too."""
    where = Placement(storage_path=str(tmp_path), project="p", name="mine")
    asked = Recipe(epochs=7, data="/old/a.yaml", optimizer=OptimizerConfig(lr0=0.02))
    run = begin_run(where, made_up("x").model_copy(update={
        "asked": asked, "recipe": asked.model_copy(update={"batch_size": 32})}))
    run.release()
    resume = Placement(storage_path=str(tmp_path), project="p", resume=str(run.folder))
    for given in ({}, {"epochs": 7}, {"batch_size": 32}, {"data": "/new/a.yaml"}, {"optimizer": {"lr0": 0.02}}):
        find_run(Recipe.model_validate(given), resume).release()
    for given in ({"epochs": 100}, {"batch_size": 16}, {"optimizer": {"lr0": 0.01}}):
        with pytest.raises(InputError):
            find_run(Recipe.model_validate(given), resume)
    find_run(Recipe(), resume).release()  # what was refused is not held


@pytest.mark.parametrize("name", ["", "mine"])
def test_a_moved_data_set_is_known_by_labels(tmp_path: Path, name: str) -> None:
    where = Placement(storage_path=str(tmp_path), project="p", name=name)
    old, new = (Recipe(seed=1, data=f"/{place}/a.yaml") for place in ("old", "new"))
    run = begin_run(where, made_up(recipe_digest(old)).model_copy(update={"asked": old, "labels": "same"}))
    run.release()
    moved = find_run(new, where, labels=lambda: "same")
    assert moved is not None
    assert moved.folder == run.folder
    moved.release()
    for recipe, labels in ((new, "other"), (new.model_copy(update={"seed": 2}), "same")):
        if name:
            with pytest.raises(InputError):
                find_run(recipe, where, labels=lambda labels=labels: labels)
        else:
            assert find_run(recipe, where, labels=lambda labels=labels: labels) is None


@pytest.mark.parametrize("sweep", [True, False])
def test_trainings_pass_over_sweeps_and_sweeps_over_trainings(tmp_path: Path, sweep: bool) -> None:
    extends = (lambda folder: False) if not sweep else None  # of who looks: the other kind
    where = Placement(storage_path=str(tmp_path), project="p")
    digest = recipe_digest(RECIPE)
    mine = SweepRecord(digest=digest, space="evolve", trials=3) if sweep else made_up(digest)
    run = begin_run(where, mine)
    run.release()
    assert find_run(RECIPE, where, extends) is None
    named = where.model_copy(update={"name": run.folder.name})
    with pytest.raises(InputError):
        find_run(RECIPE, named, extends)
    same = find_run(RECIPE, where, None if extends else lambda folder: False)  # no process holds it
    assert same is not None
    assert same.folder == run.folder
    same.release()


def test_a_sweep_is_not_resumed_by_a_training(tmp_path: Path) -> None:
    where = Placement(storage_path=str(tmp_path), project="p")
    sweep = begin_run(where, SweepRecord(digest=recipe_digest(RECIPE), space="mine.yaml", trials=3))
    sweep.release()
    for _ in range(2):  # the first refusal releases it
        with pytest.raises(InputError):
            find_run(RECIPE, where.model_copy(update={"resume": str(sweep.folder)}))
    with pytest.raises(InputError):
        find_run(RECIPE, where.model_copy(update={"resume": "auto"}))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null"])
def test_a_damaged_record_is_never_overwritten(start: Open, content: str) -> None:
    run = start(name="mine")
    run.release()
    (run.folder / "run.json").write_text(content)
    for placement in ({"name": "mine"}, {"resume": str(run.folder)}):
        with pytest.raises(InputError):
            start(**placement)
    assert (run.folder / "run.json").read_text() == content


def test_a_damaged_record_stops_no_other_command(
        start: Open, caplog: pytest.LogCaptureFixture) -> None:
    whole, torn = start(name="whole"), start(OTHER, name="torn")
    for run in (whole, torn):
        run.release()
    (torn.folder / "run.json").write_text("{")
    for placement in ({}, {"resume": "auto"}):
        found = start(**placement)
        assert found.folder == whole.folder
        found.release()
        [warning] = caplog.messages
        assert str(torn.folder / "run.json") in warning
        caplog.clear()
    assert not folders.is_held(torn.folder)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_locks_gets_nothing(
        start: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    run = start(name="mine")
    run.release()
    before = sorted(tmp_path.rglob("*"))

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    for placement in ({}, {"name": "mine"}, {"name": "new"}, {"resume": str(run.folder)}):
        with pytest.raises(InputError):
            start(**placement)
    assert sorted(tmp_path.rglob("*")) == before


def test_output_folders_are_numbered_and_never_shared(tmp_path: Path) -> None:
    placement = Placement(storage_path=str(tmp_path), project="val", name="mine")
    assert [output_folder(placement).name for _ in range(3)] == ["mine", "mine2", "mine3"]
    assert output_folder(placement.model_copy(update={"exist_ok": True})).name == "mine"
    assert not list(tmp_path.rglob("*.old*")), "an empty folder is used as it is"
    assert output_folder(Placement(storage_path=str(tmp_path), project="val")).name == "exp"


def test_results_in_a_store_have_unique_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FolderStore(tmp_path / "bucket" / "val").put("mine3/results.json", b"")

    def named(machine: str, **placement: Any) -> str:
        monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / machine))
        where = Placement.model_validate({"storage_path": f"file://{tmp_path}/bucket", "project": "val", **placement})
        folder = output_folder(where)
        assert folder.is_relative_to(tmp_path / machine)
        assert address_of(folder) == f"file://{tmp_path}/bucket/val/{folder.name}"
        return folder.name

    assert [named(machine) for machine in ("one", "two", "two", "one")] == ["exp", "exp2", "exp3", "exp4"]
    assert named("one", name="mine") == "mine4"
    assert named("one", name="mine", exist_ok=True) == "mine"
    for taken in ("mine", "mine3"):
        with pytest.raises(InputError):
            named("two", name=taken, exist_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "list", lambda *_: [])
        assert named("three") == "exp5", "others have taken them since they were listed"
    shutil.rmtree(tmp_path / "bucket")
    assert named("one") == "exp", "what a machine still has of others takes no name"


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job's home; it runs in Ray's copy of what was submitted."""
    copy = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize(("storage", "folder"), [("", ""), ("mine", "mine")])
def test_a_job_stores_nothing_in_rays_copy_of_its_folder(spec: Path, storage: str, folder: str) -> None:
    placement = Placement(storage_path=storage)
    assert storage_folder(placement) == spec / "ray-yolo" / folder
    run = begin_run(placement, made_up("x"))
    assert run.folder == spec / "ray-yolo" / folder / "runs" / "train" / "exp"
    assert not list(Path.cwd().iterdir())
    run.release()


def test_what_is_named_in_full_is_the_storage_wherever_a_job_runs(spec: Path, tmp_path: Path) -> None:
    assert storage_folder(Placement(storage_path=str(tmp_path))) == tmp_path
    assert storage_folder(Placement(project=str(tmp_path))) == tmp_path
    assert storage_folder(Placement(storage_path="mine", project=str(tmp_path))) == spec / "ray-yolo" / "mine"


def test_outside_of_jobs_the_storage_is_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert storage_folder(Placement()) == tmp_path
    assert storage_folder(Placement(storage_path="mine")) == tmp_path / "mine"
def test_a_name_used_again_holds_new_results(tmp_path: Path) -> None:
    placement = Placement(storage_path=str(tmp_path), project="val", name="mine", exist_ok=True)
    for number in range(3):
        (output_folder(placement) / f"{number}.json").touch()
    found = {path.parent.name: path.name for path in tmp_path.rglob("*.json")}
    assert found == {"mine.old1": "0.json", "mine.old2": "1.json", "mine": "2.json"}


def test_sources_and_trainings_are_not_moved_aside(tmp_path: Path) -> None:
    placement = Placement(storage_path=str(tmp_path), project="p", name="mine", exist_ok=True)
    source = tmp_path / "p" / "mine" / "pictures" / "1.png"
    source.parent.mkdir(parents=True)
    source.touch()
    with pytest.raises(InputError):
        output_folder(placement, [tmp_path / "weights.pt", str(source)])
    (tmp_path / "p" / "mine" / "run.json").touch()
    with pytest.raises(InputError):
        output_folder(placement)
    assert source.exists()


def test_a_second_command_warns_of_the_first(
        start: Open, caplog: pytest.LogCaptureFixture) -> None:
    first = start()
    assert not caplog.messages
    second = start()
    assert len(caplog.messages) == 1
    assert second.folder != first.folder
    second.release()
    first.release()


def test_a_run_that_has_lost_its_checkpoints_says_that_it_starts_again(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with (tmp_path / ".lock").open("w") as lock:
        run = Run(tmp_path, lock, None)
        log.append(run_log.start())
        assert run.lost_checkpoints() == ""
        log.append(run_log.checkpoint(7))
        assert "has saved step 7" in run.lost_checkpoints()
        save(tmp_path, 7)
        assert run.lost_checkpoints() == ""
        shutil.rmtree(tmp_path / "checkpoints")
        store = FolderStore(tmp_path / "store")
        run.remote = SimpleNamespace(checkpoints=RemoteCheckpoints(store, 1))
        assert "starts again at step 0" in run.lost_checkpoints()
        run.remote.checkpoints.put(save(tmp_path / "elsewhere", 7), 1)
        assert run.lost_checkpoints() == ""


def test_the_time_of_a_sweep_that_cannot_be_noted_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(folder: Path, record: object) -> None:
        raise OSError(28, "No space left on device")

    where = Placement(storage_path=str(tmp_path), project=".")
    sweep = begin_run(where, SweepRecord(digest="0", space="evolve", trials=3))
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "write_record", full_disk)
        sweep.note_seconds(5.0, said.append)
    [warning] = said
    assert "run.json cannot be written (No space left on device)" in warning
    sweep.note_seconds(7.0, said.append)
    assert len(said) == 1
    record = read_record(sweep.folder)
    assert isinstance(record, SweepRecord)
    assert record.seconds == 7.0
    sweep.release()


def test_a_start_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A file that may not grow is refused as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(StorageError):
            begin_run(Placement(storage_path=str(tmp_path), project="."), SweepRecord(digest="0", space="evolve",
                                                                                      trials=3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
