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
import torch

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import WorkerLeftError
from ray_yolo.core.events import Event, WorkerEvent
from ray_yolo.core.system import Process, own_process
from ray_yolo.engine.build import WorkerContext
from ray_yolo.engine.membership import Activity, Generation
from ray_yolo.runtime.cluster import LOCAL
from ray_yolo.runtime.workers import rendezvous, worker
from ray_yolo.runtime.workers.coordinator import Coordinator, Heartbeat, HeartbeatReply, Quorum, Registration
from ray_yolo.runtime.workers.rendezvous import RendezvousClient


def test_stacks_name_threads_and_functions() -> None:
    text = rendezvous.stacks()
    assert "MainThread:" in text
    assert "test_stacks_name_threads_and_functions" in text


class Beside:
    """A coordinator at which another worker waits to join; `alone`: this worker may start before its peers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, alone: bool, stall_seconds: float = 0.0,
                 must_leave: Callable[[], bool] = lambda: False) -> None:
        self.happened, self.requests, self.leaving = list[str](), list[Registration](), list[bool]()
        self.ready = threading.Event()
        for name, instead in (("get_node_ip_address", lambda: "127.0.0.1"),
                              ("_HEARTBEAT_SECONDS", 0.01), ("_LEAVE_SECONDS", 0.01),
                              ("import_compiler", self.preload)):
            monkeypatch.setattr(rendezvous, name, instead)
        monkeypatch.setattr(rendezvous.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
        quorum = Quorum(1, 0, 1, ("", 0), None, False)
        calls = {"register": self.register, "quorum": lambda uid: quorum,
                 "heartbeat": self.heartbeat, "leave": lambda uid: None, "introduce": lambda *_: False}
        coordinator: Any = SimpleNamespace(**calls)
        assert all(hasattr(Coordinator, name) for name in calls)
        self.members = RendezvousClient(
            coordinator, 0, Activity(stall_seconds), torch.device("cpu"), 60.0, print, must_leave, alone=alone
        )

    def register(self, uid: str, request: Registration) -> None:
        self.happened.append("arrived")
        self.requests.append(request)

    def heartbeat(self, uid: str, heartbeat: Heartbeat) -> HeartbeatReply:
        self.leaving.append(heartbeat.must_leave)
        return HeartbeatReply(True, 0, False, all_draining=True)

    def preload(self) -> None:
        self.happened.append("preloading")
        assert self.ready.wait(60)
        self.happened.append("preloaded")

    def wait_until_it_regroups(self) -> None:
        deadline = time.monotonic() + 60
        while not self.members.must_regroup():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_worker_that_started_alone_trains_on_until_it_has_loaded_what_a_group_needs(
        monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Beside(monkeypatch, alone=True)
    assert isinstance(beside.members.join(None), Generation)
    time.sleep(0.3)  # many beats
    assert not beside.members.must_regroup()
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
    assert beside.members.all_draining()  # by the last reply
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
def test_a_worker_that_may_wait_for_a_lost_peer_aborts_its_group(
        monkeypatch: pytest.MonkeyPatch, phase: str, device: str, aborts: bool) -> None:
    """The host of a GPU waits in any phase: for a kernel that waits for the peer."""
    beside, asked, cuts = Beside(monkeypatch, alone=True), itertools.count(), []
    beside.ready.set()
    monkeypatch.setattr(rendezvous, "abort_process_group", lambda: cuts.append(len(cuts)))
    beside.members._device = torch.device(device)
    beside.members._activity.enter(phase)

    def heartbeat(*_: Any) -> HeartbeatReply:
        next(asked)
        return HeartbeatReply(False, 0, True, all_draining=False)

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

    def heartbeat(*_: Any) -> HeartbeatReply:
        if asked.is_set():
            return HeartbeatReply(False, 0, False, all_draining=False)
        if regroups:
            beside.members.join(None)
        asked.set()
        return HeartbeatReply(False, 0, True, all_draining=False)

    beside.members._activity.enter("joining")
    monkeypatch.setattr(beside.members._coordinator, "heartbeat", heartbeat)
    assert asked.wait(60)
    time.sleep(0.2)
    beside.members.close()
    assert cuts == ([] if regroups else [0])


@pytest.mark.parametrize("known", [True, False])
def test_a_worker_introduces_itself_to_a_coordinator_that_does_not_know_it(
        monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """If the others have gone on without it, its group is cut, and it asks for another one."""
    beside, cuts, introduced = Beside(monkeypatch, alone=True), [], list[Any]()
    beside.ready.set()
    monkeypatch.setattr(rendezvous, "abort_process_group", lambda: cuts.append(len(cuts)))

    def introduce(uid: str, arrival: Any, quorum: Quorum) -> bool:
        introduced.append((uid, arrival.worker, arrival.heartbeat.phase, quorum.number))
        return known

    monkeypatch.setattr(beside.members._coordinator, "introduce", introduce)
    monkeypatch.setattr(beside.members._coordinator, "heartbeat",
                        lambda *_: HeartbeatReply(False, 0, False, all_draining=False, unknown=True))
    beside.members._activity.enter("exchanging")
    time.sleep(0.1)
    assert not introduced  # it has none to tell of
    beside.members.join(None)
    deadline = time.monotonic() + 60
    while len(introduced) < 3 or not (known or beside.members.must_regroup()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    beside.members.close()
    assert set(introduced) == {(beside.members._uid, 0, "exchanging", 1)}
    assert bool(cuts) is not known
    assert beside.members.must_regroup() is not known


def test_a_worker_that_waits_introduces_no_generation_that_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted coordinator would answer with that generation, whose members have left it, too."""
    beside, introduced, beats = Beside(monkeypatch, alone=True), [], []
    beside.ready.set()
    monkeypatch.setattr(beside.members._coordinator, "introduce", lambda *given: introduced.append(given))
    beside.members.join(None)

    def heartbeat(*_: Any) -> HeartbeatReply:
        beats.append(len(beats))
        return HeartbeatReply(False, 0, False, all_draining=False, unknown=True)

    def quorum(uid: str) -> Quorum | None:
        monkeypatch.setattr(beside.members._coordinator, "heartbeat", heartbeat)
        return Quorum(2, 0, 1, ("", 0), None, False) if len(beats) > 5 else None

    monkeypatch.setattr(beside.members._coordinator, "quorum", quorum)
    assert isinstance(beside.members.join(None), Generation)
    beside.members.close()
    assert {given[2].number for given in introduced} <= {2}


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
    beside = Beside(monkeypatch, alone=True, must_leave=worker.received_sigterm)
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
    assert beside.requests[0].heartbeat.must_leave


def test_a_worker_that_must_leave_says_so_before_its_next_heartbeat_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    must_leave = threading.Event()
    beside = Beside(monkeypatch, alone=True, must_leave=must_leave.is_set)
    while not beside.leaving:
        time.sleep(0.01)
    monkeypatch.setattr(rendezvous, "_HEARTBEAT_SECONDS", 600.0)
    must_leave.set()
    deadline = time.monotonic() + 5
    while True not in beside.leaving:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    beside.ready.set()
    beside.members.close()


def test_a_worker_that_its_queue_recalls_tells_its_coordinator_until_it_has_left(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """One heartbeat tells both: its reply has the queue's wish, and the next one repeats it for the coordinator."""
    beside = Beside(monkeypatch, alone=True)
    reply = HeartbeatReply(False, 0, False, all_draining=False)

    def heartbeat(uid: str, sent: Heartbeat) -> HeartbeatReply:
        beside.leaving.append(sent.must_leave)
        return reply._replace(must_leave=len(beside.leaving) == 3)

    monkeypatch.setattr(beside.members._coordinator, "heartbeat", heartbeat)
    deadline = time.monotonic() + 5
    while beside.leaving.count(True) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert beside.leaving == sorted(beside.leaving)
    beside.ready.set()
    beside.members.close()


@pytest.mark.parametrize("driver", [own_process(), own_process()._replace(pid=2**22 + 1)])
def test_workers_stop_when_their_driver_has_ended_and_not_by_a_sigterm(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: Process) -> None:
    """A worker that gets SIGTERM leaves alone."""
    received, stops, coordinator = SimpleQueue[int](), list[bool](), SimpleNamespace()
    received.put(signal.SIGTERM)

    def run_session(*arguments: Any) -> None:
        stops.append(arguments[-1]())

    events: list[Event] = []
    recorder = SimpleNamespace(emit=events.append, wait=lambda seconds: None, flush=lambda: None)
    monkeypatch.setattr(worker.ray, "get_runtime_context",
                        lambda: SimpleNamespace(get_node_labels=lambda: {"ray.io/market-type": "spot"}))
    for name, instead in (("_sigterms", received), ("run_session", run_session), ("from_payload", lambda spec: spec),
                          ("gc", SimpleNamespace(freeze=lambda: None)), ("undo_niceness", lambda: True),
                          ("_assigned_context", lambda *_: WorkerContext()),
                          ("poll_stop_request", lambda *_: lambda: False),
                          ("RendezvousClient", lambda *_, **__: SimpleNamespace(close=lambda: None))):
        monkeypatch.setattr(worker, name, instead)
    payload = {"recorder": recorder, "coordinator": coordinator, "on_pool": True, "stored": None,
               "spec": SimpleNamespace(run_dir=tmp_path), "driver": driver,
               "placement": Placement(num_workers=2, workers=0)}
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    worker.train_job(payload, 1, coordinator)
    assert stops == [driver != own_process()]
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
