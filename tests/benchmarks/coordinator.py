"""The cost of membership per step: a heartbeat once a second, sent by a thread of the worker.

    python tests/benchmarks/run.py coordinator [--rounds 20] [--steps 4]

The same steps of one process, with the thread and without it (`alone`), in turns. The coordinator is a separate
process, as in a training. CPU seconds are those of the worker's process with all its threads.
"""

from __future__ import annotations

import argparse
import time

import ray

from ray_yolo.core.system import keep_freed_memory
from ray_yolo.engine import loop
from ray_yolo.runtime import cluster
from ray_yolo.runtime.workers.client import JobClient
from ray_yolo.runtime.workers.rendezvous import RendezvousClient
from ray_yolo.runtime.workers.watchdog import start_queue
from tests.benchmarks.contestant import timed
from tests.benchmarks.harness import report, take_turns
from tests.benchmarks.step import draw, parts_of


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py coordinator")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    given = parser.parse_args(argv)
    keep_freed_memory()
    case = argparse.Namespace(model="yolov5n", imgsz=320, batch=16, microbatch=16, threads=1, precision="fp32")
    (learner, team), drawn = parts_of(case), draw(case)
    context = team.context
    batch = {"images": drawn["images"], "targets": drawn["targets"]}
    step = learner.plan.steps(0)[0]
    cluster.own_token()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

    def train() -> None:
        for number in range(given.steps):
            began = time.perf_counter()
            summed = loop.sum_microbatches(learner, team, step, iter([batch]), number, loop.Orders)
            loop.finish_step(learner, team, loop.update_weights(learner, team, summed, learner.plan.rates(step, 0)))
            context.activity.finished(number, time.perf_counter() - began)

    coordinator = JobClient(start_queue(), "job", 1)
    coordinator.present()

    def train_listed() -> dict[str, float]:
        members = RendezvousClient(coordinator, 0, context.activity, context.device, 60.0, print,
                                lambda: False, lambda: False, alone=True)
        members.join(None)
        try:
            return timed(train)
        finally:
            members.close()

    report("coordinator", take_turns({"ours": train_listed, "alone": lambda: timed(train)}, given.rounds))
    ray.shutdown()
