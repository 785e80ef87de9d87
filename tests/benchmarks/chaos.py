"""A training through random faults: `python tests/benchmarks/run.py chaos --minutes 20`.

Two to four workers on two Ray nodes of this machine. One of them, the driver, the MLflow server or the storage fails at
random moments, and the second node goes and comes. The driver is killed, asked to end by each of the three signals, or
ends with its container: half of the drivers are the child of process 1 of a PID namespace. It must exit within 30 s of
a signal, with the signal's status. If it has ended, the same command is given again. With
`--bucket`, the run is stored in an S3 server behind a relay, which is slow or closed for a while. At the end, training
is stopped, and the same one without faults is trained in one process up to there. The weights must have the same bits
at the end of every epoch, and each epoch one row, in `results.csv` and in MLflow. Needs root and a file system with
`chattr`.

Goodput is the time of training over itself and the time without, as the training's own last line tells it: a driver
that starts again counts from its start.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import ray
from mlflow.tracking import MlflowClient
from ray.cluster_utils import Cluster

from ray_yolo.cli import run
from ray_yolo.config.placement import RunConfig
from ray_yolo.core.events import EpochEvent, StepEvent
from ray_yolo.core.signals import exit_on_sigterm, raise_from_now_on
from ray_yolo.runs.event_log import measure_goodput, read_events
from ray_yolo.runs.working_copy import working_copy_of_run
from ray_yolo.runtime import trainer
from ray_yolo.runtime.workers import worker
from tests.support.faults import PATIENCE, Training, breakable_worker, check, left_over, ray_nodes, uninterrupted_run
from tests.support.object_storage import Relay, s3_server
from tests.support.processes import children
from tests.support.run_log import only
from tests.support.servers import MlflowServer

EXIT_SECONDS = 30.0  # from a signal to the driver's exit
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "sh", "-c", '"$@"; exit $?', "sh")
MENDED_SECONDS = 10.0  # how long storage is full, read-only or slow, and the tracker locked or away
BUCKET = "s3://bucket/chaos"


class Chaos:
    """A training in a process of its own, and everything that can be done to it."""

    def __init__(self, folder: Path, nodes: Cluster, seed: int, bucket: Relay | None) -> None:
        self._folder, self._nodes, self._random, self._bucket = folder, nodes, random.Random(seed), bucket
        self.faults: Counter[str] = Counter()
        self.exits: list[float] = []  # seconds from a signal to the driver's exit
        self._is_contained = False
        self.tracker = MlflowServer(folder)
        self.tracker.wait_until_up()
        storage = {"storage_path": BUCKET} if bucket else {}
        self.training = Training(folder, "2-4", begin=False, max_failures=-1, mlflow_uri=self.tracker.uri, **storage)
        if bucket:
            self.training.run_dir = working_copy_of_run(f"{BUCKET}/runs/train/exp", "runs/train")
        (folder / "config.json").write_text(self.training.config.model_dump_json())
        self._node = nodes.add_node(num_cpus=2)
        self._driver = self._start()

    def close(self) -> None:
        """End its processes."""
        self._kill_the_driver()
        self.tracker.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        self._is_contained = self._random.random() < 0.5
        command = [*(CONTAINER if self._is_contained else ()), sys.executable, "-m", "tests.benchmarks.chaos",
                   str(self._folder), self._nodes.address]
        return subprocess.Popen(command, cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"})

    @property
    def kinds(self) -> dict[str, Callable[[], None]]:
        """The kinds of faults, by name."""
        return {"kill": lambda: self._hit(signal.SIGKILL), "stop": lambda: self._hit(signal.SIGSTOP),
                "leave": lambda: self._hit(signal.SIGTERM), "hang": lambda: self._order("hang"),
                "fail": lambda: self._order("fail"), "full disk": self._fill_the_disk,
                "read-only": self._forbid_writing, "tracker locked": self._lock_the_tracker,
                "tracker killed": self._kill_the_tracker, "driver": self._kill_the_driver,
                "container": self._end_the_container,
                "hangup": lambda: self._interrupt(signal.SIGHUP), "terminate": lambda: self._interrupt(signal.SIGTERM),
                "interrupt": lambda: self._interrupt(signal.SIGINT), "node": self._change_nodes,
                **({"slow bucket": lambda: self._delay(1.0), "no bucket": lambda: self._delay(math.inf)}
                   if self._bucket else {})}

    def go_on(self, minutes: float, mean_seconds: float) -> None:
        """Inject faults at random intervals."""
        end = time.monotonic() + 60 * minutes
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, self._random.expovariate(1 / mean_seconds)))
            kind = self._random.choice(list(self.kinds))
            with contextlib.suppress(IndexError, ProcessLookupError, sqlite3.OperationalError):  # no such target
                self.kinds[kind]()
                self.faults[kind] += 1
                print(f"{time.strftime('%X')} step {self.training.step}: {kind}", file=sys.stderr)
            self._revive()

    def end(self) -> None:
        """Stop the training, when it trains again, and deliver the rest to MLflow."""
        begun = self.training.step
        while self.training.step < begun + 6:
            self._revive()
            time.sleep(0.5)
        self.tracker.wait_until_up()
        self._interrupt(signal.SIGINT)
        subprocess.run([sys.executable, "-m", "ray_yolo.sync", self.training.run_dir, "--mlflow-uri", self.tracker.uri],
                       check=True, stdout=sys.stderr)

    def _revive(self) -> None:
        """Give the same command again, as a user would, if the driver has ended."""
        if self._driver.poll() is not None:
            self._driver = self._start()

    def _worker(self) -> int:
        return self._random.choice([number for number, pid in self.training.pids().items()
                                    if Path(f"/proc/{pid}").exists()])

    def _hit(self, signum: int) -> None:
        self.training.hit(self._worker(), signum)

    def _order(self, kind: str) -> None:
        (self.training.run_dir / f"order-{self._worker()}").write_text(kind)

    def _fill_the_disk(self) -> None:
        full = self.training.run_dir / "full"
        full.touch()
        time.sleep(MENDED_SECONDS)
        full.unlink()

    def _forbid_writing(self) -> None:
        subprocess.run(["chattr", "-R", "+i", self.training.run_dir], stderr=subprocess.DEVNULL)  # files come and go
        try:
            time.sleep(MENDED_SECONDS)
        finally:
            subprocess.run(["chattr", "-R", "-i", self.training.run_dir], check=True)

    def _delay(self, seconds: float) -> None:
        self._bucket.delay = seconds
        time.sleep(MENDED_SECONDS)
        self._bucket.delay = 0.0

    def _kill_the_tracker(self) -> None:
        self.tracker.kill()
        time.sleep(MENDED_SECONDS)
        self.tracker.start()

    def _lock_the_tracker(self) -> None:
        there = f"file:{self._folder}/mlflow.db?mode=rw"
        with contextlib.closing(sqlite3.connect(there, uri=True, isolation_level=None)) as store:
            store.execute("BEGIN EXCLUSIVE")
            time.sleep(MENDED_SECONDS)
            store.execute("ROLLBACK")

    def _driver_pid(self) -> int:
        """The driver, not the container around it."""
        if self._driver.poll() is not None:
            raise ProcessLookupError
        if not self._is_contained:
            return self._driver.pid
        return children(self._first_of_namespace())[0]

    def _first_of_namespace(self) -> int:
        return children(self._driver.pid)[0]

    def _kill_the_driver(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._driver_pid(), signal.SIGKILL)
        self._driver.wait(PATIENCE)

    def _end_the_container(self) -> None:
        """Kill process 1 of the driver's namespace, and with it everything that the driver has started."""
        if not self._is_contained or self._driver.poll() is not None:
            raise ProcessLookupError
        os.kill(self._first_of_namespace(), signal.SIGKILL)
        self._driver.wait(PATIENCE)

    def _interrupt(self, number: signal.Signals) -> None:
        """Ask the driver to end; it must be gone in time, with the signal's status."""
        os.kill(self._driver_pid(), number)
        begun = time.monotonic()
        try:
            status = self._driver.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.kill(self._driver_pid(), signal.SIGUSR1)  # its stacks
            status = self._driver.wait(PATIENCE)
        self.exits.append(time.monotonic() - begun)
        assert self.exits[-1] < EXIT_SECONDS, f"{number.name}: {self.exits[-1]:.1f} s"
        assert status == 128 + number, f"{number.name}: status {status}"

    def _change_nodes(self) -> None:
        if self._node:
            self._nodes.remove_node(self._node, allow_graceful=self._random.random() < 0.5)
        self._node = None if self._node else self._nodes.add_node(num_cpus=2)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for it."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def bucket_of(folder: Path, wanted: bool) -> Iterator[Relay | None]:
    """A relay to a bucket in whose environment the cluster starts; None if the run is stored in a folder."""
    with contextlib.ExitStack() as stack:
        relay = None
        if wanted:
            environment = stack.enter_context(s3_server())
            relay = stack.enter_context(Relay(environment["AWS_ENDPOINT_URL"]))
            os.environ.update({**environment, "AWS_ENDPOINT_URL": relay.url, "RAY_YOLO_CACHE": str(folder / "cache")})
        yield relay


def tracked_epochs(folder: Path) -> list[int]:
    """The epochs of the one MLflow run, in order."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    [run] = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return sorted(point.step for point in client.get_metric_history(run.info.run_id, "train/box_loss"))


def drive(folder: Path, address: str) -> None:
    """The driver's process: start or continue the training."""
    faulthandler.register(signal.SIGUSR1)
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    worker.pool_worker = breakable_worker
    config = RunConfig.model_validate_json((folder / "config.json").read_text())

    def train() -> int:
        raise_from_now_on()
        ray.init(address=address, log_to_driver=False)
        signal.signal(signal.SIGTERM, exit_on_sigterm)  # Ray's core has set a handler that aborts
        trainer.fit(config, quiet=True)
        return 0

    sys.exit(run(train))


def main(argv: list[str]) -> None:
    """Run the benchmark and print its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--mean", type=float, default=30.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bucket", action="store_true", help="store the run in a bucket")
    given = parser.parse_args(argv)
    with (scratch() as folder, bucket_of(folder, given.bucket) as bucket, ray_nodes(2) as nodes,
          contextlib.closing(Chaos(folder, nodes, given.seed, bucket)) as chaos):
        chaos.training.wait(lambda _: chaos.training.step >= 3)
        chaos.go_on(given.minutes, given.mean)
        chaos.end()
        events = read_events(chaos.training.run_dir / "events.jsonl")
        epochs = Counter(event.epoch for event in only(EpochEvent, events))
        rows = (chaos.training.run_dir / "results.csv").read_text().splitlines()[1:]
        assert [int(row.split(",")[0]) for row in rows] == list(range(len(rows))) == sorted(epochs)
        assert tracked_epochs(folder) == list(range(len(rows)))
        check(chaos.training, uninterrupted_run(folder / "calm", max(event.step for event in only(StepEvent, events))))
        cost = measure_goodput(events)
        print(json.dumps({"benchmark": "chaos", "minutes": given.minutes, "faults": dict(chaos.faults),
                          "steps": chaos.training.step, "restarts": cost.restarts, "regroupings": cost.regroupings,
                          "steps_repeated": cost.steps_repeated,
                          "longest_exit_seconds": round(max(chaos.exits), 1),
                          "idle_seconds": round(cost.idle_seconds, 1),
                          "goodput": round(cost.goodput, 3), "bits": "equal", "left_over": left_over()}))


if __name__ == "__main__":
    drive(Path(sys.argv[1]), sys.argv[2])
