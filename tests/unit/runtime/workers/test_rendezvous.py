"""What a worker tells of itself, and how it is ended. Lost ones: test_faults.py, test_trainer.py."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import WorkerLeftError
from ray_yolo.core.events import Event, WorkerEvent
from ray_yolo.core.structures import Orders
from ray_yolo.core.system import Process, own_process
from ray_yolo.engine.membership import Activity, Generation
from ray_yolo.engine.spec import WorkerContext
from ray_yolo.runtime.cluster import LOCAL
from ray_yolo.runtime.workers import rendezvous, worker
from ray_yolo.runtime.workers.client import JobClient
from ray_yolo.runtime.workers.coordinator import Heartbeat, Quorum, Registration
from ray_yolo.runtime.workers.rendezvous import RendezvousClient


def test_stacks_name_threads_and_functions() -> None:
    text = rendezvous.stacks()
    assert "MainThread:" in text
    assert "test_stacks_name_threads_and_functions" in text


class Beside:
    """A coordinator at which another worker waits to join; `alone`: this worker may start before its peers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, alone: bool, stall_seconds: float = 0.0,
                 is_leaving: Callable[[], bool] = lambda: False) -> None:
        self.happened, self.requests, self.leaving = list[str](), list[Registration](), list[bool]()
        self.ready, self.is_orphan = threading.Event(), threading.Event()
        for name, instead in (("get_node_ip_address", lambda: "127.0.0.1"), ("_POLL_SECONDS", 0.01),
                              ("import_compiler", self.preload)):
            monkeypatch.setattr(rendezvous, name, instead)
        monkeypatch.setattr(rendezvous.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
        quorum = Quorum(1, 0, 1, ("", 0), None, False)
        calls = {"register": self.register, "quorum": lambda uid: quorum,
                 "heartbeat": self.heartbeat, "leave": lambda uid: None}
        coordinator: Any = SimpleNamespace(**calls)
        assert all(hasattr(JobClient, name) for name in calls)
        self.members = RendezvousClient(
            coordinator, 0, Activity(stall_seconds), torch.device("cpu"), 60.0, print, is_leaving,
            self.is_orphan.is_set, alone=alone)

    def register(self, uid: str, request: Registration) -> None:
        self.happened.append("arrived")
        self.requests.append(request)

    def heartbeat(self, uid: str, heartbeat: Heartbeat, *_: Any) -> Orders:
        self.leaving.append(heartbeat.leaves)
        return Orders(regroup=True, save=True)

    def preload(self) -> None:
        self.happened.append("preloading")
        assert self.ready.wait(60)
        self.happened.append("preloaded")

    def wait_until_it_regroups(self) -> None:
        deadline = time.monotonic() + 60
        while not self.members.orders.regroup:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_worker_that_started_alone_trains_on_until_it_has_loaded_what_a_group_needs(
        monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Beside(monkeypatch, alone=True)
    assert isinstance(beside.members.join(None), Generation)
    time.sleep(0.3)  # many beats
    assert not beside.members.orders.regroup
    assert sorted(beside.happened) == ["arrived", "preloading"]  # once
    beside.ready.set()
    beside.wait_until_it_regroups()
    beside.members.close()


def test_a_worker_that_joins_others_has_loaded_what_a_group_needs_before(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Beside(monkeypatch, alone=False)
    beside.ready.set()
    assert isinstance(beside.members.join(None), Generation)
    assert beside.happened == ["preloading", "preloaded", "arrived"]
    beside.wait_until_it_regroups()
    assert beside.members.orders.save  # by the last reply
    beside.members.close()


def test_a_worker_reports_the_limits_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator judges by them: `--timeout-seconds` of a collective, `--stall-seconds` without a heartbeat."""
    beside = Beside(monkeypatch, alone=True, stall_seconds=8.0)
    beside.ready.set()
    beside.members.join(None)
    beside.members.close()
    [request] = beside.requests
    assert (request.timeout_seconds, request.heartbeat.heartbeat_limit) == (60.0, 8.0)


@pytest.mark.parametrize(("local", "address"), [("1", "127.0.0.1"), ("", "10.0.0.7")])
def test_workers_on_one_node_meet_at_its_loopback_address(
        monkeypatch: pytest.MonkeyPatch, local: str, address: str) -> None:
    monkeypatch.setenv(LOCAL, local)
    monkeypatch.setattr(rendezvous, "get_node_ip_address", lambda: "10.0.0.7")
    assert rendezvous.own_address() == address


@pytest.mark.parametrize(("phase", "device", "aborts"), [
    ("exchanging", "cpu", True), ("computing", "cpu", False), ("computing", "cuda", True), ("saving", "cuda", True)])
def test_waiting_for_a_departed_peer_is_aborted(
        monkeypatch: pytest.MonkeyPatch, phase: str, device: str, aborts: bool) -> None:
    """The host of a GPU waits in any phase: for a kernel that waits for the peer."""
    beside, asked, cuts = Beside(monkeypatch, alone=True), itertools.count(), []
    beside.ready.set()
    monkeypatch.setattr(rendezvous, "abort_process_group", lambda: cuts.append(len(cuts)))
    beside.members._device = torch.device(device)
    beside.members._activity.enter(phase)

    def heartbeat(*_: Any) -> Orders:
        next(asked)
        return Orders(abort=True)

    monkeypatch.setattr(beside.members._coordinator, "heartbeat", heartbeat)
    until = time.monotonic() + 60
    while next(asked) < 6 and time.monotonic() < until:
        time.sleep(0.02)
    beside.members.close()
    assert bool(cuts) is aborts


@pytest.mark.parametrize("regroups", [False, True])
def test_a_group_is_aborted_for_a_reply_about_itself(monkeypatch: pytest.MonkeyPatch, regroups: bool) -> None:
    """Not for a reply about the previous group, which this worker has left meanwhile."""
    beside, asked, cuts = Beside(monkeypatch, alone=True), threading.Event(), []
    beside.ready.set()
    monkeypatch.setattr(rendezvous, "abort_process_group", lambda: cuts.append(len(cuts)))

    def heartbeat(*_: Any) -> Orders:
        if asked.is_set():
            return Orders()
        if regroups:
            beside.members.join(None)
        asked.set()
        return Orders(abort=True)

    beside.members._activity.enter("joining")
    monkeypatch.setattr(beside.members._coordinator, "heartbeat", heartbeat)
    assert asked.wait(60)
    time.sleep(0.2)
    beside.members.close()
    assert cuts == ([] if regroups else [0])


def test_a_heartbeat_says_in_which_generation_the_worker_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a restarted coordinator knows its members. One that waits for a generation has left its last one."""
    beside, sent = Beside(monkeypatch, alone=True), list[Any]()
    beside.ready.set()

    def heartbeat(uid: str, heartbeat: Heartbeat, current: Any, *_: Any) -> Orders:
        sent.append(current and (current[0].worker, current[1].number, current[1].nodes))
        return Orders()

    def quorum(uid: str) -> Quorum | None:
        number = len(beside.requests)
        return Quorum(number, 0, 1, ("", 0), None, False, (0,), ("node",)) if len(sent) > 5 * number else None

    monkeypatch.setattr(beside.members._coordinator, "heartbeat", heartbeat)
    monkeypatch.setattr(beside.members._coordinator, "quorum", quorum)
    for _ in range(2):
        beside.members.join(None)
        before = len(sent)
        while len(sent) < before + 3:
            time.sleep(0.01)
    beside.members.close()
    changes = [current for current, last in zip(sent, [..., *sent], strict=False) if current != last]
    assert changes == [None, (0, 1, ()), None, (0, 2, ())]


def test_a_worker_that_waits_at_a_restarted_coordinator_registers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Beside(monkeypatch, alone=True)
    answers = iter([None, "unknown", None, Quorum(1, 0, 1, ("", 0), None, False)])
    monkeypatch.setattr(beside.members._coordinator, "quorum", lambda uid: next(answers))
    assert isinstance(beside.members.join(None), Generation)
    assert beside.happened.count("arrived") == 2
    beside.ready.set()
    beside.members.close()


def test_a_sigterm_is_repeated_to_a_coordinator_that_was_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the worker has left: the coordinator may have forgotten the first one."""
    received = SimpleQueue[int]()
    monkeypatch.setattr(worker, "_sigterms", received)
    beside = Beside(monkeypatch, alone=True, is_leaving=worker.received_sigterm)
    while not beside.leaving:
        time.sleep(0.01)
    received.put(signal.SIGTERM)
    deadline = time.monotonic() + 5
    while beside.leaving.count(True) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    beside.ready.set()
    beside.members.join(None)
    beside.members.close()
    assert beside.leaving == sorted(beside.leaving)
    assert beside.leaving[0] is False
    assert beside.requests[0].heartbeat.leaves


def test_a_worker_that_leaves_says_so_while_its_heartbeat_waits_for_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    is_leaving = threading.Event()
    beside = Beside(monkeypatch, alone=True, is_leaving=is_leaving.is_set)

    def heartbeat(uid: str, heartbeat: Heartbeat, current: Any, known: Orders, has_news: Callable[[], bool]
                  ) -> Orders | None:
        beside.leaving.append(heartbeat.leaves)
        while not has_news():
            time.sleep(0.01)
        return None

    monkeypatch.setattr(beside.members._coordinator, "heartbeat", heartbeat)
    while False not in beside.leaving:
        time.sleep(0.01)
    is_leaving.set()
    deadline = time.monotonic() + 5
    while True not in beside.leaving[-1:]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    beside.ready.set()
    beside.members.close()


@pytest.mark.parametrize("reason", ["an order", "its driver has ended", "its queue has ended"])
def test_a_worker_stops(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """The order holds until it is carried out, also in the next generation."""
    beside = Beside(monkeypatch, alone=True)

    def heartbeat(*_: Any) -> Orders:
        if reason == "its queue has ended":
            raise ray.exceptions.ActorDiedError
        return Orders(stop=reason == "an order")

    monkeypatch.setattr(beside.members._coordinator, "heartbeat", heartbeat)
    if reason == "its driver has ended":
        beside.is_orphan.set()
    deadline = time.monotonic() + 20
    while not beside.members.orders.stop:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    beside.ready.set()
    beside.members.join(None)
    assert beside.members.orders.stop
    beside.members.close()


def test_a_worker_whose_queue_is_being_restarted_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    beside, asked = Beside(monkeypatch, alone=True), list[int]()
    monkeypatch.setattr(rendezvous, "_SLOWEST_SECONDS", 0.01)

    def heartbeat(*_: Any) -> Orders:
        asked.append(len(asked))
        raise ray.exceptions.ActorUnavailableError("it is being restarted", None)

    monkeypatch.setattr(beside.members._coordinator, "heartbeat", heartbeat)
    while len(asked) < 5:
        time.sleep(0.01)
    assert beside.members.orders == Orders()
    beside.ready.set()
    beside.members.close()


@pytest.mark.parametrize(("driver", "writer_is_gone", "expected"), [
    (own_process(), True, False), (own_process()._replace(started=1), False, True),
    (Process("node7", "pid:[1]", 42, 7), False, False), (Process("node7", "pid:[1]", 42, 7), True, True)])
def test_a_driver_on_another_node_has_ended_if_its_recorder_has(
        driver: Process, writer_is_gone: bool, expected: bool) -> None:
    recorder: Any = SimpleNamespace(is_gone=lambda: writer_is_gone)
    assert worker._is_orphan(driver, recorder) is expected


def test_a_worker_reports_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    recorder = SimpleNamespace(emit=events.append, wait=lambda seconds: None, flush=lambda: None)
    monkeypatch.setattr(worker.ray, "get_runtime_context",
                        lambda: SimpleNamespace(get_node_labels=lambda: {"ray.io/market-type": "spot"}))
    for name, instead in (("run_session", lambda *_: None), ("from_payload", lambda spec: spec),
                          ("gc", SimpleNamespace(freeze=lambda: None)), ("undo_niceness", lambda: True),
                          ("_assigned_context", lambda *_: WorkerContext()),
                          ("RendezvousClient", lambda *_, **__: SimpleNamespace(close=lambda: None))):
        monkeypatch.setattr(worker, name, instead)
    coordinator: Any = None
    payload = {"recorder": recorder, "coordinator": coordinator, "on_pool": True, "stored": None, "callbacks": ("", {}),
               "spec": SimpleNamespace(run_dir=tmp_path), "driver": own_process(),
               "placement": Placement(num_workers=2, workers=0)}
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    worker.train_job(payload, 1, coordinator)
    assert [event.market_type for event in events if isinstance(event, WorkerEvent)] == ["spot"]


@pytest.mark.parametrize("sigterm", [False, True])
def test_a_worker_that_has_left_is_replaced_by_ray(monkeypatch: pytest.MonkeyPatch, sigterm: bool) -> None:
    """By an error: Ray Train replaces no worker that has returned. One that the others have dropped just ends."""
    received = SimpleQueue[int]()
    if sigterm:
        received.put(signal.SIGTERM)
    monkeypatch.setattr(worker, "_sigterms", received)
    monkeypatch.setattr(worker, "train_job", lambda *_: None)
    monkeypatch.setattr(worker, "get_current_placement_group", lambda: None)
    monkeypatch.setattr("ray.train.get_context", lambda: SimpleNamespace(get_world_rank=lambda: 1))
    with pytest.raises(WorkerLeftError) if sigterm else contextlib.nullcontext():
        assert worker.train_worker({"placement": Placement(num_workers=2), "coordinator": None}) is None
