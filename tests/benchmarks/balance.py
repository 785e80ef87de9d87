"""Two workers of which one has half the speed, with and without load balancing.

    python tests/benchmarks/run.py balance

The slow worker sleeps after each forward pass as long as forward and backward take. Both ways are trained in turns,
`--rounds` times. The last line has the seconds per step of each way, their ratio, and whether the weights are equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ray_yolo.config.placement import Placement
from ray_yolo.core.events import Event, StepEvent
from ray_yolo.engine import balance, loop
from ray_yolo.engine.build import TrainSpec, WorkerContext
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.membership import Activity, Rendezvous
from ray_yolo.engine.session import Session
from ray_yolo.engine.state import capture
from tests.benchmarks.harness import machine
from tests.support.jobs import make_spec
from tests.support.workers import run_workers, wrap_model

SETTLED = 20  # steps until the speeds are known and the shares have changed


def train(collectives: Collectives, spec: TrainSpec, balanced: bool) -> tuple[list[float], torch.Tensor]:
    """The seconds of each step after the first ones, and all weights."""
    events: list[Event] = []
    context = WorkerContext(collectives=collectives, prepare_model=lambda model: wrap_model(model, collectives),
                            activity=Activity())
    compute, is_slow = loop.forward, collectives.worker == 1

    def slow_forward(*arguments: Any) -> Any:
        began = time.perf_counter()
        loss = compute(*arguments)
        if is_slow:
            time.sleep(3 * (time.perf_counter() - began))  # a backward pass takes twice as long as the forward pass
        return loss

    steps_known = balance.STEPS_KNOWN if balanced else 10**9  # then no speed is ever known
    with patch.object(loop, "forward", slow_forward), patch.object(balance, "STEPS_KNOWN", steps_known):
        session = Session(spec, context, Placement(nosave=True), events.append, Rendezvous(collectives))
        session.train(lambda: False)
    weights = capture(session.components, session.state, {})["model"].values()
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
                spec = make_spec(run, 96, epochs=10, imgsz=320, batch_size=32, microbatch=4)  # 8 microbatches a step
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
