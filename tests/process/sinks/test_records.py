"""The records of a run are made so from its log, whatever happened before."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from ray_yolo import cli
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import Event
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.working_copy import create_working_copy
from ray_yolo.sinks import records as records_module
from ray_yolo.sinks.earlier_runs import complete_earlier_runs, incomplete_runs
from ray_yolo.sinks.mlflow_client import OWED_FILE, RUN_FILE, own_uri
from ray_yolo.sinks.records import (
    LOCK_FILE,
    Driver,
    RunRecords,
    complete,
    is_complete,
    locked,
    note_incomplete,
    read_settings,
    run_process,
    synchronise,
    work_until_complete,
)
from ray_yolo.sinks.registry import Registered, Registry
from ray_yolo.sinks.retry import Retry
from ray_yolo.storage.store import open_store
from tests.support import run_log
from tests.support.servers import BrokenServer

STORY = [run_log.start(), *run_log.trained_epoch(0), run_log.end(10)]
AWAY = "http://user:s3cr3t@127.0.0.1:1"


class Noted:
    """A record that notes the calls, and raises what it is given."""

    uses_time = False

    def __init__(self, name: str = "work", errors: Sequence[Exception] = ()) -> None:
        self.name, self.calls = name, list[tuple[int, bool]]()
        self._errors = list(errors)

    def update(self, events: Sequence[Event], ended: bool) -> None:
        self.calls.append((len(events), ended))
        if self._errors:
            raise self._errors.pop(0)


def begin(folder: Path, options: dict[str, Any] | None = None) -> Path:
    """A run folder whose training has ended, without records."""
    folder.mkdir(parents=True)
    run_log.write(folder / EVENTS_FILE, [run_log.run(run_id=str(folder)), *STORY])
    placement = {"noplots": True, "mlflow_uri": "off", **(options or {})}
    (folder / "opt.yaml").write_text(json.dumps({"placement": placement}))
    (folder / "finished").touch()
    return folder


class TestRunRecords:
    def test_a_record_is_made_again_for_new_events_but_not_for_steps(self, tmp_path: Path) -> None:
        record = Noted()
        records = RunRecords(tmp_path, [record], pytest.fail)
        for events in ([run_log.start()], [run_log.step(1)], [], [run_log.epoch(0)]):
            run_log.write(tmp_path / EVENTS_FILE, events)
            records.update(ended=False)
        assert record.calls == [(1, False), (3, False)]
        records.update(ended=True)
        records.update(ended=True)
        assert record.calls[2:] == [(3, True)]
        assert records.is_final

    def test_a_failure_is_one_warning_and_tried_again_until_it_holds(self, tmp_path: Path) -> None:
        warnings: list[str] = []
        record = Noted(errors=[ConnectionError("https://ann:s3cr3t@host is away\nmore"), OSError("full")])
        begin(tmp_path / "exp")
        records = RunRecords(tmp_path / "exp", [record], warnings.append)
        records.states[0].retry = Retry("work", warnings.append, first_pause=0.0)
        states = []
        for _ in range(4):
            records.update(ended=False)
            states.append((records.pending, records.failing))
        assert states == [(["work"], ["work"])] * 2 + [([], [])] * 2
        assert len(record.calls) == 3
        assert warnings == ["work: ConnectionError: https://***@host is away. Training continues; this is tried again."]

    def test_what_the_user_must_change_is_tried_again_only_with_new_events(self, tmp_path: Path) -> None:
        warnings: list[str] = []
        record = Noted(errors=[InputError("move it away")] * 2)
        run_log.write(tmp_path / EVENTS_FILE, [run_log.start()])
        records = RunRecords(tmp_path, [record], warnings.append)
        for _ in range(3):
            records.update(ended=False)
        assert len(record.calls) == 1
        run_log.write(tmp_path / EVENTS_FILE, [run_log.epoch(0)])
        for _ in range(3):
            records.update(ended=False)
        assert len(record.calls) == 2
        assert warnings == ["work: move it away. Training continues without."]

    def test_a_record_is_made_again_after_one_before_it_whose_files_it_may_hold(
            self, tmp_path: Path) -> None:
        first, second = Noted("first", [OSError("full")]), Noted("second")
        begin(tmp_path / "exp")
        records = RunRecords(tmp_path / "exp", [first, second], lambda _: None)
        records.states[0].retry = Retry("work", lambda _: None, first_pause=0.0)
        records.update(ended=True)
        assert (records.pending, len(second.calls)) == (["first"], 1)
        records.update(ended=True)
        assert (records.pending, len(second.calls)) == ([], 2)

    def test_costly_records_leave_training_its_time(self, tmp_path: Path) -> None:
        record = Noted()
        record.uses_time = True
        record.update = lambda events, ended: (record.calls.append((len(events), ended)), sum(range(10**6)))
        records = RunRecords(tmp_path, [record], pytest.fail)
        for number in range(3):
            run_log.write(tmp_path / EVENTS_FILE, [run_log.epoch(number)])
            records.update(ended=False)
        assert len(record.calls) == 1
        records.update(ended=True)
        assert record.calls[1:] == [(3, True)]

    def test_the_records_of_a_run_that_was_removed_are_no_warning(self, tmp_path: Path) -> None:
        run = begin(tmp_path / "exp")
        records = RunRecords(run, [Noted(errors=[OSError("no such folder")])], pytest.fail)
        (run / EVENTS_FILE).unlink()
        records.update(ended=True)
        assert records.is_gone


class Ended:
    """A driver that ends after some rounds."""

    def __init__(self, rounds: int) -> None:
        self._rounds, self.reports = rounds, list[list[str]]()

    @property
    def has_ended(self) -> bool:
        return self._rounds <= 0

    def wait(self, seconds: float) -> bool:
        self._rounds -= 1
        return self.has_ended

    def report(self, pending: Sequence[str], failing: Sequence[str]) -> None:
        self.reports.append(list(pending))


class TestProcess:
    def test_it_works_until_the_log_has_ended_and_all_hold(self, tmp_path: Path) -> None:
        run = begin(tmp_path / "exp")
        record = Noted(errors=[OSError("full")])
        records, driver = RunRecords(run, [record], lambda _: None), Ended(2)
        records.states[0].retry = Retry("work", lambda _: None, first_pause=0.0)
        assert work_until_complete(records, driver)
        assert [ended for _, ended in record.calls] == [False, False, True]
        assert driver.reports[-1] == []

    def test_it_ends_at_once_where_only_the_user_can_do_something(self, tmp_path: Path) -> None:
        run = begin(tmp_path / "exp")
        record = Noted(errors=[InputError("the server asks for a login")])
        records = RunRecords(run, [record, Noted("other")], lambda _: None)
        assert not work_until_complete(records, Ended(2))
        assert records.pending == ["work"]
        assert len(record.calls) == 1

    def test_a_removed_run_ends_it_and_is_not_made_again(self, tmp_path: Path) -> None:
        run = begin(tmp_path / "exp")
        records = RunRecords(run, [Noted()], pytest.fail)
        moved = run.rename(tmp_path / "moved")
        assert work_until_complete(records, Ended(100))
        assert not run.exists()
        assert moved.exists()

    def test_the_end_of_the_command_is_its_message_or_its_death(self, tmp_path: Path, monkeypatch: Any) -> None:
        for write in (True, False):
            reader, writer = os.pipe()
            with os.fdopen(reader) as stdin:
                monkeypatch.setattr("sys.stdin", stdin)
                driver = Driver(tmp_path)
                assert not driver.wait(0.01)
                if write:
                    os.write(writer, records_module.END)
                    assert driver.wait(1.0)
                os.close(writer)
                assert driver.wait(1.0)

    def test_a_warning_goes_to_the_command_and_after_it_into_the_log(self, tmp_path: Path, monkeypatch: Any) -> None:
        run = begin(tmp_path / "exp")
        (run / ".lock").touch()
        reader, writer = os.pipe()
        with os.fdopen(writer, "w") as stdout:
            monkeypatch.setattr("sys.stdout", stdout)
            driver = Driver(run)
            for text in ("one", "one"):
                driver.warn(text)
            driver.report(["MLflow"], [])
            driver.tell("version 2")
            sent = [json.loads(line) for line in os.read(reader, 1000).splitlines()]
            assert sent == [{"warning": "one"}, {"pending": ["MLflow"], "failing": []}, {"note": "version 2"}]
            os.close(reader)
            driver.warn("two")
            assert run_log.messages(run) == ["two"]
            with (run / ".lock").open() as lock:  # of a command that trains the run again
                assert records_module.lock_file(lock)
                driver.warn("three")
        assert run_log.messages(run) == ["two"]


class TestCompletion:
    def test_what_is_complete_is_noted_until_the_log_grows(self, tmp_path: Path) -> None:
        run = begin(tmp_path / "exp")
        assert not is_complete(run, None)
        assert complete(run, None, tmp_path, pytest.fail)
        assert is_complete(run, None)
        assert not is_complete(run, AWAY)
        run_log.write(run / EVENTS_FILE, [run_log.start(10)])
        assert not is_complete(run, None)

    def test_the_file_is_emptied_by_the_process_that_holds_it(self, tmp_path: Path, monkeypatch: Any) -> None:
        run, seen = begin(tmp_path / "exp"), list[str]()
        complete(run, None, tmp_path, pytest.fail)
        note = (run / LOCK_FILE).read_text()
        note_incomplete(run)  # as a second command does while the process of the first one is at work
        assert (run / LOCK_FILE).read_text() == note != ""
        monkeypatch.setattr("sys.argv", ["records", str(run)])
        monkeypatch.chdir(tmp_path)
        assert run_process(lambda context: not seen.append((context.folder / LOCK_FILE).read_text())) == 0
        assert seen == [""]

    def test_two_at_once_are_one_that_works_and_one_that_says_so(
            self, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
        run = begin(tmp_path / "exp")
        monkeypatch.setattr(records_module, "_TICK_SECONDS", 0.05)
        with locked(run) as lock:
            assert lock is not None
            assert complete(run, None, tmp_path, pytest.fail) is None
            monkeypatch.setattr(records_module, "_LOCK_SECONDS", 0.0)
            assert cli.sync([str(run)]) == 3
            assert "another process is still at work" in capsys.readouterr().err
            monkeypatch.setattr(records_module, "_LOCK_SECONDS", 60.0)
            waiting = threading.Thread(target=lambda: codes.append(cli.sync([str(run)])))
            codes: list[int] = []
            waiting.start()
            time.sleep(0.3)
            assert codes == []
        waiting.join(60)
        assert codes == [0]

    def test_the_projects_next_training_completes_runs_that_are_incomplete(self, tmp_path: Path) -> None:
        """Killed in the background; killed in a later command; offline with an earlier version; complete; trained now;
        never begun."""
        killed, continued, noted, done, held, old, own = (begin(tmp_path / name) for name in (
            "killed", "continued", "noted", "done", "held", "old", "own"))
        for run in (killed, held, own):
            note_incomplete(run)
        (noted / OWED_FILE).write_text(json.dumps({"uri": AWAY.replace("user:s3cr3t", "***")}))
        for run in (done, continued):
            complete(run, None, tmp_path, pytest.fail)
        run_log.write(continued / EVENTS_FILE, [run_log.start(10)])
        (continued / "results.csv").unlink()
        with (held / ".lock").open("w") as lock:
            assert records_module.lock_file(lock)
            assert {run.resolve() for run in incomplete_runs(own)} == {killed, continued, noted}
        complete_earlier_runs(own, None, tmp_path)
        assert all((run / "results.csv").exists() for run in (killed, continued, noted, held))  # none is held any more
        assert not (old / "results.csv").exists()

    def test_a_server_that_is_away_is_asked_for_one_other_run_only(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
        own = begin(tmp_path / "own")
        with BrokenServer() as server:
            for name in ("a", "b", "c"):
                note_incomplete(begin(tmp_path / name, {"mlflow_uri": server.uri}))
            complete_earlier_runs(own, server.uri, tmp_path)
        tried = [name for name in "abc" if (tmp_path / name / "results.csv").exists()]
        assert tried == ["a"]

    def test_files_in_a_bucket_follow(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
        run, address = begin(tmp_path / "exp"), f"file://{tmp_path}/bucket/runs/train/exp"
        create_working_copy(run, address)
        (run / "results.png").write_bytes(b"curves")
        (run / "weights").mkdir()
        (run / "weights" / "last.pt").write_bytes(b"stored by the training")
        complete(run, None, tmp_path, pytest.fail)
        store = open_store(address)
        assert store.get("results.png").data == b"curves"
        assert store.get("results.csv").data == (run / "results.csv").read_bytes()
        assert [entry.name for entry in store.list("weights/")] == []

    def test_files_of_a_run_that_another_machine_continues_are_not_stored(self, tmp_path: Path, monkeypatch: Any
                                                                          ) -> None:
        from ray_yolo.sinks.upload import FileUpload
        from ray_yolo.storage.lease import Terms

        run, address = begin(tmp_path / "exp"), f"file://{tmp_path}/bucket/runs/train/exp"
        store = open_store(address)
        store.put("lease.json", Terms(1, "here", "here").to_bytes())
        upload = FileUpload(run, address)
        upload.update((), ended=False)
        store.put("lease.json", Terms(2, "there", "there").to_bytes())
        (run / "results.csv").write_text("old")
        with pytest.raises(Exception, match="another process trains this run now"):
            upload.update((), ended=True)
        assert "results.csv" not in {entry.name for entry in store.list()}


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a database: making one takes seconds."""
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def uri(storage: Path) -> str:
    return f"sqlite:///{storage}/mlflow.db"


def delivered(uri: str, folder: Path) -> list[str]:
    """Ids of the finished MLflow runs of a run folder."""
    client = MlflowClient(tracking_uri=uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, filter_string=f"tags.`ray_yolo.run_id` = '{folder}'")
    return [run.info.run_id for run in found if run.info.status == "FINISHED"]


class TestSync:
    def test_it_delivers_to_where_the_run_is_tracked_whatever_folder_it_is_started_in(
            self, tmp_path: Path, storage: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        monkeypatch.chdir(tmp_path)
        noted, tracked = begin(tmp_path / "a"), begin(tmp_path / "b")
        set_up = begin(tmp_path / "c", {"mlflow_uri": uri})
        near = begin(storage / "runs" / "train" / "exp")
        (near / "opt.yaml").unlink()  # of a version that did not resolve the server there
        (noted / OWED_FILE).write_text(json.dumps({"uri": uri}))
        (tracked / RUN_FILE).write_text(json.dumps({"run_id": "0" * 32, "uri": uri}))
        for run in (noted, tracked, set_up):
            assert cli.sync([str(run)]) == 0
            assert len(delivered(uri, run)) == 1
            assert not (run / OWED_FILE).exists()
        assert own_uri(near) == uri
        assert not (tmp_path / "mlflow.db").exists()

    @pytest.mark.parametrize("place", ["moved", "copied"])
    def test_a_moved_folder_keeps_its_mlflow_run_and_a_copy_leaves_it_alone(
            self, tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
            place: str) -> None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        def num_epochs() -> int:
            [run_id] = delivered(uri, run)
            return len(MlflowClient(tracking_uri=uri).get_metric_history(run_id, "metrics/mAP50"))

        run = begin(tmp_path / "exp", {"mlflow_uri": uri})
        assert cli.sync([str(run)]) == 0
        assert num_epochs() == 1
        other = tmp_path / "elsewhere" / "exp"
        other.parent.mkdir()
        run.rename(other) if place == "moved" else shutil.copytree(run, other)
        run_log.write(other / EVENTS_FILE, [run_log.start(10), *run_log.trained_epoch(1), run_log.end(20)])
        assert cli.sync([str(other)]) == 0
        assert ("is a copy of a run's folder" in capsys.readouterr().err) == (place == "copied")
        assert len((other / "results.csv").read_text().splitlines()) == 3
        assert num_epochs() == (2 if place == "moved" else 1)
        assert cli.sync([str(other), "--mlflow-uri", uri]) == 0
        assert num_epochs() == 2

    def test_a_second_call_changes_no_file(self, tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        run = begin(tmp_path / "exp", {"mlflow_uri": uri})
        contents = []
        for _ in range(3):
            assert cli.sync([str(run)]) == 0
            contents.append({path.name: path.read_bytes() for path in run.iterdir()})
        assert "events.out" in " ".join(contents[0])
        assert contents[0] == contents[1] == contents[2]

    def test_a_server_whose_secrets_are_not_kept_is_asked_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                              ) -> None:
        run = begin(tmp_path / "exp", {"mlflow_uri": "http://***@127.0.0.1:1"})
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InputError, match=r"the secrets of http://\*\*\*@127.* --mlflow-uri"):
            cli.sync([str(run)])
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "off")
        with pytest.raises(SystemExit):
            cli.sync([str(run)])

    def test_a_run_without_tracking_is_completed_without(
            self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        monkeypatch.chdir(tmp_path)
        run = begin(tmp_path / "exp")
        assert cli.sync([str(run)]) == 0
        assert "results.csv" in capsys.readouterr().out
        assert not (tmp_path / "mlflow.db").exists()

    def test_a_server_that_is_away_is_said_in_a_line(
            self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
        run = begin(tmp_path / "exp")
        assert cli.sync([str(run), "--mlflow-uri", AWAY]) == 3
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("WARNING: MLflow: ")
        assert "s3cr3t" not in line
        assert (run / "results.csv").exists()
        assert (run / LOCK_FILE).read_text() == ""

    def test_a_folder_without_a_training_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no event log"):
            cli.sync([str(tmp_path), "--mlflow-uri", f"sqlite:///{tmp_path}/mlflow.db"])


def test_weights_are_registered_once_if_the_newest_end_says_that_training_has_ended_well(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered, lines = list[str](), list[str]()

    def log_model(*model: Any) -> Registered:
        registered.append(model[-1])
        return Registered("models:/m-1", "it is the best")

    monkeypatch.setattr("ray_yolo.sinks.registry.log_model", log_model)
    (tmp_path / "mlflow.json").write_text('{"run_id": "r1"}')
    for events, well in [
        ([], False), ([run_log.start()], False), ([run_log.start(), run_log.end(10)], True),
        ([run_log.start(), run_log.end(10, "failed")], False),
        ([run_log.end(10, "stopped"), run_log.start(), run_log.end(30)], True),
        ([run_log.end(10), run_log.start(10)], False),
    ]:
        record = Registry(tmp_path, "http://127.0.0.1:9", "shapes", lines.append)
        record.update(events, ended=False)
        assert registered == [], events
        for _ in range(2):
            record.update(events, ended=True)
        assert registered == ["shapes"] * well, events
        assert lines == ["it is the best"] * well
        registered.clear()
        lines.clear()
    with pytest.raises(InputError, match="no MLflow run to register from"):
        Registry(tmp_path, None, "shapes").update([run_log.start(), run_log.end(10)], ended=True)


def test_the_settings_of_a_run_are_those_of_its_last_command(tmp_path: Path) -> None:
    run = begin(tmp_path / "exp", {"noplots": False, "registered_name": "birds"})
    (run / "run.json").touch()
    settings = read_settings(run, AWAY, tmp_path / "elsewhere")
    assert (settings.uri, settings.plots, settings.registered_name, settings.address) == (AWAY, True, "birds", "")
    assert settings.data_folders[:2] == (tmp_path / "elsewhere", tmp_path)
    (run / "opt.yaml").unlink()
    assert read_settings(run, None, tmp_path).plots


@pytest.mark.parametrize(
    "damage", [b"{", b"", b"placement: 1\n", b"recipe: {}\n", b"placement: {name: \xff}\n"], ids=repr)
def test_records_are_not_complete_while_the_settings_cannot_be_read(tmp_path: Path, damage: bytes) -> None:
    run = begin(tmp_path / "exp", {"trackers": "gone"})
    whole = (run / "opt.yaml").read_bytes()
    (run / "opt.yaml").write_bytes(damage)
    warnings: list[str] = []
    complete(run, None, tmp_path, warnings.append)
    assert [str(run / "opt.yaml") in text for text in warnings] == [True]
    assert not is_complete(run, None)
    with pytest.raises(InputError, match="restore it from a copy, or remove it"):
        synchronise(run, None)
    (run / "opt.yaml").write_bytes(whole)
    records = complete(run, None, tmp_path, warnings.append)
    assert records is not None
    assert records.pending == ["gone"]
