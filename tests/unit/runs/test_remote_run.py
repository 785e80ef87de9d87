"""The driver's side of runs in a store: who continues which, from which machine, with what."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ray_yolo import cli
from ray_yolo.checkpoints.local import newest_first
from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.core.errors import InputError, TrainingError
from ray_yolo.core.events import WarningEvent
from ray_yolo.runs.event_log import EVENTS_FILE, EventLog
from ray_yolo.runs.remote_run import RemoteRun, read_log, worker_copy
from ray_yolo.runs.run_dir import Run, begin_run, download_run, find_run
from ray_yolo.runs.run_record import RunRecord
from ray_yolo.sinks import upload
from ray_yolo.sinks.upload import FileUpload, LogUpload
from ray_yolo.storage import lease
from ray_yolo.storage.lease import LEASE
from ray_yolo.storage.store import FolderStore
from tests.support import checkpoints, run_log
from tests.support.run_log import messages

RECIPE, OTHER = Recipe(seed=1), Recipe(seed=2)
Start = Callable[..., Run]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "EXPIRES", 1.5)
    monkeypatch.setattr(lease, "RENEWS", 0.1)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.1)


@pytest.fixture
def bucket(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "bucket" / "runs/train")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """The run of a command on a machine."""
    opened: list[Run] = []

    def start(recipe: Recipe = RECIPE, machine: str = "one", **placement: object) -> Run:
        monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / machine))
        where = Placement.model_validate({"storage_path": f"file://{tmp_path}/bucket", **placement})
        record = RunRecord(digest=recipe_digest(recipe), asked=recipe, recipe=recipe, architecture=None, anchors=None,
                           num_parameters=1, names=("a",), labels="", command="", provenance={})
        run = find_run(recipe, where) or begin_run(where, record)
        assert run.folder.is_relative_to(tmp_path / machine)
        opened.append(run)
        return run

    yield start
    for run in opened:
        run.lock.close()
        remote(run)._lease._stop.set()


def remote(run: Run) -> RemoteRun:
    assert run.remote
    return run.remote


def notify(run: Run, *messages: str) -> None:
    log = EventLog(run.folder / EVENTS_FILE)
    for message in messages:
        log.append(WarningEvent(message=message))
    log.close()


def die(run: Run) -> None:
    """As kill -9 does it."""
    run.lock.close()
    remote(run)._lease._stop.set()
    remote(run)._lease._thread.join()


def test_another_machine_continues_an_unfinished_run_with_its_log_and_files(start: Start) -> None:
    run = start()
    notify(run, "a", "b")
    (run.folder / "mlflow.json").write_text("{}")
    (run.folder / "plots").mkdir()
    (run.folder / "plots" / "x.png").write_bytes(b"x")
    run.release()
    again = start(machine="two")
    assert (again.folder.name, messages(again.folder), remote(again).attempt) == ("exp", ["a", "b"], 2)
    assert (again.folder / "mlflow.json").read_text() == "{}"
    assert (again.folder / "plots" / "x.png").read_bytes() == b"x"
    assert start(OTHER, machine="three").folder.name == "exp2"


def test_a_finished_run_is_continued_nowhere(start: Start, bucket: FolderStore) -> None:
    run = start(name="mine")
    run.finish()
    run.release()
    assert bucket.get("mine/finished").data == b""
    with pytest.raises(InputError):
        start(name="mine", machine="two")


def test_a_run_that_another_process_trains_is_refused(start: Start) -> None:
    start(name="mine")
    with pytest.raises(InputError):
        start(name="mine", machine="two")
    with pytest.raises(InputError):
        start(name="mine")
    assert start(machine="two").folder.name == "exp"


def test_on_its_own_machine_the_next_command_does_not_wait(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "EXPIRES", 1e6)
    die(start())
    assert remote(start()).attempt == 2


def test_the_next_command_uploads_what_a_dead_driver_had_not(
        start: Start, bucket: FolderStore) -> None:
    run = start()
    notify(run, "a")
    remote(run).flush_log()
    notify(run, "b")
    checkpoints.save(run.folder, 4, "last")
    die(run)
    again = start()
    again.release()
    third = start(machine="two")
    assert messages(third.folder) == ["a", "b"]
    remote(third).checkpoints.download(third.folder)
    assert [folder.name for folder in newest_first(third.folder)] == ["step-4"]


def test_a_driver_notices_that_it_has_lost_its_lease(start: Start, bucket: FolderStore) -> None:
    run, stopped = start(), threading.Event()
    remote(run).on_loss = stopped.set
    bucket.put(f"exp/{LEASE}", lease.Terms(2, "b", "elsewhere 1").to_bytes())
    assert stopped.wait(60)
    assert remote(run).is_lost


def test_who_has_lost_a_run_overwrites_nothing_of_it(start: Start, bucket: FolderStore, monkeypatch: pytest.MonkeyPatch,
                                                     caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(lease, "RENEWS", 1e6)  # it has not noticed yet
    run = start()
    bucket.put(f"exp/{LEASE}", lease.Terms(2, "b", "elsewhere 1").to_bytes())
    bucket.put("exp/results.csv", b"theirs")
    (run.folder / "results.csv").write_text("mine")
    run.finish()
    run.release()
    assert bucket.get("exp/results.csv").data == b"theirs"
    assert [entry.name for entry in bucket.list("exp/")] == ["lease.json", "results.csv", "run.json"]
    assert "another process has taken over this run" in caplog.text


def test_a_segment_is_stored_once_whatever_becomes_of_the_answer(start: Start, bucket: FolderStore,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    run, put_if = start(), FolderStore.put_if

    def unanswered(*arguments: object) -> None:
        put_if(*arguments)
        raise OSError("reset")

    notify(run, "a")
    monkeypatch.setattr(FolderStore, "put_if", unanswered)
    with pytest.raises(OSError, match="reset"):
        remote(run).flush_log()
    monkeypatch.undo()
    notify(run, "b")
    remote(run).flush_log()
    remote(run).flush_log()
    log = (run.folder / EVENTS_FILE).read_bytes()
    assert read_log(remote(run)._store) == log
    assert len(bucket.list("exp/log/")) == 2


def test_a_segment_ends_with_a_whole_line(start: Start, bucket: FolderStore) -> None:
    """The log may be read while its writer is half-way through a line, which another machine would parse."""
    run = start()
    notify(run, "a", "b")
    log = run.folder / EVENTS_FILE
    whole = log.read_bytes()
    for size in (len(whole) - 5, len(whole) - 1, len(whole)):
        log.write_bytes(whole[:size])
        remote(run).flush_log()
        assert read_log(remote(run)._store) == whole[: whole[:size].rfind(b"\n") + 1]
    assert len(bucket.list("exp/log/")) == 2


def test_a_segment_of_another_process_is_not_overwritten(start: Start, bucket: FolderStore) -> None:
    run = start()
    bucket.put("exp/log/000001-000000.jsonl", b"other")
    notify(run, "a")
    with pytest.raises(TrainingError):
        remote(run).flush_log()


def test_important_log_lines_are_uploaded_at_once_and_files_only_when_changed(
        start: Start, bucket: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    run, puts, put = start(), list[str](), FolderStore.put
    monkeypatch.setattr(FolderStore, "put", lambda self, key, data: (puts.append(key), put(self, key, data)))
    log, files = LogUpload(remote(run)), FileUpload(run.folder, remote(run).address)

    def update() -> list[str]:
        puts.clear()
        files.update((), ended=False)
        return sorted(key for key in puts if key != LEASE)

    (run.folder / "results.csv").write_text("1")
    (run.folder / ".hidden").write_text("1")
    notify(run, "a")
    log.event(WarningEvent(message="a"))
    log.update()
    assert [entry.name for entry in bucket.list("exp/log/")] == ["000001-000000.jsonl"]
    assert update() == ["results.csv"]
    assert update() == []
    (run.folder / "results.csv").write_text("12")
    assert update() == ["results.csv"]


def test_the_log_is_stored_once_a_minute_for_any_events(start: Start, bucket: FolderStore,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    sink, now = LogUpload(remote(run)), time.monotonic()
    notify(run, "a")
    sink.update()
    assert not bucket.list("exp/log/")
    monkeypatch.setattr(upload.time, "monotonic", lambda: now + 61)
    sink.update()
    assert len(bucket.list("exp/log/")) == 1


def test_resume_takes_the_address_of_a_run(start: Start, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/bucket/runs/train/mine"
    run = start(OTHER, name="mine")
    notify(run, "a")
    run.release()
    again = start(Recipe(), resume=f"{address}/", storage_path="", machine="two")  # by its own recipe
    assert (messages(again.folder), remote(again).attempt) == (["a"], 2)
    again.release()
    assert start(OTHER, name="mine", machine="two").folder == again.folder
    with pytest.raises(InputError):
        start(resume=address)
    with pytest.raises(InputError):
        start(resume=f"{address}s")
    assert not (tmp_path / "one").joinpath(again.folder.relative_to(tmp_path / "two")).with_name("mines").exists()


def test_resume_takes_a_working_copy(start: Start, tmp_path: Path) -> None:
    run = start()
    run.release()
    other = start(machine="two")
    notify(other, "b")
    other.finish()
    other.release()
    with pytest.raises(InputError):
        start(resume=str(run.folder / "weights"), storage_path="")


def test_a_machine_is_brought_a_run_by_its_name_alone(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                     ) -> None:
    run, where = start(), Placement(storage_path=f"file://{tmp_path}/bucket", name="exp")
    notify(run, "a")
    run.finish()
    run.release()
    start(name="other", machine="two")
    folder = (tmp_path / "two").joinpath(run.folder.relative_to(tmp_path / "one"))
    download_run(where)
    assert (messages(folder), (folder / "finished").exists()) == (["a"], True)
    download_run(where.model_copy(update={"name": "none"}))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["exp", "other"]


def test_a_run_that_was_removed_from_the_store_is_not_brought_back(start: Start, bucket: FolderStore, tmp_path: Path
                                                                   ) -> None:
    run = start()
    notify(run, "a")
    run.release()
    shutil.rmtree(tmp_path / "bucket" / "runs")
    again = start()
    assert (again.folder, messages(again.folder), remote(again).attempt) == (run.folder, [], 1)


def test_two_machines_that_begin_at_once_have_runs_of_their_own(start: Start, bucket: FolderStore,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put(f"exp/{LEASE}", lease.Terms(1, "b", "elsewhere 1").to_bytes())  # its record is on its way
    monkeypatch.setattr(lease, "acquire", lambda *args, acquire=lease.acquire: acquire(*args[:3]))
    assert start().folder.name == "exp2"


@pytest.mark.parametrize("ignored", ["create", "replace"])
def test_storage_that_ignores_conditions_begins_nothing(
        start: Start, bucket: FolderStore, monkeypatch: pytest.MonkeyPatch, ignored: str) -> None:
    put_if = FolderStore.put_if

    def careless(self: FolderStore, key: str, data: bytes, version: object = None) -> object:
        if (version is None) != (ignored == "create"):
            return put_if(self, key, data, version)
        self.put(key, data)
        return self.get(key).version

    monkeypatch.setattr(FolderStore, "put_if", careless)
    for placement in ({}, {"name": "mine"}, {"resume": "auto"}):
        with pytest.raises(InputError) as refused:
            start(**placement)
        assert refused.value.exit_code == 2
    assert [path.name for path in (bucket._folder).iterdir()] == [".conditions"]


def test_an_end_without_storage_is_a_warning(start: Start, bucket: FolderStore, caplog: pytest.LogCaptureFixture,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("away")

    run = start()
    notify(run, "a")
    monkeypatch.setattr(FolderStore, "put", refuse)
    run.finish()
    run.release()
    assert [record.getMessage() for record in caplog.records] == [
        f"{remote(run).address}: some files of the run are not stored yet (OSError: away); later uploads, or the same "
        "command on this machine, store them"]
    monkeypatch.undo()
    monkeypatch.setenv("RAY_YOLO_CACHE", str(run.folder.parents[4]))
    again = start()
    assert again.folder == run.folder
    again.finish()
    again.release()
    assert bucket.get("exp/finished").data == b""
    assert b'"a"' in read_log(remote(again)._store)


def test_commands_that_look_take_a_runs_address(start: Start, bucket: FolderStore, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    run = start(name="mine")
    log = EventLog(run.folder / EVENTS_FILE)
    for event in (run_log.run(), run_log.start(), run_log.step(1), run_log.checkpoint(1)):
        log.append(event)
    log.close()
    path = checkpoints.save(run.folder, 1, "last")
    remote(run).checkpoints.put(path, 2)
    remote(run).flush_log()
    address = f"file://{tmp_path}/bucket/runs/train/mine"
    assert cli.status([address]) == 0
    assert f"{address}: training" in capsys.readouterr().out
    run.finish()
    run.release()
    assert cli.status([address]) == 0
    assert f"{address}: finished" in capsys.readouterr().out
    assert cli.verify([address]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{name:<30} ok" for name in ("run.json", "events.jsonl", "checkpoints/step-1/state.pt", "weights/last.pt")]
    for entry in bucket.list("mine/states/"):
        bucket.put(f"mine/states/{entry.name}", b"other")
    assert cli.verify([address]) == 3
    with pytest.raises(InputError):
        cli.verify([f"{address}2"])


def test_a_worker_elsewhere_has_a_folder_of_its_own_for_a_while_and_the_same_checkpoints(
        start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    remote(run).checkpoints.put(checkpoints.save(run.folder, 3, "last"), 1)
    payload = json.dumps(remote(run).payload)
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "node"))
    with worker_copy(json.loads(payload)) as (folder, found):
        assert folder.is_relative_to(tmp_path / "node")
        assert found.download(folder) == []
        assert [path.name for path in newest_first(folder)] == ["step-3"]
        found.put(checkpoints.save(folder, 4, "last"), 1)
    assert not folder.exists()
    (name,) = [entry.name for entry in FolderStore(tmp_path / "bucket/runs/train/exp").list("checkpoints/")]
    assert name == "000001-step-4.json"
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "one"))
    with worker_copy(json.loads(payload)) as (folder, _):
        assert folder == run.folder
    assert run.folder.exists()


def copies(node: Path) -> set[str]:
    return {path.name for path in node.rglob(".copy-*")}


def test_workers_that_start_together_keep_their_copies(
        start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = remote(start()).payload
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "node"))
    together = threading.Barrier(8)

    def work(_: int) -> bool:
        together.wait(20)
        with worker_copy(payload) as (folder, _found):
            (folder / "x").touch()
            together.wait(20)
            return (folder / "x").exists()

    with ThreadPoolExecutor(8) as workers:
        assert all(all(workers.map(work, range(8))) for _ in range(40))
    assert not copies(tmp_path / "node")
