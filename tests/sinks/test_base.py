"""Every sink of a run's log is made by a thread with a guard of its own: what one raises is a warning, and no more."""

from __future__ import annotations

import gc
import io
import shutil
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from torch.utils.tensorboard import SummaryWriter

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import ClassResult, EndEvent, EpochEvent, Event, StartEvent, StepEvent, WarningEvent
from ray_yolo.runs.event_log import EVENTS_FILE, EventLog, measure_goodput
from ray_yolo.runs.recorder import LocalRecorder
from ray_yolo.runtime.prometheus import RayMetrics
from ray_yolo.sinks.base import Sink, SinkRunner, Sinks
from ray_yolo.sinks.callbacks import Callbacks
from ray_yolo.sinks.console import Console
from ray_yolo.sinks.mlflow_client import OWED_FILE, read_run_file
from ray_yolo.sinks.mlflow_run import Mlflow, SystemMetrics
from ray_yolo.sinks.pictures import PlotSink
from ray_yolo.sinks.registry import Registry, log_model
from ray_yolo.sinks.results_csv import ResultsCsv
from ray_yolo.sinks.run_logger import finalize_abandoned_run
from ray_yolo.sinks.tensorboard import TensorBoard
from ray_yolo.sinks.upload import UploadSink
from tests.support import run_log
from tests.support.servers import BrokenServer

SINKS = ("results.csv", "TensorBoard", "pictures", "MLflow", "model registry", "console", "callbacks")


def wait_until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


class Work(Sink):
    """A sink whose update is a function."""

    name, interval_seconds, needs = "work", 0.001, (StartEvent, StepEvent, EpochEvent, EndEvent)

    def __init__(self, work: Callable[[], object], answered_at: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__()
        self._work, self._answered_at = work, answered_at
        self.rounds: list[tuple[int, bool]] = []
        """Of each update that succeeded: events known, whether it was said to be the last."""
        self.end = ""

    def update(self, last: bool = False) -> None:
        self._work()
        self.rounds.append((len(self.history), last))

    def answered_at(self) -> float:
        return self._answered_at()

    def finish(self) -> None:
        self.end = "finished"

    def abandon(self) -> str:
        self.end = "abandoned"
        return super().abandon()


class Running:
    """It, running."""

    def __init__(self, folder: Path, work: Callable[[], object],
                 answered_at: Callable[[], float] = lambda: 0.0) -> None:
        self.warnings: list[str] = []
        self.sink = Work(work, answered_at)
        self._runner = SinkRunner(self.sink, folder / EVENTS_FILE, self.warnings.append)

    def finish(self, patience_seconds: float = 5.0) -> str:
        self.sink.patience_seconds = patience_seconds
        self._runner.finish()
        return self.sink.end


def class_results() -> int:
    """How many there are in memory."""
    gc.collect()
    return sum(isinstance(each, ClassResult) for each in gc.get_objects())


def refuse(*_: Any, **__: Any) -> None:
    raise OSError("no")


class TestRunner:
    def test_work_is_repeated_and_done_a_last_time_after_the_end_was_asked_for(self, tmp_path: Path) -> None:
        running = Running(tmp_path, lambda: None)
        wait_until(lambda: len(running.sink.rounds) >= 3)
        assert running.finish() == "finished"
        assert [last for _, last in running.sink.rounds].count(True) == 1
        assert running.sink.rounds[-1] == (0, True)
        assert running.warnings == []

    def test_the_last_update_knows_the_whole_log_also_if_the_end_was_asked_for_while_a_round_was_under_way(
            self, tmp_path: Path) -> None:
        entered, go = threading.Event(), threading.Event()
        running = Running(tmp_path, lambda: entered.set() or go.wait(5))
        run_log.write(tmp_path / EVENTS_FILE, [run_log.start()])
        wait_until(entered.is_set)
        run_log.write(tmp_path / EVENTS_FILE, [run_log.step(1), run_log.epoch(0)])
        threading.Timer(0.2, go.set).start()
        assert running.finish() == "finished"
        assert [last for _, last in running.sink.rounds] == [False] * (len(running.sink.rounds) - 1) + [True]
        assert running.sink.rounds[-1] == (3, True)

    def test_a_failure_costs_one_warning_and_the_work_goes_on(self, tmp_path: Path) -> None:
        left = iter(range(3))

        def work() -> None:
            if next(left, None) is not None:
                raise ConnectionError("https://ann:s3cr3t@host is away\nsecond line")

        running = Running(tmp_path, work)
        wait_until(lambda: running.sink.rounds)
        assert running.finish() == "finished"
        assert running.warnings == [
            "work: ConnectionError: https://***@host is away. Training continues; this is tried again."]

    def test_an_error_without_a_message_is_reported_too(self, tmp_path: Path) -> None:
        def work() -> None:
            raise ValueError

        running = Running(tmp_path, work)
        running.finish(0.05)
        assert running.warnings == ["work: ValueError: . Training continues; this is tried again."]

    def test_work_that_never_succeeds_is_waited_for_no_longer_than_patience_and_reported_once(
            self, tmp_path: Path) -> None:
        running = Running(tmp_path, refuse)
        began = time.monotonic()
        assert running.finish(0.2) == "abandoned"
        assert 0.2 <= time.monotonic() - began < 1.0
        assert running.warnings == ["work: OSError: no. Training continues; this is tried again."]

    def test_an_error_of_this_package_is_reported_at_once_and_not_retried(self, tmp_path: Path) -> None:
        rounds: list[int] = []

        def work() -> None:
            rounds.append(0)
            raise InputError("it is no database; move it away")

        running = Running(tmp_path, work)
        wait_until(lambda: running.warnings)
        began = time.monotonic()
        assert running.finish(60.0) == "abandoned"
        assert time.monotonic() - began < 1.0
        assert len(rounds) == 1
        assert running.warnings == ["work: it is no database; move it away. Training continues without."]

    def test_work_that_hangs_is_waited_for_no_longer_than_patience_and_reported(self, tmp_path: Path) -> None:
        release = threading.Event()
        running = Running(tmp_path, release.wait)
        assert running.finish(0.1) == "abandoned"
        release.set()
        assert running.warnings == ["work: not complete after 0.1 s"]

    def test_signs_of_success_extend_patience(self, tmp_path: Path) -> None:
        answered = [0.0]
        release = threading.Event()

        def work() -> None:
            while not release.wait(0.01):
                answered[0] = time.monotonic()

        running = Running(tmp_path, work, lambda: answered[0])
        threading.Timer(0.5, release.set).start()
        assert running.finish(0.2) == "finished"

    def test_an_abandoned_thread_ends(self, tmp_path: Path) -> None:
        before = threading.active_count()
        Running(tmp_path, refuse).finish(0.0)
        wait_until(lambda: threading.active_count() <= before)


class Prompt(Work):
    """One that can be completed elsewhere."""

    prompt_seconds = 60.0


@pytest.mark.parametrize("interactive", [True, False])
def test_at_a_prompt_all_that_can_be_completed_elsewhere_has_one_time_limit(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interactive: bool) -> None:
    monkeypatch.setattr("ray_yolo.sinks.base._PROMPT_SECONDS", 0.3)
    release = threading.Event()
    slow: list[Work] = [Prompt(release.wait), Prompt(release.wait), Work(release.wait)]
    for sink in slow:
        sink.patience_seconds = 0.6
    sinks = Sinks(tmp_path / EVENTS_FILE, slow, lambda text: None, interactive=interactive)
    began = time.monotonic()
    sinks.finish()
    assert [sink.end for sink in slow] == ["abandoned"] * 3
    expected = 0.3 + 0.6 if interactive else 3 * 0.6  # the last one cannot
    assert expected <= time.monotonic() - began < expected + 0.5
    release.set()


class TestHistory:
    def test_weights_are_registered_if_the_newest_end_says_that_training_has_ended_well(
            self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        registered: list[str] = []
        monkeypatch.setattr("ray_yolo.sinks.registry.log_model", lambda *model: registered.append(model[-1]))
        (tmp_path / "mlflow.json").write_text('{"run_id": "r1"}')
        for events, well in [
            ([], False), ([run_log.start()], False), ([run_log.start(), run_log.end(10)], True),
            ([run_log.start(), run_log.end(10, "failed")], False),
            ([run_log.start(), run_log.end(10, "stopped")], False),
            ([run_log.end(10, "stopped"), run_log.start(), run_log.end(30)], True),
            ([run_log.end(10), run_log.start(10)], False),
        ]:
            sink = Registry(tmp_path, "http://127.0.0.1:9", "shapes")
            for event in events:
                sink.event(event)
            sink.update()
            assert registered == [], events
            sink.update(last=True)
            assert registered == ["shapes"] * well, events
            registered.clear()

    def test_of_steps_in_a_row_the_first_and_the_last_are_kept_which_cost_what_all_of_them_do(self) -> None:
        events = [run_log.start(), *map(run_log.step, range(1, 8)), run_log.epoch(0), run_log.start(4, regrouped=True),
                run_log.step(5), run_log.step(6)]
        events = [event.model_copy(update={"time": float(second)}) for second, event in enumerate(events)]
        sink = Work(lambda: None)
        for event in events:
            sink.event(event)
        assert sink.history == [*events[:2], events[7], events[8].model_copy(update={"per_class": ()}), *events[9:]]
        assert measure_goodput(sink.history) == measure_goodput(events)
        assert measure_goodput(events).idle_seconds == 2

    def test_steps_alone_change_nothing_that_is_shown(self) -> None:
        sink = Work(lambda: None)
        sink.event(run_log.step(1))
        assert not sink.is_stale
        sink.event(run_log.epoch(0))
        assert sink.is_stale


    def test_no_sink_keeps_the_numbers_of_each_class_or_what_it_does_not_need(self, tmp_path: Path) -> None:
        """1,203 classes over 300 epochs would be 425 MB for each."""
        nothing: Any = None
        mlflow = Mlflow(tmp_path, "http://127.0.0.1:9")
        sinks: dict[Sink, int] = {
            ResultsCsv(tmp_path): 21, TensorBoard(tmp_path): 42, PlotSink(tmp_path, nothing, pytest.fail): 0,
            mlflow: 82, SystemMetrics(tmp_path, "", mlflow): 0, Registry(tmp_path, "", "shapes"): 2,
            Console(tmp_path, io.StringIO()): 0, RayMetrics(tmp_path): 61, UploadSink(nothing): 0,
            Callbacks({}, tmp_path, Recipe(), pytest.fail): 0}
        before = class_results()
        events: list[Event] = [run_log.start(), run_log.end(60)]
        for number in range(20):
            events[-1:-1] = [run_log.step(3 * number + step) for step in (1, 2, 3)]
            events[-1:-1] = [*run_log.trained_epoch(number), WarningEvent(message="odd")]
        for sink in sinks:
            for event in events:
                sink.event(event.model_copy(deep=True))
            if isinstance(sink, (Console, Callbacks)):
                sink.update()
        assert {sink.name: len(sink.history) for sink in sinks} == {sink.name: kept for sink, kept in sinks.items()}
        del event, events
        assert class_results() == before


class Training:
    """What a driver does with the sinks of a run, over a training that never took place."""

    def __init__(self, folder: Path, uri: str, registry: str | None = None,
                 hooks: dict[str, Callable[..., Any]] | None = None, stream: io.StringIO | None = None) -> None:
        self.run_dir, self.uri = folder / "exp", uri
        self.stream = stream or io.StringIO()
        self.called: list[str] = []
        self._hooks = {name: lambda *_, name=name: self.called.append(name)
                       for name in ("on_run_start", "on_epoch_end", "on_run_end")} | (hooks or {})
        self._registry = registry or uri

    def run(self, failing: str = "") -> None:
        """Train; the sink that is named is known to fail, and no longer waited for once it has."""
        log = self.run_dir / EVENTS_FILE
        recorder = LocalRecorder(str(log))

        def warn(text: str) -> None:
            recorder.emit(WarningEvent(message=text))

        spec: Any = None
        mlflow = Mlflow(self.run_dir, self.uri)
        sinks = [ResultsCsv(self.run_dir), TensorBoard(self.run_dir), PlotSink(self.run_dir, spec, warn), mlflow,
                 Registry(self.run_dir, self._registry, "shapes"),
                 Console(self.run_dir, self.stream, lambda: mlflow.notes),
                 Callbacks(self._hooks, self.run_dir, Recipe(), warn)]
        assert tuple(sink.name for sink in sinks) == SINKS
        for sink in sinks:
            sink.patience_seconds = 0.5 if sink.name == failing else 60.0
        runner = Sinks(log, sinks, warn)
        for event in [run_log.run(), run_log.start(), run_log.step(1), *run_log.trained_epoch(0), run_log.end(10)]:
            recorder.emit(event)
        recorder.flush()
        if failing:
            wait_until(lambda: run_log.messages(self.run_dir), 60.0)
        runner.finish(recorder.flush)
        recorder.close()

    def complete(self) -> set[str]:
        """The sinks that hold everything."""
        table = self.run_dir / "results.csv"
        about = read_run_file(self.run_dir)
        client = MlflowClient(tracking_uri=self.uri) if self.uri.startswith("sqlite") else None
        found = {
            "results.csv": table.exists() and len(table.read_text().splitlines()) == 2,
            "TensorBoard": any(b"metrics/mAP_0.5" in path.read_bytes()
                               for path in self.run_dir.glob("events.out.tfevents.*")),
            "pictures": (self.run_dir / "results.png").exists(),
            "MLflow": bool(client and about and client.get_run(about["run_id"]).info.status == "FINISHED")
            and not (self.run_dir / OWED_FILE).exists(),
            "model registry": (self.run_dir / "registered").exists(),
            "console": "done: 1 epoch in 0:01:00" in self.stream.getvalue().splitlines(),
            "callbacks": self.called == ["on_run_start", "on_epoch_end", "on_run_end"]}
        assert tuple(found) == SINKS
        return {name for name, whole in found.items() if whole}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database: making one takes seconds, copying it does not."""
    path = tmp_path_factory.mktemp("storage") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def uri(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A server; pictures and models that would take long to make are files without anything."""
    def draw() -> tuple[Connection, None]:
        ours, theirs = Pipe()
        theirs.send({})  # nothing has failed
        (tmp_path / "exp" / "results.png").touch()
        pipes.append(theirs)
        return ours, None

    pipes: list[Connection] = []
    monkeypatch.setattr("ray_yolo.sinks.pictures.start_process", draw)
    monkeypatch.setattr("ray_yolo.sinks.registry.log_model", lambda run_dir, *_: (run_dir / "registered").touch())
    shutil.copy(database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def test_all_tell_the_same(tmp_path: Path, uri: str) -> None:
    training = Training(tmp_path, uri)
    training.run()
    assert training.complete() == set(SINKS)
    assert run_log.messages(training.run_dir) == []
    console = training.stream.getvalue()
    assert "epoch 1/3  box 0.5" in console
    assert f"mlflow       mlflow ui --backend-store-uri {uri}" in console
    about = read_run_file(training.run_dir)
    assert about is not None
    files = MlflowClient(tracking_uri=uri).list_artifacts(about["run_id"])
    assert {"results.csv", "results.png"} <= {file.path for file in files}


FULL, ODD = OSError(28, "No space left on device"), ValueError("no ink\nleft")
FULL_TEXT, ODD_TEXT = "OSError: [Errno 28] No space left on device", "ValueError: no ink"
AGAIN = ". Training continues; this is tried again."


def raising(error: Exception) -> Callable[..., Any]:
    def work(*_: Any, **__: Any) -> Any:
        raise type(error)(*error.args)
    return work


@pytest.mark.parametrize(("error", "text"), [(FULL, FULL_TEXT), (ODD, ODD_TEXT)], ids=["full", "odd"])
@pytest.mark.parametrize(("sink", "place", "rest"), [
    ("results.csv", "ray_yolo.sinks.results_csv.atomic_write", AGAIN),
    ("TensorBoard", "ray_yolo.sinks.tensorboard.TensorBoard._open", AGAIN),
    ("TensorBoard", "ray_yolo.sinks.tensorboard.TensorBoard.finish", ""),
    ("pictures", "ray_yolo.sinks.pictures.start_process", AGAIN),
    ("MLflow", "mlflow.MlflowClient.log_batch", AGAIN),
    ("MLflow", "ray_yolo.sinks.mlflow_run.Mlflow.finish", ""),
    ("model registry", "ray_yolo.sinks.registry.log_model", ""),
    ("console", "ray_yolo.sinks.console.Console.update", AGAIN),
    ("console", "ray_yolo.sinks.console.closing_message", ""),
])
def test_what_one_of_them_raises_is_a_warning_and_the_others_are_complete(
        tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch, sink: str, place: str, rest: str,
        error: Exception, text: str) -> None:
    training = Training(tmp_path, uri)
    monkeypatch.setattr(place, raising(error))
    training.run(failing=sink if rest else "")
    assert training.complete() >= set(SINKS) - {sink}
    assert run_log.messages(training.run_dir) == [f"{sink}: {text}{rest}"]
    if sink != "console":
        assert f"WARNING: {sink}: {text}{rest}" in training.stream.getvalue()


@pytest.mark.parametrize(("error", "text"), [(FULL, FULL_TEXT), (KeyError("mine"), "KeyError: 'mine'")])
@pytest.mark.parametrize("name", ["on_run_start", "on_epoch_end", "on_run_end"])
def test_what_a_users_function_raises_is_a_warning_and_the_others_are_complete(
        tmp_path: Path, uri: str, name: str, error: Exception, text: str) -> None:
    training = Training(tmp_path, uri, hooks={name: raising(error)})
    training.run()
    assert training.complete() == set(SINKS) - {"callbacks"}
    assert training.called == [hook for hook in ("on_run_start", "on_epoch_end", "on_run_end") if hook != name]
    assert run_log.messages(training.run_dir) == [f"callbacks: {name}: {text}"]


def test_a_console_whose_disk_is_full_stops_nothing_else(tmp_path: Path, uri: str) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise FULL

    training = Training(tmp_path, uri, stream=Full())
    training.run(failing="console")
    assert training.complete() == set(SINKS) - {"console"}
    assert run_log.messages(training.run_dir) == [f"console: {FULL_TEXT}{AGAIN}"]


def test_scalars_that_cannot_be_written_are_one_warning(
        tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SummaryWriter, "flush", raising(FULL))
    training = Training(tmp_path, uri)
    training.run(failing="TensorBoard")
    assert training.complete() >= set(SINKS) - {"TensorBoard"}
    assert run_log.messages(training.run_dir) == [f"TensorBoard: {FULL_TEXT}{AGAIN}"]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with BrokenServer() as server:
        yield server


def test_a_tracking_server_that_answers_500_leaves_a_note_and_the_others_are_complete(
        tmp_path: Path, uri: str, broken: BrokenServer) -> None:
    training = Training(tmp_path, broken.uri)
    training.run(failing="MLflow")
    assert broken.requests
    assert training.complete() == set(SINKS) - {"MLflow", "model registry"}  # which is there too
    mlflow, registry = run_log.messages(training.run_dir)
    assert mlflow.startswith("MLflow: MlflowException: ")
    assert mlflow.endswith(AGAIN)
    assert registry == "model registry: --register shapes: there is no MLflow run to register from"
    assert (training.run_dir / OWED_FILE).exists()
    assert f"python -m ray_yolo.sync {training.run_dir}" in training.stream.getvalue().splitlines()[-1]


def test_a_registry_that_answers_500_is_a_warning_and_the_others_are_complete(
        tmp_path: Path, uri: str, broken: BrokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_yolo.sinks.registry.log_model", log_model)
    training = Training(tmp_path, uri, registry=broken.uri)
    training.run()
    assert training.complete() == set(SINKS) - {"model registry"}
    [warning] = run_log.messages(training.run_dir)
    assert warning.startswith("model registry: MlflowException: ")


def test_without_tracking_there_is_no_word_of_it(tmp_path: Path) -> None:
    stream, log = io.StringIO(), tmp_path / EVENTS_FILE
    runner = Sinks(log, [ResultsCsv(tmp_path), Console(tmp_path, stream)], pytest.fail)
    run_log.write(log, [run_log.run(), run_log.start(), *run_log.trained_epoch(0), run_log.end(10)])
    runner.finish()
    assert "mlflow" not in stream.getvalue().lower()
    assert not (tmp_path / "mlflow.json").exists()


def test_nothing_to_make_is_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    Sinks(tmp_path / EVENTS_FILE, [], pytest.fail).finish()
    assert threading.active_count() <= before  # one of an earlier test's may have ended by now


@pytest.mark.parametrize("died", [False, True])
def test_the_sinks_of_a_process_that_died_after_the_training_are_completed_by_another(
        tmp_path: Path, died: bool) -> None:
    log = EventLog(tmp_path / EVENTS_FILE)
    for event in [run_log.run(), run_log.start(), run_log.step(1), *run_log.trained_epoch(0), run_log.end(10)]:
        log.append(event)
    log.close()
    (tmp_path / ".lock").write_text("node7 42\n" if died else "")
    finalize_abandoned_run(tmp_path, None, {})
    assert (tmp_path / "results.csv").exists() == died
