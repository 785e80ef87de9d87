"""Workers as plain processes that communicate over gloo: all that the engine needs, without Ray."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ray_yolo.core.structures import Orders
from ray_yolo.engine.collectives import LOOPBACK, Collectives, ddp_options, leave_process_group, use_interface
from ray_yolo.engine.membership import Rendezvous

# Importing torch takes seconds; the fork server does it once for all worker processes
multiprocessing.set_forkserver_preload(["ray_yolo.engine.session"])


def run_workers(num_workers: int, function: Callable[..., Any], *args: object) -> list[Any]:
    """Results of `function(collectives, *args)` on every worker, in worker order.

    A single worker runs in this process. Results are returned as files: tensors and plain containers alone.
    """
    if num_workers == 1:
        return [function(Collectives(), *args)]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_work, (num_workers, folder, function, args), nprocs=num_workers, start_method="forkserver")
        return [torch.load(Path(folder) / f"{worker}.pt", weights_only=True) for worker in range(num_workers)]


def wrap_model(model: nn.Module, collectives: Collectives) -> nn.Module:
    """The model as Ray's prepare_model wraps it on CPUs with the package's options."""
    return DistributedDataParallel(model, **ddp_options()) if collectives.num_workers > 1 else model


class Ordered(Rendezvous):
    """A permanent group whose worker gets the orders that a function returns, which is called in each step."""

    def __init__(self, collectives: Collectives, give_orders: Callable[[], Orders]) -> None:
        super().__init__(collectives)
        self._give_orders = give_orders

    @property
    def orders(self) -> Orders:
        return self._give_orders()


def _work(worker: int, num_workers: int, folder: str, function: Callable[..., Any], args: tuple) -> None:
    use_interface(LOOPBACK)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=worker, world_size=num_workers)
    try:
        torch.save(function(Collectives(worker, num_workers), *args), Path(folder) / f"{worker}.pt")
    finally:
        leave_process_group()
