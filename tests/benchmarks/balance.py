"""Two workers of which one has half a core, with and without load balancing.

    python tests/benchmarks/run.py balance

The kernel gives the slow worker half a core, by a control group, for which the benchmark must run as root. Both ways
are trained in turns, `--rounds` times. The last line has the seconds per step of each way, their ratio, and whether
the weights are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch

from ray_yolo.config.placement import Placement
from ray_yolo.core.events import Event, StepEvent
from ray_yolo.engine import balance
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.membership import Activity, Rendezvous
from ray_yolo.engine.session import Session
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.state import capture
from tests.benchmarks.harness import machine
from tests.support.jobs import make_spec
from tests.support.workers import run_workers, wrap_model

SETTLED = 20  # steps until the speeds are known and the shares have changed
PERIOD = 20_000  # microseconds: of each, the slow worker gets half
CGROUP = Path("/sys/fs/cgroup")


@contextmanager
def half_a_core() -> Iterator[None]:
    """This process computes at most half of the time. Of a control group of version 1 or 2."""
    is_first_version = (CGROUP / "cpu").is_dir()
    parent = CGROUP / "cpu" if is_first_version else CGROUP
    group = parent / f"half-{os.getpid()}"
    group.mkdir()
    try:
        if is_first_version:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(PERIOD // 2))
        else:
            (group / "cpu.max").write_text(f"{PERIOD // 2} {PERIOD}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def train(collectives: Collectives, spec: TrainSpec, balanced: bool) -> tuple[list[float], torch.Tensor]:
    """The seconds of each step after the first ones, and all weights."""
    events: list[Event] = []
    context = WorkerContext(prepare_model=lambda model: wrap_model(model, collectives),
                            activity=Activity())
    steps_known = balance.STEPS_KNOWN if balanced else 10**9  # then no speed is ever known
    is_slow = collectives.rank == 1
    with half_a_core() if is_slow else nullcontext(), patch.object(balance, "STEPS_KNOWN", steps_known):
        session = Session(spec, context, Placement(nosave=True), events.append, Rendezvous(collectives))
        session.train()
    weights = capture(session.learner, {})["model"].values()
    seconds = [event.seconds for event in events if isinstance(event, StepEvent)]
    return seconds[SETTLED:], torch.cat([tensor.double().flatten() for tensor in weights])


def main(argv: Sequence[str] | None = None) -> None:
    """Train in turns, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    weights = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for balanced in (False, True):
                run = Path(folder, f"{number}-{balanced}")
                spec = make_spec(run, 96, epochs=10, imgsz=320, batch_size=32, microbatch=2)  # 16 microbatches a step
                [(steps, state), _] = run_workers(2, train, spec, balanced)
                seconds[balanced].append(statistics.median(steps))
                weights.append(state)
                print(f"round {number}, balanced {balanced}: {seconds[balanced][-1]:.3f} s a step", file=sys.stderr)
    ratios = [without / with_ for without, with_ in zip(seconds[False], seconds[True], strict=True)]
    print(json.dumps({"id": "balance", "without": seconds[False], "with": seconds[True],
                      "ratio": round(statistics.median(ratios), 3),
                      "equal": all(torch.equal(weights[0], other) for other in weights[1:]), "machine": machine()}))


if __name__ == "__main__":
    main()
