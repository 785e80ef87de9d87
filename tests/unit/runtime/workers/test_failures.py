"""Which failures end a training, and how they are reported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray.exceptions
import torch
import torchvision
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from ray_yolo.core.errors import (
    CheckpointError,
    DatasetError,
    LostWorkersError,
    PeerDepartedError,
    RayYoloError,
    TrainingError,
    WorkerError,
)
from ray_yolo.core.events import Event, WorkerEvent
from ray_yolo.runs.event_log import EVENTS_FILE, EventLog
from ray_yolo.runtime.workers import failures as failures_module
from ray_yolo.runtime.workers.failures import FailurePolicy, RestartBudget, cause_of, error_line
from tests.support import run_log

LOST = PeerDepartedError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4321")
LATE = PeerDepartedError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation")
ODD = RuntimeError("cuDNN error: device peer mapping failed")  # a failure of this worker, with a word of the others'
ALONE = PeerDepartedError("Connection closed by peer")  # what a sound worker ends with where it cannot go on
DEAD = WorkerHealthCheckFailedError("Worker 1 is gone.", ray.exceptions.ActorDiedError())
FULL = RuntimeError("CUDA out of memory")
MISSING = FileNotFoundError(2, "No such file or directory", "/data/a.png")


def test_the_cause_is_the_error_that_is_not_a_lost_connection() -> None:
    for failures, worker in [
        ({0: LOST, 1: DEAD}, 1), ({0: LOST, 1: LATE, 2: FULL}, 2), ({0: DEAD, 1: MISSING, 2: LOST}, 1),
        ({0: LOST, 2: ODD}, 2), ({0: ODD, 1: FULL}, 0), ({0: ODD, 1: DEAD}, 1),
        ({0: ALONE, 1: DEAD}, 1), ({0: ALONE, 1: FULL}, 1), ({0: ALONE, 1: MISSING}, 1),
        ({3: LOST, 2: LATE}, 2), ({1: CheckpointError("of another model"), 0: FULL}, 1),
    ]:
        assert cause_of(failures) == (worker, failures[worker]), failures


def test_failures_count_until_a_new_checkpoint_is_saved() -> None:
    left = RestartBudget(2)
    assert [left.allow(step) for step in (0, 0, 5, 5, 5)] == [True, True, True, True, False]
    assert not RestartBudget(0).allow(7)
    assert all(RestartBudget(-1).allow(0) for _ in range(9))


@pytest.mark.parametrize(("error", "line"), [
    (CheckpointError("a.pt: damaged; use another"), "a.pt: damaged; use another"),
    (MISSING, "FileNotFoundError: [Errno 2] No such file or directory: '/data/a.png'"),
    (ValueError("Caught ValueError in DataLoader worker process 0.\nTraceback:\n  code\nValueError: odd\n"),
     "ValueError: odd"),
    (DatasetError("Caught DatasetError in DataLoader worker process 0.\n  code\nray_yolo.errors.DatasetError: a: odd"),
     "a: odd"),
    (OSError("https://ann:s3cr3t@host is away"), "OSError: https://***@host is away"), (KeyError(), "KeyError: "),
])
def test_an_error_is_one_line(error: Exception, line: str) -> None:
    assert error_line(error) == line


WARNINGS: list[str] = []


@pytest.fixture
def messages() -> list[str]:
    """Texts of warnings."""
    WARNINGS.clear()
    return WARNINGS


def policy(folder: Path, *events: Event, max_failures: int = 1) -> FailurePolicy:
    log = EventLog(folder / EVENTS_FILE)
    for event in (*(WorkerEvent(worker=1, node=node, pid=1) for node in ("left", "right")), *events):
        log.append(event)
    return FailurePolicy(folder, max_failures, lambda event: WARNINGS.append(getattr(event, "message", "")))


def test_a_restart_is_reported_with_cause_and_step(tmp_path: Path, messages: list[str]) -> None:
    some = policy(tmp_path, run_log.checkpoint(7))
    some.decide({0: LOST, 1: FULL}, others_continue=False)
    assert messages == ["worker 1 on right: RuntimeError: CUDA out of memory; all workers restart from step 7"]
    with pytest.raises(TrainingError):
        some.decide({1: FULL}, others_continue=False)
    EventLog(tmp_path / EVENTS_FILE).append(run_log.checkpoint(9))
    some.decide({0: FULL}, others_continue=False)
    assert messages[1] == "worker 0: RuntimeError: CUDA out of memory; all workers restart from step 9"


def test_replaced_workers_do_not_add_up_during_progress(tmp_path: Path, messages: list[str]) -> None:
    """Also without a checkpoint; but those before whose replacement no step was taken do, and so do all together."""
    some = policy(tmp_path, run_log.step(3))
    some.decide({1: DEAD}, others_continue=True)
    EventLog(tmp_path / EVENTS_FILE).append(run_log.step(4))
    some.decide({0: DEAD, 1: DEAD}, others_continue=True)
    assert [text.rpartition("; ")[2] for text in messages] == ["it is replaced while the others continue"] * 2
    with pytest.raises(LostWorkersError):
        some.decide({1: DEAD}, others_continue=True)
    with pytest.raises(LostWorkersError):
        some.decide(dict.fromkeys(range(3), DEAD), others_continue=False)


def test_workers_lost_within_seconds_are_one_failure(
        tmp_path: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As with their node. A worker that was replaced meanwhile, and a later one, fail anew."""
    now = 100.0
    monkeypatch.setattr(failures_module, "time", SimpleNamespace(monotonic=lambda: now))
    some = policy(tmp_path, run_log.step(3), max_failures=2)
    for workers in ([1], [2, 3]):
        some.decide(dict.fromkeys(workers, DEAD), others_continue=True)
        now += 2.0
    some.decide({3: DEAD}, others_continue=True)  # the second failure
    now += 6.0
    assert len(messages) == 3
    with pytest.raises(LostWorkersError):
        some.decide({1: DEAD}, others_continue=True)


@pytest.mark.parametrize("failures", [{0: ALONE}, {0: ALONE, 1: DEAD}])
def test_a_departed_peer_restarts_all_workers(
        tmp_path: Path, messages: list[str], failures: dict[int, Exception]) -> None:
    some = policy(tmp_path, run_log.checkpoint(7), max_failures=2)
    for _ in range(2):
        some.decide(failures, others_continue=False)
    assert [text.rpartition("; ")[2] for text in messages] == ["all workers restart from step 7"] * 2
    with pytest.raises(LostWorkersError) as caught:
        some.decide(failures, others_continue=False)
    assert type(caught.value) is LostWorkersError


@pytest.mark.parametrize(("error", "kind"), [
    (DEAD, LostWorkersError), (FULL, WorkerError), (OSError(28, "No space left"), TrainingError),
    (torch.OutOfMemoryError("CUDA out of memory"), WorkerError), (RuntimeError("a shape"), WorkerError)])
def test_lost_workers_are_distinguished_from_failed_ones(
        tmp_path: Path, error: Exception, kind: type[RayYoloError]) -> None:
    with pytest.raises(TrainingError) as caught:
        policy(tmp_path, max_failures=0).decide({0: LOST, 1: error}, others_continue=False)
    assert type(caught.value) is kind
    with pytest.raises(LostWorkersError):
        policy(tmp_path, max_failures=0).decide({0: error, 1: DEAD}, others_continue=False)


@pytest.mark.parametrize(("error", "kind"), [(CheckpointError("damaged"), CheckpointError), (MISSING, TrainingError),
                                            (ImportError("no cv2"), TrainingError), (KeyError("x"), WorkerError)])
def test_a_permanent_failure_ends_the_training(
        tmp_path: Path, messages: list[str], error: Exception, kind: type[RayYoloError]) -> None:
    with pytest.raises(kind) as caught:
        policy(tmp_path, max_failures=-1).decide({0: LOST, 1: error}, others_continue=False)
    assert type(caught.value) is kind
    assert messages == []


def test_a_missing_operator_is_a_permanent_failure(tmp_path: Path) -> None:
    """torch's own error: nms has no kernel for sparse tensors, as torchvision built for CPUs has none for GPUs."""
    boxes = torch.zeros(1, 4).to_sparse()
    with pytest.raises(RuntimeError, match=r"Could not run 'torchvision::nms'") as lacking:
        torchvision.ops.nms(boxes, boxes[0], 0.5)
    with pytest.raises(TrainingError):
        policy(tmp_path, max_failures=-1).decide({0: LOST, 1: lacking.value}, others_continue=False)


def test_nodes_that_are_taken_back_do_not_count(tmp_path: Path, messages: list[str]) -> None:
    some = policy(tmp_path, max_failures=0)
    taken = WorkerHealthCheckFailedError("gone", ray.exceptions.RayActorError(preempted=True))
    for _ in range(3):
        some.decide({0: LOST, 1: taken}, others_continue=False)
    assert len(messages) == 3
