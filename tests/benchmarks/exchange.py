"""What the sum of gradients over workers costs: bytes sent, and a step's time against DDP's own all-reduce.

    python tests/benchmarks/run.py exchange [--model yolov5n] [--imgsz 320] [--rounds 10]

Bytes are counted where they leave: what of each collective's input is not the worker's own part. A ring's all-reduce
sends 2 (W - 1) / W of the parameters. Steps alternate between the two ways in one run on two workers of one thread
each, of two microbatches of 4 images; seconds are the median over rounds, of the clock and of the processor (which
counts its threads, gloo's too). Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_yolo.engine.collectives import Collectives, ddp_options
from ray_yolo.engine.gradients import GradientTree
from ray_yolo.models.batch_norm import Statistics
from ray_yolo.models.families import build_model
from tests.support.workers import run_workers

IMAGES, MICROBATCHES = 4, 2  # images of a microbatch, microbatches of a worker's step


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py exchange")
    parser.add_argument("--model", default="yolov5n")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4, 16], help="where bytes are counted")
    given = parser.parse_args(argv)
    sent = {}
    for workers in given.workers:
        counted = [result.item() for result in run_workers(workers, bytes_sent, given.model)]
        size = 4 * sum(p.numel() for p in build_model(given.model, 80).parameters() if p.requires_grad)
        sent[workers] = {"most": max(counted), "of_the_parameters": round(max(counted) / size, 4),
                         "ring": 2 * (workers - 1) / workers}
    both = run_workers(2, step_seconds, given.model, given.imgsz, given.rounds)[0]
    ratios = {clock: statistics.median(tree / plain for tree, plain in both[clock].tolist()) for clock in both}
    medians = {clock: both[clock].median(0).values.tolist() for clock in both}
    print(json.dumps({"id": f"exchange {given.model}", "sent": sent, "ratio": ratios, "tree_and_plain": medians,
                      "rounds": {clock: both[clock].tolist() for clock in both},
                      "env": {"cpus": os.cpu_count(), "imgsz": given.imgsz, "load": os.getloadavg()[0]}}))


class Ways:
    """The same model summed in the tree, and by plain DDP, which reduces in each worker's last backward as well."""

    def __init__(self, collectives: Collectives, model: str) -> None:
        torch.set_num_threads(1)
        self.collectives = collectives
        self.model, other = (self._model(model) for _ in range(2))
        self.statistics = Statistics(self.model)
        self.replica = DistributedDataParallel(self.model, **ddp_options())
        self.tree = GradientTree(self.replica, collectives, self.statistics.size)
        self.plain = DistributedDataParallel(other, **ddp_options())
        Statistics(other)

    def _model(self, name: str) -> nn.Module:
        torch.manual_seed(0)
        return build_model(name, 80).to(memory_format=torch.channels_last).train()

    def by_tree(self, images: Tensor) -> None:
        self.tree.start([MICROBATCHES] * self.collectives.num_workers)
        for number in range(MICROBATCHES):
            last = number == MICROBATCHES - 1
            with self.tree.microbatch(last=last):
                total = loss(self.replica(images))
                self.tree.attach_row(self.statistics.recorded(0))
                total.backward()
        self.tree.finish()
        self.replica.zero_grad(set_to_none=True)

    def by_all_reduce(self, images: Tensor) -> None:
        for _ in range(MICROBATCHES - 1):
            with self.plain.no_sync():
                loss(self.plain(images)).backward()
        loss(self.plain(images)).backward()
        self.plain.zero_grad(set_to_none=True)


def loss(levels: tuple[Tensor, ...]) -> Tensor:
    return sum((level.float().square().mean() for level in levels), start=torch.zeros(()))


def blank(imgsz: int) -> Tensor:
    return torch.rand(IMAGES, 3, imgsz, imgsz).contiguous(memory_format=torch.channels_last)


def bytes_sent(collectives: Collectives, model: str) -> Tensor:
    """Bytes that leave this worker in its second step, when DDP has its final buckets."""
    ways, sent, images = Ways(collectives, model), [0], blank(64)[:1]
    ways.by_tree(images)
    with pytest.MonkeyPatch.context() as patch:
        for name, argument in (("all_to_all_single", 1), ("all_gather_into_tensor", 0)):
            patch.setattr(dist, name, counting(getattr(dist, name), sent, collectives.num_workers, argument))
        ways.by_tree(images)
    return torch.tensor(sent[0])


def counting(collective: Callable[..., Any], sent: list[int], workers: int, argument: int) -> Callable[..., Any]:
    """The collective, which adds up what all but the worker's own part of a tensor holds."""
    def call(*args: Any, **options: Any) -> Any:
        sent[0] += args[argument].nbytes * (workers - 1) // workers
        return collective(*args, **options)
    return call


def step_seconds(collectives: Collectives, model: str, imgsz: int, rounds: int) -> dict[str, Tensor]:
    """(rounds, 2) seconds of a step by the tree and by all-reduce, alternating, by the clock and of the processor."""
    ways, images = Ways(collectives, model), blank(imgsz)
    found: dict[str, list[list[float]]] = {"wall": [], "cpu": []}
    for number in range(rounds + 2):
        seconds: dict[str, list[float]] = {"wall": [], "cpu": []}
        for step in (ways.by_tree, ways.by_all_reduce)[:: 1 if number % 2 else -1]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step(images)
            dist.barrier()
            seconds["wall"].append(time.perf_counter() - wall)
            seconds["cpu"].append(time.process_time() - cpu)
        if number >= 2:  # kernels are chosen and buckets rebuilt in the first ones
            for clock, pair in seconds.items():
                found[clock].append(pair[:: 1 if number % 2 else -1])
    return {clock: torch.tensor(pairs) for clock, pairs in found.items()}
