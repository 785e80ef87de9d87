"""Trainings on several Ray nodes of this machine. A test breaks their workers, nodes or storage while they train.

Steps are slowed down, so that few of them pass while a process starts. The uninterrupted run, in one process, is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
from ray.cluster_utils import Cluster

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.config.placement import RunConfig
from ray_yolo.core.events import CheckpointEvent, Event, StartEvent, StepEvent, Summary, WorkerEvent
from ray_yolo.engine import keeper as own_keeper
from ray_yolo.engine.session import Session
from ray_yolo.runs.event_log import read_events, surviving
from ray_yolo.runs.verification import compare_runs
from ray_yolo.runtime import cluster as own_cluster
from ray_yolo.runtime import trainer
from ray_yolo.runtime.workers import run as own_run
from ray_yolo.runtime.workers import worker as own_worker
from ray_yolo.runtime.workers.client import JobClient
from tests.support.jobs import make_config
from tests.support.run_log import only

STEP_SECONDS = 0.7
EPOCHS, UNINTERRUPTED_STEPS = 100_000, 240  # three steps each; nothing trains to the end
EXACT = {"exact": True, "noval": True, "epochs": EPOCHS, "optimizer": {"nominal_batch": 16, "clip_norm": 0.3}}
PATIENCE = 600.0  # seconds for anything to happen, on a busy machine

_pool_worker, _train_worker, _train_job = own_worker.pool_worker, own_worker.train_worker, own_worker.train_job


def breakable_worker(config: dict[str, Any], number: int) -> bool:
    """Replaces `pool_worker`; see `_make_breakable`. Its process trains one job."""
    own_worker.train_job = _breakable_job
    return _pool_worker(config, number)


def _breakable_job(payload: dict[str, Any], number: int, *coordinator: Any) -> Summary | None:
    own_worker.train_job = _train_job
    _make_breakable(payload, number)
    return _train_job(payload, number, *coordinator)


def breakable_train_worker(config: dict[str, Any]) -> Summary | None:
    """Replaces `train_worker`, for a fixed number of workers."""
    import ray.train  # here: it takes seconds

    _make_breakable(config, ray.train.get_context().get_world_rank())
    return _train_worker(config)


def _make_breakable(config: dict[str, Any], number: int) -> None:
    """Slow down this worker's steps, and break it after a step as `Training.notify` asks.

    Its disk is full as long as the run folder has a file `full`.
    """
    after_step, save, run_dir = Session.after_step, checkpoint.save_checkpoint, Path(config["spec"]["run_dir"])

    def save_if_there_is_room(*args: Any) -> Path:
        if (run_dir / "full").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(*args)

    def slow_after_step(session: Session, *args: Any) -> None:
        time.sleep(STEP_SECONDS)
        with contextlib.suppress(FileNotFoundError):
            order = run_dir / f"order-{number}"
            kind = order.read_text()
            order.unlink()
            _BREAKS[kind](session)
        after_step(session, *args)

    Session.after_step, checkpoint.save_checkpoint = slow_after_step, save_if_there_is_room
    own_keeper.LEAVING_SECONDS = STEP_SECONDS / 2  # an epoch, which saves anyhow, takes some two seconds


def _fail(session: Session) -> None:
    raise OSError("odd")


def _flip_a_bit(session: Session) -> None:
    next(session.learner.model.parameters()).data[0, 0, 0, 0] *= -1


_BREAKS: dict[str, Callable[[Session], object]] = {
    "hang": lambda session: time.sleep(1e9),
    "hang in native code": lambda session: ctypes.PyDLL(None).sleep(1_000_000),  # holds the GIL
    "fail": _fail, "wrong": _flip_a_bit}


class Seconds(NamedTuple):
    """The cost of a fault."""

    detected: float  # until the others train without the lost worker
    training: float  # until the end of the next step
    lost: int  # steps that were done again


class Training:
    """A training that runs in a thread of this process."""

    def __init__(self, folder: Path, num_workers: Any, *, begin: bool = True, **placement: Any) -> None:
        self.run_dir = folder / "runs" / "train" / "exp"
        settings = {"cpus_per_worker": 1, "stall_seconds": 4, "max_failures": 1, **placement}
        self.config: RunConfig = make_config(folder, num_workers, settings, **EXACT)
        self.error: BaseException | None = None
        self._stops: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self.run, daemon=True)
        if begin:
            self._thread.start()

    def run(self) -> None:
        """Train, or resume."""
        try:
            with self._stoppable():
                trainer.fit(self.config, quiet=True)
        except BaseException as error:
            self.error = error

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Context in which `stop` finds what a signal would call, if the training ran in the main thread."""
        def graceful_signals(notify: object, stop: Callable[[], None]) -> contextlib.nullcontext[None]:
            self._stops.append(stop)
            return contextlib.nullcontext()

        def client(queue: Any, job: str, wanted: int) -> JobClient:
            made = JobClient(queue, job, wanted)
            self._stops.append(made.stop)
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "graceful_signals", graceful_signals)
            patch.setattr(own_run, "JobClient", client)
            yield

    @property
    def events(self) -> list[Event]:
        return read_events(self.run_dir / "events.jsonl")

    @property
    def step(self) -> int:
        """The newest step."""
        return max((event.step for event in self.events_of(StepEvent)), default=0)

    def events_of(self, kind: type) -> list[Any]:
        return only(kind, self.events)

    def wait(self, until: Callable[[list[Event]], object]) -> list[Event]:
        """The events, once `until` is true of them."""
        deadline = time.monotonic() + PATIENCE
        while not until(events := self.events):
            assert self.error is None, self.error
            assert time.monotonic() < deadline, [event for event in events if not isinstance(event, StepEvent)][-12:]
            time.sleep(0.05)
        return events

    def wait_for_workers(self, number: int, steps: int = 3) -> list[Event]:
        """The events, once `number` workers train together and have completed `steps` steps."""
        def trained(events: list[Event]) -> bool:
            starts = [index for index, event in enumerate(events) if isinstance(event, StartEvent)]
            return bool(starts) and (events[starts[-1]].num_workers == number
                                     and len(only(StepEvent, events[starts[-1]:])) >= steps)

        return self.wait(trained)

    def pids(self) -> dict[int, int]:
        """Process id of the newest worker of each number."""
        return {event.worker: event.pid for event in self.events_of(WorkerEvent)}

    def hit(self, worker: int, signum: int = signal.SIGKILL) -> float:
        """Send a signal to a worker. Returns the time of it."""
        os.kill(self.pids()[worker], signum)
        return time.time()

    def notify(self, worker: int, kind: str) -> float:
        """Break a worker after the current step. Returns the time when the worker took the order."""
        order = self.run_dir / f"order-{worker}"
        order.with_suffix(".new").write_text(kind)
        order.with_suffix(".new").rename(order)
        while order.exists():
            time.sleep(0.01)
        return time.time()

    def stop(self) -> None:
        """Stop it after the current step."""
        for stop in self._stops:
            stop()
        self.join(KeyboardInterrupt)

    def join(self, error: type[BaseException] | None = None) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        assert (error is None and self.error is None) or isinstance(self.error, error or ()), repr(self.error)

    def cost(self, fault: float) -> Seconds:
        """The cost of a fault that happened at time `fault`."""
        events = self.events
        after = [event for event in events if event.time > fault]
        start = next(event for event in after if isinstance(event, StartEvent))
        step = next(event for event in after if isinstance(event, StepEvent) and event.step > start.step
                    and event.time > start.time)
        done = max(event.step for event in events if isinstance(event, StepEvent) and event.time < start.time)
        return Seconds(start.time - fault, step.time - fault, max(done - start.step, 0))


def check(training: Training, uninterrupted: Path) -> None:
    """Same bits at every common step, and no step missing or repeated."""
    training.wait(lambda events: len(only(CheckpointEvent, events)) > 3)  # of one that has just begun
    findings = compare_runs(training.run_dir, uninterrupted)
    assert len(findings) > 2
    assert not [finding for finding in findings if finding.problem]
    steps = [event.step for event in only(StepEvent, surviving(training.events))]
    starts = {start.step for start in training.events_of(StartEvent)}  # a lost worker's last StepEvent may be lost
    assert len(set(steps)) == len(steps)
    assert set(range(1, max(steps) + 1)) - set(steps) <= starts


def uninterrupted_run(folder: Path, steps: int = UNINTERRUPTED_STEPS, **placement: Any) -> Path:
    """The run folder of a training without faults, in this process, of at least `steps` steps."""
    folder.mkdir(exist_ok=True)
    training = Training(folder, 0, **placement)
    training.wait(lambda events: training.step >= steps)
    training.stop()
    return training.run_dir


@contextlib.contextmanager
def ray_nodes(cpus: int) -> Iterator[Cluster]:
    """A Ray cluster on this machine. Its head node, with the driver, has `cpus` CPUs."""
    os.environ.update({**own_cluster.DRIVER_ENVIRONMENT, "RAY_health_check_period_ms": "500",
                       "RAY_health_check_failure_threshold": "4"})
    own_cluster.own_token()
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False})
    ray.shutdown()  # tests before this one may have left the shared session: a process is in one cluster
    ray.init(address=nodes.address, log_to_driver=False)
    try:
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


def drain(node_id: str) -> float:
    """Drain a node, as a cloud does before it reclaims one. Returns the time of it."""
    address = ray.get_runtime_context().gcs_address
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address,
                    "--node-id", node_id, *reason, "--deadline-remaining-seconds", "300"],
                   check=True, capture_output=True)
    return time.time()


def left_over() -> str:
    """What an ended training still holds or runs after ten seconds; '': nothing."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        groups = [group["name"] or group["state"] for group in ray.util.placement_group_table().values()
                  if group["state"] != "REMOVED"]
        held = ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0)
        if not groups and not held:
            return ""
        time.sleep(0.2)
    return f"{groups}, {held:g} CPUs"
