"""Which failures end a training, and how they are told."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from ray_yolo.errors import CheckpointError, DatasetError, LostWorkersError, RayYoloError, TrainingError
from ray_yolo.events import Event, Summary, WorkerEvent
from ray_yolo.runlog.event_log import EVENTS_FILE, EventLog
from ray_yolo.runtime import restarts
from ray_yolo.runtime.restarts import Judge, Restarts, cause_of, summary
from tests.support import run_log

LOST = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4321")
LATE = RuntimeError("Timed out waiting 15000ms for recv operation to complete")
DEAD = WorkerHealthCheckFailedError("Worker 1 is gone.", ray.exceptions.ActorDiedError())
FULL = RuntimeError("CUDA out of memory")
ENDED = Summary(step=8, epoch=1, best_epoch=1, best_fitness=0.5, stopped_early=False, stopped=False, last_epoch=None)
MISSING = FileNotFoundError(2, "No such file or directory", "/data/a.png")


@pytest.mark.parametrize(("failures", "worker"), [
    ({0: LOST, 1: DEAD}, 1), ({0: LOST, 1: LATE, 2: FULL}, 2), ({0: DEAD, 1: MISSING, 2: LOST}, 1),
    ({3: LOST, 2: LATE}, 2), ({1: CheckpointError("of another model"), 0: FULL}, 1),
])
def test_the_cause_is_the_error_that_is_not_a_lost_connection(failures: dict[int, Exception], worker: int) -> None:
    assert cause_of(failures) == (worker, failures[worker])


def test_failures_count_until_a_new_checkpoint_is_saved() -> None:
    left = Restarts(2)
    assert [left.allow(step) for step in (0, 0, 5, 5, 5)] == [True, True, True, True, False]
    assert not Restarts(0).allow(7)
    assert all(Restarts(-1).allow(0) for _ in range(9))


@pytest.mark.parametrize(("error", "told"), [
    (CheckpointError("a.pt: damaged; use another"), "a.pt: damaged; use another"),
    (MISSING, "FileNotFoundError: [Errno 2] No such file or directory: '/data/a.png'"),
    (ValueError("Caught ValueError in DataLoader worker process 0.\nTraceback:\n  code\nValueError: odd\n"),
     "ValueError: odd"),
    (DatasetError("Caught DatasetError in DataLoader worker process 0.\n  code\nray_yolo.errors.DatasetError: a: odd"),
     "a: odd"),
    (OSError("https://ann:s3cr3t@host is away"), "OSError: https://***@host is away"), (KeyError(), "KeyError: "),
])
def test_an_error_is_told_on_one_line(error: Exception, told: str) -> None:
    assert summary(error) == told


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of warnings."""
    texts: list[str] = []
    monkeypatch.setattr(restarts, "emitter", lambda _: lambda event: texts.append(event.message))
    return texts


def judge(folder: Path, *events: Event, max_failures: int = 1) -> Judge:
    log = EventLog(folder / EVENTS_FILE)
    for event in (*(WorkerEvent(worker=1, node=node, pid=1) for node in ("left", "right")), *events):
        log.append(event)
    recorder: Any = object()
    return Judge(folder, max_failures, recorder)


def test_each_restart_is_told_with_its_cause_and_where_it_goes_on(tmp_path: Path, told: list[str]) -> None:
    some = judge(tmp_path, run_log.checkpoint(7))
    some.after_exception(run_context=None, worker_exceptions={0: LOST, 1: FULL})
    assert told == ["worker 1 on right: RuntimeError: CUDA out of memory; all workers are started again, from step 7"]
    with pytest.raises(TrainingError, match=r"^worker 1 on right: .* memory; given up after 1 restarts without a new"):
        some.after_exception(run_context=None, worker_exceptions={1: FULL})
    EventLog(tmp_path / EVENTS_FILE).append(run_log.checkpoint(9))
    some.after_exception(run_context=None, worker_exceptions={0: FULL})
    assert told[1] == "worker 0: RuntimeError: CUDA out of memory; all workers are started again, from step 9"


def test_workers_that_are_replaced_while_others_get_on_do_not_add_up(tmp_path: Path, told: list[str]) -> None:
    """Also without a checkpoint; but those before whose replacement no step was taken do, and so do all together."""
    some = judge(tmp_path, run_log.step(3))
    some.decide({1: DEAD}, others_go_on=True)
    EventLog(tmp_path / EVENTS_FILE).append(run_log.step(4))
    some.decide({0: DEAD, 1: DEAD}, others_go_on=True)
    assert [text.rpartition("; ")[2] for text in told] == ["it is replaced, and the others go on"] * 2
    with pytest.raises(LostWorkersError, match="given up after 1 restarts"):
        some.decide({1: DEAD}, others_go_on=True)
    with pytest.raises(LostWorkersError, match="given up after 1 restarts"):
        some.decide(dict.fromkeys(range(3), DEAD), others_go_on=False)


@pytest.mark.parametrize(("error", "kind"), [
    (DEAD, LostWorkersError), (FULL, TrainingError)])
def test_workers_that_were_lost_are_told_from_workers_that_failed(
        tmp_path: Path, error: Exception, kind: type[RayYoloError]) -> None:
    with pytest.raises(TrainingError) as caught:
        judge(tmp_path, max_failures=0).after_exception(run_context=None, worker_exceptions={0: LOST, 1: error})
    assert type(caught.value) is kind


@pytest.mark.parametrize(("error", "kind"), [(CheckpointError("damaged"), CheckpointError), (MISSING, TrainingError),
                                            (ImportError("no cv2"), TrainingError), (KeyError("x"), TrainingError)])
def test_a_failure_that_would_come_again_ends_the_training_at_once(
        tmp_path: Path, told: list[str], error: Exception, kind: type[RayYoloError]) -> None:
    with pytest.raises(kind, match=r"^worker 1 on right: ") as caught:
        judge(tmp_path, max_failures=-1).after_exception(run_context=None, worker_exceptions={0: LOST, 1: error})
    assert type(caught.value) is kind
    assert told == []


def test_nodes_that_are_taken_back_do_not_count(tmp_path: Path, told: list[str]) -> None:
    some = judge(tmp_path, max_failures=0)
    taken = WorkerHealthCheckFailedError("gone", ray.exceptions.RayActorError(preempted=True))
    for _ in range(3):
        some.after_exception(run_context=None, worker_exceptions={0: LOST, 1: taken})
    assert len(told) == 3


class Roster:
    """Says how training ended, from a moment on; `answer` is what asks it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ended: Summary | None = None) -> None:
        self.ended = ended
        self.outcome = SimpleNamespace(remote=lambda: self)
        monkeypatch.setattr(restarts, "answer", lambda roster: roster.ended)


def test_a_number_of_workers_is_judged_by_who_is_left_and_not_after_the_end(
        tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    judge(tmp_path, run_log.step(3), run_log.checkpoint(2))
    roster, recorder = Roster(monkeypatch), object()
    some = Judge(tmp_path, -1, recorder, 3, roster)
    some.after_exception(None, {0: DEAD, 1: DEAD})
    some.after_exception(None, dict.fromkeys(range(3), DEAD))
    assert [text.rpartition("; ")[2] for text in told] == [
        "it is replaced, and the others go on", "all workers are started again, from step 2"]
    roster.ended = ENDED
    some.after_exception(None, {1: MISSING})
    assert len(told) == 2


class Trainer:
    """Ray's, which ends when it is let."""

    def __init__(self, outcome: Exception | str = "") -> None:
        self.outcome, self.free = outcome, threading.Event()
        if outcome:
            self.free.set()

    def fit(self) -> Any:
        assert self.free.wait(30)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return SimpleNamespace(return_value=self.outcome)


def test_a_place_that_is_never_there_again_does_not_hold_up_the_end(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's controller waits for it; what the roster knows counts, and the workers' room is given back."""
    stopped: list[Path] = []
    monkeypatch.setattr(restarts, "_END_SECONDS", 0.1)
    monkeypatch.setattr(restarts, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(restarts.cluster, "stop_workers", stopped.append)
    trainer = Trainer()
    assert restarts._until_the_end(trainer, Roster(monkeypatch, ENDED), tmp_path) is ENDED
    assert stopped == [tmp_path]
    trainer.free.set()


@pytest.mark.parametrize("with_roster", [False, True])
def test_what_ends_without_the_roster_is_as_ray_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     with_roster: bool) -> None:
    roster = Roster(monkeypatch) if with_roster else None
    assert restarts._until_the_end(Trainer("done"), roster, tmp_path) == "done"
    with pytest.raises(RuntimeError, match="out of memory"):
        restarts._until_the_end(Trainer(FULL), roster, tmp_path)
