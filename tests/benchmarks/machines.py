"""The exchange of gradients over a slow network: between all workers at once, and inside each machine first.

    sudo python tests/benchmarks/run.py machines [--rate 200mbit 1gbit] [--workers 2 4] [--megabytes 29]

Two network namespaces of this machine stand for two machines. The link between them has a limited rate. Both ways take
turns in the same processes, over gloo, one step of one microbatch a worker; their sums are equal, bit for bit. For each
rate and number of workers per machine, one JSON line: median seconds of a step, and what one machine sends in units of
the gradient's size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_yolo.engine.collectives import Collectives, ddp_options, form_node_groups
from ray_yolo.engine.gradients import GradientTree
from tests.benchmarks.harness import machine

MACHINES = {"ry-a": "10.78.0.1", "ry-b": "10.78.0.2"}  # namespace and address
PORT = 29511
ROUNDS = 7
LAYERS = 20


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py machines")
    parser.add_argument("--rate", nargs="*", default=["200mbit", "1gbit"])
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4], help="per machine")
    parser.add_argument("--megabytes", type=float, default=29.0, help="of the gradient; 29: yolov5s")
    parser.add_argument("--as-worker", type=int, nargs=2, metavar=("NUMBER", "PER_MACHINE"), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.as_worker:
        work(*given.as_worker, given.megabytes)
        return
    for rate in given.rate:
        with network(rate):
            for per_machine in given.workers:
                measured = run(per_machine, given.megabytes)
                print(json.dumps({"id": "machines", "rate": rate, "workers_per_machine": per_machine, **measured,
                                  "machine": machine()}), flush=True)


@contextmanager
def network(rate: str) -> Iterator[None]:
    """Two namespaces that are connected by a link of this rate."""
    here, there = MACHINES
    try:
        for name in MACHINES:
            command("ip", "netns", "add", name)
        command("ip", "link", "add", "veth0", "netns", here, "type", "veth", "peer", "name", "veth0", "netns", there)
        for name, address in MACHINES.items():
            inside = ("ip", "netns", "exec", name)
            command(*inside, "ip", "link", "set", "lo", "up")
            command(*inside, "ip", "addr", "add", f"{address}/24", "dev", "veth0")
            command(*inside, "ip", "link", "set", "veth0", "up")
            command(*inside, "tc", "qdisc", "add", "dev", "veth0", "root", "tbf", "rate", rate, "burst", "256kb",
                    "latency", "50ms")
        yield
    finally:
        for name in MACHINES:
            subprocess.run(["ip", "netns", "del", name], check=False)


def command(*words: str) -> None:
    subprocess.run(words, check=True)


def run(per_machine: int, megabytes: float) -> dict[str, object]:
    """The measurements of worker 0."""
    with tempfile.TemporaryFile("w+") as output:
        processes = []
        for number in range(2 * per_machine):
            namespace = list(MACHINES)[number // per_machine]
            processes.append(subprocess.Popen(
                ["ip", "netns", "exec", namespace, sys.executable, "tests/benchmarks/run.py", "machines",
                 "--megabytes", str(megabytes), "--as-worker", str(number), str(per_machine)],
                stdout=output if number == 0 else subprocess.DEVNULL,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "veth0"}))
        statuses = [process.wait() for process in processes]  # all, before any of them counts
        if any(statuses):
            raise SystemExit("a worker has failed")
        output.seek(0)
        measured: dict[str, object] = json.loads(output.read())
        return measured


class Weights(nn.Module):
    """As many numbers as asked for, in layers of equal size."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        size = int(megabytes * 1e6 / 4 / LAYERS)
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(size)) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(layer * x).sum() for layer in self.layers]).sum()


class Way:
    """A replica whose gradients are summed one way."""

    def __init__(self, collectives: Collectives, megabytes: float) -> None:
        torch.manual_seed(0)
        self.collectives = collectives
        self.model = Weights(megabytes)
        self.replica = DistributedDataParallel(self.model, **ddp_options())
        self.tree = GradientTree(self.replica, collectives, 4)

    def step(self) -> None:
        self.tree.start([1] * self.collectives.num_workers)
        with self.tree.microbatch(last=True):
            loss = self.replica(torch.tensor(self.collectives.rank + 1.0))
            self.tree.attach_row(torch.ones(4))
            loss.backward()
        self.tree.finish()


def work(number: int, per_machine: int, megabytes: float) -> None:
    """One worker. Worker 0 prints what it has measured."""
    torch.set_num_threads(1)
    num_workers = 2 * per_machine
    address = next(iter(MACHINES.values()))
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=number, world_size=num_workers,
                            timeout=timedelta(seconds=120))
    nodes = [str(worker // per_machine) for worker in range(num_workers)]
    groups = form_node_groups(nodes, number, timedelta(seconds=60))
    ways = {"at once": Way(Collectives(number, num_workers), megabytes),
            "inside first": Way(Collectives(number, num_workers, groups), megabytes)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    sent: dict[str, float] = {}
    for _ in range(1 + ROUNDS):  # DDP arranges its buckets after the first step
        for name, way in ways.items():
            dist.barrier()
            before, began = bytes_sent(), time.perf_counter()
            way.step()
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
            sent[name] = round((bytes_sent() - before) / 1e6 / megabytes, 2)
    one, other = (list(way.model.parameters()) for way in ways.values())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(one, other, strict=True)
               if a.grad is not None and b.grad is not None)
    if number == 0:
        medians = {name: round(statistics.median(each[1:]), 3) for name, each in seconds.items()}
        print(json.dumps({"seconds": medians, "sent": sent}))
    dist.destroy_process_group()


def bytes_sent() -> int:
    """By this machine's interface."""
    return int(Path("/sys/class/net/veth0/statistics/tx_bytes").read_text())
