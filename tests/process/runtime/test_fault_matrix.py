"""The fault matrix: each fault, in each family, on each store. A user's view, with real processes.

    python -m pytest -m faults tests/process/runtime/test_fault_matrix.py

A row starts a training, hits it after a step, and repeats the same command if it has ended. Every checkpoint must equal
that of a training without faults in one process, and records must have each epoch once. Faults of nodes and of hung
workers are in tests/cluster/test_faults.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from ray_yolo.core.events import CheckpointEvent, EndEvent, Event, StartEvent, StepEvent, WorkerEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.location import local_folder
from ray_yolo.runs.verification import compare_runs
from tests.support.jobs import make_dataset
from tests.support.processes import descendants, kill
from tests.support.run_log import only

EPOCHS, SAVE_STEPS = 4, 2
STEPS_OF_EPOCH = 3  # 37 images, 16 a step
FLAGS = ("--imgsz", "64", "--batch-size", "16", "--microbatch", "4", "--epochs", str(EPOCHS), "--exact", "--patience",
         "0", "--save-steps", str(SAVE_STEPS), "--noplots", "--cpus-per-worker", "1", "--stall-seconds", "6",
         "--set=optimizer.nominal_batch=16", "--set=schedule.warmup_epochs=0")
PHASE = re.compile(rb".+, \d+ s")  # a line of a slow start


class Training:
    """One command in the background, and the log of its run."""

    def __init__(self, folder: Path, family: str, store: str, *flags: str) -> None:
        self.folder = folder
        self.storage = str(folder) if store == "folder" else f"s3://bucket/{folder.name}"
        self.words = [sys.executable, "-m", "ray_yolo.train", "--data", str(folder / "data/data.yaml"), "--model",
                      family, "--weights", "", *FLAGS, "--storage-path", self.storage, *flags]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_YOLO_CACHE": str(self.folder / "cache"),
                       "MLFLOW_TRACKING_URI": f"sqlite:///{self.folder}/mlflow.db"}
        environment.pop("RAY_ADDRESS", None)
        ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        try:
            return subprocess.Popen(self.words, cwd=self.folder, env=environment, start_new_session=True,
                                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        finally:
            signal.signal(signal.SIGINT, ours)

    @property
    def events(self) -> list[Event]:
        """The log: of the run folder, or of the working copy of a run in a bucket."""
        logs = [*self.folder.glob(f"runs/train/exp/{EVENTS_FILE}"), *self.folder.glob(f"cache/**/{EVENTS_FILE}")]
        return read_events(logs[0]) if logs else []

    @property
    def steps(self) -> list[int]:
        return [event.step for event in only(StepEvent, self.events)]

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 200
        while step not in self.steps:
            assert self.process.poll() is None, self.process.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def end(self) -> tuple[int, bytes]:
        """The exit status, and what was printed as an error."""
        _, errors = self.process.communicate(timeout=250)
        lines = [line for line in errors.splitlines() if not PHASE.fullmatch(line)]
        return self.process.returncode, b"\n".join(lines)

    def run_again(self) -> None:
        self.process = self._start()
        status, errors = self.end()
        assert status == 0, errors.decode()

    def child(self, *words: str) -> int:
        """The newest process of the command whose command line has these words. The record process starts after the
        first step."""
        deadline = time.monotonic() + 60
        while True:
            found = []
            for pid in descendants(self.process.pid):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may have ended meanwhile
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
                    if all(word in line for word in words):
                        found.append(pid)
            if found:
                return found[-1]
            assert self.process.poll() is None, self.process.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    @property
    def run_dir(self) -> Path:
        """The run folder, or a copy of the one in the bucket."""
        return local_folder(f"{self.storage}/runs/train/exp")


def kill_everything(training: Training) -> None:
    kill(training.process)


def signal_group(signum: int, training: Training) -> None:
    """As a terminal and `timeout` do."""
    os.killpg(training.process.pid, signum)


def signal_worker(signum: int, training: Training) -> None:
    newest = {event.worker: event.pid for event in only(WorkerEvent, training.events)}
    os.kill(newest[max(newest)], signum)


def kill_two_workers(training: Training) -> None:
    """At once, as with their node."""
    newest = {event.worker: event.pid for event in only(WorkerEvent, training.events)}
    for worker in sorted(newest)[:2]:
        os.kill(newest[worker], signal.SIGKILL)


def kill_child(words: tuple[str, ...], training: Training) -> None:
    os.kill(training.child(*words), signal.SIGKILL)


class Fault(NamedTuple):
    """What happens to a training, and what may follow."""

    hit: Callable[[Training], None]
    num_workers: int = 0
    loaders: int = 0
    status: int | None = None  # with which the command ends; None: it trains on
    lost: int = 0  # steps that may be trained again


LOST = SAVE_STEPS
FAULTS = {
    "killed": Fault(kill_everything, status=-signal.SIGKILL, lost=LOST),
    "Ctrl-C": Fault(partial(signal_group, signal.SIGINT), loaders=1, status=130),
    "SIGTERM": Fault(partial(signal_group, signal.SIGTERM), status=143),
    "SIGHUP": Fault(partial(signal_group, signal.SIGHUP), loaders=1, status=129),
    "record process killed": Fault(partial(kill_child, ("ray_yolo.sinks.records",))),
    "two workers, killed": Fault(kill_everything, 2, status=-signal.SIGKILL, lost=LOST),
    "two workers, Ctrl-C": Fault(partial(signal_group, signal.SIGINT), 2, loaders=1, status=130),
    "two workers, SIGTERM": Fault(partial(signal_group, signal.SIGTERM), 2, status=143),
    "a worker of two killed": Fault(partial(signal_worker, signal.SIGKILL), 2),
    "two workers of three killed": Fault(kill_two_workers, 3),
    "a worker of two frozen": Fault(partial(signal_worker, signal.SIGSTOP), 2),
    "a worker of two leaves": Fault(partial(signal_worker, signal.SIGTERM), 2),
}
FAMILIES = ("yolov5n", "yolov8n", "yolo26n")
STORES = ("folder", "bucket")
ROWS = list(product(FAULTS, FAMILIES, STORES))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the run folder of a training without faults of a family."""
    folders: dict[str, Path] = {}

    def train(family: str) -> Path:
        if family not in folders:
            folder = tmp_path_factory.mktemp(family)
            make_dataset(folder / "data")
            training = Training(folder, family, "folder", "--num-workers", "0")
            status, errors = training.end()
            assert status == 0, errors.decode()
            folders[family] = training.run_dir
        return folders[family]

    return train


def check_records(folder: Path, run_dir: Path) -> None:
    """The CSV and MLflow have each epoch once, in one run that has finished."""
    from mlflow.tracking import MlflowClient

    rows = (run_dir / "results.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(EPOCHS))
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    [run] = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "metrics/mAP50")
    assert {point.step for point in history} == set(range(1, EPOCHS + 1))


def check_steps(events: list[Event], fault: Fault) -> None:
    """All steps are there, and no more are done again than the fault may cost."""
    times = Counter(event.step for event in only(StepEvent, events))
    starts = {event.step for event in only(StartEvent, events)}
    missing = set(range(1, EPOCHS * STEPS_OF_EPOCH + 1)) - times.keys()
    assert missing <= starts  # the record of a lost worker's last step may be lost with it
    assert sum(times.values()) - len(times) <= fault.lost


def strike(folder: Path, calm: Path, fault: Fault, family: str, store: str, step: int) -> None:
    """One row of the matrix."""
    make_dataset(folder / "data")
    flags = ["--num-workers", str(fault.num_workers), "--workers", str(fault.loaders)]
    if fault.num_workers > 2:
        flags += ["--cpus-per-worker", "0.5"]  # on two cores
    training = Training(folder, family, store, *flags)
    training.wait_for_step(step)
    fault.hit(training)
    status, errors = training.end() if fault.hit is not kill_everything else (-signal.SIGKILL, b"")
    assert status == (fault.status or 0), errors.decode()
    if fault.status is not None:
        if fault.hit is not kill_everything:
            if fault.status != 129:  # after SIGHUP the terminal is gone, and the killed loaders' tracker says so
                assert errors == b""
            [*_, end] = only(EndEvent, training.events)
            assert (end.status, end.reason) == ("stopped", "interrupted")
        training.run_again()
    run_dir = training.run_dir
    findings = compare_runs(run_dir, calm)
    assert len(findings) >= EPOCHS * STEPS_OF_EPOCH // SAVE_STEPS
    assert not [finding for finding in findings if finding.problem]
    assert max(event.step for event in only(CheckpointEvent, training.events)) == EPOCHS * STEPS_OF_EPOCH
    check_steps(training.events, fault)
    check_records(folder, run_dir)


@pytest.mark.smoke
def test_ctrl_c_at_a_terminal_loses_no_step(calm: Callable[[str], Path], tmp_path: Path) -> None:
    strike(tmp_path, calm("yolov5n"), FAULTS["Ctrl-C"], "yolov5n", "folder", step=5)


@pytest.mark.smoke
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_two_workers_of_three_killed_at_once_lose_no_step(calm: Callable[[str], Path], tmp_path: Path) -> None:
    strike(tmp_path, calm("yolov5n"), FAULTS["two workers of three killed"], "yolov5n", "folder", step=5)


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("number", "row"), list(enumerate(ROWS)), ids=[", ".join(row) for row in ROWS])
def test_the_weights_are_those_of_a_training_without_faults(
        calm: Callable[[str], Path], tmp_path: Path, number: int, row: tuple[str, str, str],
        request: pytest.FixtureRequest) -> None:
    fault, family, store = row
    if store == "bucket":
        request.getfixturevalue("s3")
    strike(tmp_path, calm(family), FAULTS[fault], family, store, step=1 + 5 * number % 10)


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", range(1, 12))
def test_killed_after_any_step(calm: Callable[[str], Path], tmp_path: Path, step: int) -> None:
    strike(tmp_path, calm("yolov5n"), FAULTS["killed"], "yolov5n", "folder", step)


@pytest.mark.faults
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_killed_twice_and_continued_on_other_numbers_of_workers(calm: Callable[[str], Path], tmp_path: Path) -> None:
    make_dataset(tmp_path / "data")
    training = Training(tmp_path, "yolov5n", "folder", "--num-workers", "2")
    training.wait_for_step(5)  # inside the second epoch
    kill(training.process)
    alone = Training(tmp_path, "yolov5n", "folder", "--num-workers", "0")
    alone.wait_for_step(8)
    kill(alone.process)
    training.run_again()
    assert not [finding for finding in compare_runs(training.run_dir, calm("yolov5n")) if finding.problem]
    check_steps(training.events, Fault(kill_everything, lost=2 * SAVE_STEPS))
    check_records(tmp_path, training.run_dir)
