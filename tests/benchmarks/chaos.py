"""A training through random faults: `python tests/benchmarks/run.py chaos --minutes 20`.

Two to four workers on two Ray nodes of this machine; one of them, the driver, the tracker or the disk breaks at random
moments, and the second node goes and comes. When the driver was killed, the same command is given again. At its end the
training is stopped, and the same one without faults is trained in one process up to there: the weights have to have the
same bits at every epoch's end, and each epoch one row.

Goodput is the time of training over itself and the time without, as the training's own last line tells it: a driver
that starts again counts from its start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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
from ray.cluster_utils import Cluster

from ray_yolo.config.placement import RunConfig
from ray_yolo.core.events import EpochEvent, StepEvent
from ray_yolo.runs.event_log import measure_goodput, read_events
from ray_yolo.runtime import trainer
from ray_yolo.runtime.workers import worker
from tests.support.faults import Training, breakable_worker, check, left_over, ray_nodes, uninterrupted_run
from tests.support.run_log import only

MENDED_SECONDS = 10.0  # how long the disk is full, and the tracker locked


class Chaos:
    """A training in a process of its own, and everything that can be done to it."""

    def __init__(self, folder: Path, nodes: Cluster, seed: int) -> None:
        self._folder, self._nodes, self._random = folder, nodes, random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.training = Training(folder, "2-4", begin=False, max_failures=-1,
                                 mlflow_uri=f"sqlite:///{folder}/mlflow.db")
        (folder / "config.json").write_text(self.training.config.model_dump_json())
        self._node = nodes.add_node(num_cpus=2)
        self._driver = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.benchmarks.chaos", str(self._folder), self._nodes.address]
        return subprocess.Popen(command, cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"})

    @property
    def kinds(self) -> dict[str, Callable[[], None]]:
        """The kinds of faults, by name."""
        return {"kill": lambda: self._hit(signal.SIGKILL), "stop": lambda: self._hit(signal.SIGSTOP),
                "leave": lambda: self._hit(signal.SIGTERM), "hang": lambda: self._order("hang"),
                "fail": lambda: self._order("fail"), "full disk": self._fill_the_disk,
                "tracker": self._lock_the_tracker, "driver": self._kill_the_driver, "node": self._change_nodes}

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
        """Stop the training, when it trains again."""
        self._revive()
        begun = self.training.step
        self.training.wait(lambda events: self.training.step >= begun + 6)
        self._driver.send_signal(signal.SIGINT)
        self._driver.wait(120)

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

    def _lock_the_tracker(self) -> None:
        there = f"file:{self._folder}/mlflow.db?mode=rw"
        with contextlib.closing(sqlite3.connect(there, uri=True, isolation_level=None)) as store:
            store.execute("BEGIN EXCLUSIVE")
            time.sleep(MENDED_SECONDS)
            store.execute("ROLLBACK")

    def _kill_the_driver(self) -> None:
        self._driver.kill()
        self._driver.wait()

    def _change_nodes(self) -> None:
        if self._node:
            self._nodes.remove_node(self._node, allow_graceful=self._random.random() < 0.5)
        self._node = None if self._node else self._nodes.add_node(num_cpus=2)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for it."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        yield Path(folder)


def drive(folder: Path, address: str) -> None:
    """The driver's process: start or continue the training."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    worker.train_on_pool_worker = breakable_worker
    ray.init(address=address, log_to_driver=False)
    with contextlib.suppress(KeyboardInterrupt):
        trainer.fit(RunConfig.model_validate_json((folder / "config.json").read_text()), quiet=True)


def main(argv: list[str]) -> None:
    """Run the benchmark and print its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--mean", type=float, default=30.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    with scratch() as folder, ray_nodes(2) as nodes:
        chaos = Chaos(folder, nodes, given.seed)
        chaos.training.wait(lambda _: chaos.training.step >= 3)
        chaos.go_on(given.minutes, given.mean)
        chaos.end()
        events = read_events(chaos.training.run_dir / "events.jsonl")
        epochs = Counter(event.epoch for event in only(EpochEvent, events))
        rows = (chaos.training.run_dir / "results.csv").read_text().splitlines()[1:]
        assert [int(row.split(",")[0]) for row in rows] == list(range(len(rows))) == sorted(epochs)
        check(chaos.training, uninterrupted_run(folder / "calm", max(event.step for event in only(StepEvent, events))))
        cost = measure_goodput(events)
        print(json.dumps({"benchmark": "chaos", "minutes": given.minutes, "faults": dict(chaos.faults),
                          "steps": chaos.training.step, "restarts": cost.restarts, "regroupings": cost.regroupings,
                          "steps_repeated": cost.steps_repeated, "idle_seconds": round(cost.idle_seconds, 1),
                          "goodput": round(cost.goodput, 3), "bits": "equal", "left_over": left_over()}))


if __name__ == "__main__":
    drive(Path(sys.argv[1]), sys.argv[2])
