"""Training on TorchTrainer: its configuration, and lost workers of real processes, with bit-identical weights."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train.torch import TorchConfig

from ray_yolo.config.placement import Placement
from ray_yolo.core.events import (
    PlacementEvent,
    Summary,
)
from ray_yolo.runs.event_log import EVENTS_FILE, EventLog
from ray_yolo.runtime import cluster
from ray_yolo.runtime.workers import torch_trainer
from ray_yolo.runtime.workers.failures import FailurePolicy
from ray_yolo.runtime.workers.torch_trainer import FailureCallback, InPlaceConfig, TrainingEndedError
from ray_yolo.runtime.workers.worker import prepare_process

ENDED = Summary(step=8, epoch=1, best_epoch=1, best_fitness=0.5, stopped_early=False, stopped=False, last_epoch=None)
FULL = RuntimeError("CUDA out of memory")


def test_ray_replaces_in_place_and_forms_no_group() -> None:
    backend = InPlaceConfig(backend="gloo").backend_cls
    assert backend.has_replica_groups
    assert not TorchConfig().backend_cls.has_replica_groups
    for hook in (backend.on_training_start, backend.on_shutdown):
        assert hook(backend(), None, None) is None  # the worker group is not touched
    executed: list[Any] = []
    backend.on_start(backend(), SimpleNamespace(execute=executed.append), None)
    assert executed == [prepare_process]  # in the main thread of each worker


def policy_of(folder: Path) -> FailurePolicy:
    return FailurePolicy(folder, 3, lambda event: None)


class Coordinator:
    """The client of one that says how training ended, from a moment on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ended: Summary | None = None) -> None:
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        self.ended, self.lost, self.leaving = ended, [], set()
        self.staying = 0  # one leaves at each call

    def outcome(self) -> Summary | None:
        return self.ended

    def stop(self) -> bool:
        return False

    def drain_nodes(self, nodes: set[str]) -> dict[int, str]:
        return {}

    def present(self) -> int:
        self.staying = max(0, self.staying - 1)
        return self.staying

    def mark_departed(self, workers: list[int]) -> list[int]:
        self.lost += workers
        return [worker for worker in workers if worker not in self.leaving]


def test_failures_are_decided_by_the_remaining_workers_and_not_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[Any] = []
    policy: Any = SimpleNamespace(
        decide=lambda failures, others_continue: decided.append((list(failures), others_continue)))
    coordinator: Any = Coordinator(monkeypatch)
    callback = FailureCallback(policy, 3, coordinator)
    callback.after_exception(None, {0: FULL, 1: FULL})
    callback.after_exception(None, dict.fromkeys(range(3), FULL))
    assert decided == [([0, 1], True), ([0, 1, 2], False)]
    assert coordinator.lost == [0, 1, 0, 1, 2]  # so that peers in a collective do not wait for them
    coordinator.leaving = {0}
    callback.after_exception(None, {0: FULL})
    callback.after_exception(None, {0: FULL, 2: FULL})
    assert decided[2:] == [([2], True)]
    coordinator.ended, coordinator.staying = ENDED, 3
    with pytest.raises(TrainingEndedError):  # else Ray would start workers again
        callback.after_exception(None, {1: FULL})
    assert (len(decided), coordinator.staying) == (3, 0)


def test_what_a_controller_held_that_died_is_given_back_before_the_next_one(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    stopped, outcomes = [], iter([ray.exceptions.ActorDiedError(), "done"])

    def run_gracefully(*_: Any) -> str:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        assert stopped == [tmp_path]
        return outcome

    for name, instead in (("run_gracefully", run_gracefully), ("stop_workers", stopped.append),
                          ("build_trainer", lambda *_, **__: None)):
        monkeypatch.setattr(torch_trainer, name, instead)
    payload = {"coordinator": Coordinator(monkeypatch), "stored": None}
    placement = Placement(num_workers=2)
    assert torch_trainer.run_torch_trainer(print, payload, placement, 0.0, policy_of(tmp_path)) == "done"


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


def test_a_bundle_that_is_never_ready_again_does_not_delay_the_end(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's controller waits for it; the coordinator's outcome counts, and the workers' resources are freed."""
    freed: list[str] = []
    monkeypatch.setattr(torch_trainer, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(torch_trainer, "free", freed.extend)
    EventLog(tmp_path / EVENTS_FILE).append(PlacementEvent(group="ab"))
    trainer, began = Trainer(), time.monotonic()
    assert torch_trainer._fit(trainer, Coordinator(monkeypatch, ENDED), policy_of(tmp_path), 0.3) is ENDED
    assert freed == ["ab"]
    assert 0.3 <= time.monotonic() - began < 5
    trainer.free.set()


def test_once_ray_is_shut_down_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends a process that calls it then, with status 1; an interrupted command has another one."""
    coordinator: Any = Coordinator(monkeypatch)
    coordinator.outcome = lambda: pytest.fail("a call")
    trainer = Trainer()
    monkeypatch.setattr(torch_trainer, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert torch_trainer._fit(trainer, coordinator, policy_of(tmp_path), 0.1) is None
    trainer.free.set()


def test_workers_are_killed_only_after_they_have_sent_their_last_events(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave the coordinator after that; Ray's controller may take longer to end than a user should wait."""
    freed, coordinator, trainer = list[int](), Coordinator(monkeypatch, ENDED), Trainer()
    monkeypatch.setattr(torch_trainer, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(torch_trainer, "free", lambda groups: freed.append(coordinator.staying))
    coordinator.staying = 3
    assert torch_trainer._fit(trainer, coordinator, policy_of(tmp_path), 0.1) is ENDED
    assert freed == [0]
    trainer.free.set()


def test_workers_of_a_node_that_is_taken_away_leave_while_the_others_train(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator is asked again and again, as it may have been restarted; the user is notified once."""
    coordinator: Any = Coordinator(monkeypatch)
    drained, notified, trainer = list[set[str]](), list[str](), Trainer()
    trainer.outcome = "done"

    def drain_nodes(nodes: set[str]) -> None:
        drained.append(nodes)
        if len(drained) == 2:
            trainer.free.set()

    coordinator.drain_nodes = drain_nodes
    monkeypatch.setattr(torch_trainer, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(cluster, "draining_nodes", lambda: {"n2"})
    monkeypatch.setattr(cluster, "leave_notice", str)
    policy = policy_of(tmp_path)
    monkeypatch.setattr(policy, "notify", notified.append)
    latest = threading.Timer(5, trainer.free.set)
    latest.start()
    assert torch_trainer._fit(trainer, coordinator, policy, 0.5) == "done"
    latest.cancel()
    assert drained[:2] == [{"n2"}] * 2
    assert notified == ["n2"]


@pytest.mark.parametrize(("stored", "seconds"), [(None, 0.5), ({"address": "s3://bucket/run"}, 10.0)])
def test_workers_of_a_run_in_a_bucket_have_time_to_remove_their_copies(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: dict[str, str] | None, seconds: float) -> None:
    monkeypatch.setattr(torch_trainer, "build_trainer", lambda *_, **__: None)
    monkeypatch.setattr(torch_trainer, "_fit", lambda *given: given[-1])
    monkeypatch.setattr(torch_trainer, "run_gracefully", lambda work, *_: work())
    payload = {"coordinator": Coordinator(monkeypatch), "stored": stored}
    patience = torch_trainer.run_torch_trainer(
        lambda _: None, payload, Placement(num_workers=2), 0.0, policy_of(tmp_path))
    assert patience == seconds


def test_without_an_outcome_of_the_coordinator_rays_result_counts(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator: Any = Coordinator(monkeypatch)
    assert torch_trainer._fit(Trainer("done"), coordinator, policy_of(tmp_path), 0.5) == "done"
    with pytest.raises(RuntimeError, match="out of memory"):
        torch_trainer._fit(Trainer(FULL), coordinator, policy_of(tmp_path), 0.5)
