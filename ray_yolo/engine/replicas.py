"""The replicas of a model and what they say to each other: the only file that knows torch.distributed.

(Annotations are not deferred here: DDP inspects those of a communication hook.)

Whoever holds a `Replicas` speaks of workers as plain integers; with one worker nothing here communicates.
Every method marked collective must be called by all workers in the same order.
"""

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_yolo.ops.sharing import Node, aligned_nodes, parent, share


class _GlobalSum(torch.autograd.Function):
    """y = sum over workers of x. Each worker's loss depends on every x, so the gradient is summed as well."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


@dataclass(frozen=True)
class Replicas:
    """This worker's number and how many there are."""

    worker: int = 0
    num_workers: int = 1

    def global_sum(self, x: Tensor) -> Tensor:
        """Sum of `x` over the workers, differentiable. Collective."""
        return x if self.num_workers == 1 else _GlobalSum.apply(x)

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """All workers' rows in worker order, (sum of counts, d). Collective.

        Args:
            rows: (counts[worker], d); `counts` is known to everyone, so no sizes travel.
        """
        if self.num_workers == 1:
            return rows
        padded = rows.new_zeros(max(counts), rows.shape[1])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def gather(self, rows: Tensor) -> Tensor:
        """All workers' rows in worker order when nobody knows how many the others have. Collective."""
        if self.num_workers == 1:
            return rows
        counts = self.gather_rows(torch.tensor([[len(rows)]], device=rows.device), [1] * self.num_workers)
        return self.gather_rows(rows, counts.flatten().tolist())

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether any worker raised the flag. Collective."""
        return bool(self.gather(torch.tensor([[float(flag)]], device=device)).sum() > 0)


class GradientSum(Protocol):
    """Forms a step's gradient, the sum over all its microbatches, in every worker's `.grad`."""

    def microbatch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context of one forward and backward; `last` marks the worker's last of the step."""

    def collect(self, number: int) -> None:
        """Called after each backward with the microbatch's number within the step."""

    def finish(self, num_microbatches: int) -> None:
        """Called once per step, by every worker."""


class ReducedSum:
    """DDP reduces while the worker's last microbatch runs backward; the earlier ones accumulate locally."""

    def __init__(self, replica: nn.Module) -> None:
        self.replica = replica
        if isinstance(replica, DistributedDataParallel):
            replica.register_comm_hook(None, _sum_hook)

    def microbatch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        if last or not isinstance(self.replica, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.replica.no_sync()

    def collect(self, number: int) -> None:
        """Nothing to do: `.grad` accumulates."""

    def finish(self, num_microbatches: int) -> None:
        """Nothing to do: the last backward has reduced."""


def _sum_hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """All-reduce the sum. DDP's own hook averages, and a loss multiplied by the worker count to make up for it
    would let fp16 overflow depend on that count."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


class TreeSum:
    """Sums microbatch gradients in a fixed binary tree over their numbers: the same bits for any worker count.

    Each worker folds its own microbatches into aligned subtrees; those are exchanged, and everybody finishes the
    tree in the same way. A floating-point sum that is cut differently rounds differently; this one is never cut
    differently.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], replicas: Replicas) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.replicas = replicas
        self._nodes: list[tuple[Node, Tensor]] = []

    def microbatch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def collect(self, number: int) -> None:
        """Move `.grad` into the tree."""
        node, value = Node(number, 1), self._take()
        while self._nodes and (above := parent(self._nodes[-1][0], node)):
            node, value = above, self._nodes.pop()[1].add_(value)
        self._nodes.append((node, value))

    def finish(self, num_microbatches: int) -> None:
        workers = self.replicas.num_workers
        parts = [list(aligned_nodes(share(num_microbatches, worker, workers))) for worker in range(workers)]
        assert [node for node, _ in self._nodes] == parts[self.replicas.worker]
        template = torch.empty(sum(p.numel() for p in self.parameters), device=self.parameters[0].device)
        rows = torch.stack([value for _, value in self._nodes]) if self._nodes else template[None][:0]
        gathered = self.replicas.gather_rows(rows, [len(part) for part in parts])
        values = dict(zip((node for part in parts for node in part), gathered.unbind(), strict=True))
        self._give(_fold(Node(0, 1 << (num_microbatches - 1).bit_length()), values, num_microbatches))
        self._nodes = []

    def _take(self) -> Tensor:
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in self.parameters])
        for p in self.parameters:
            p.grad = None
        return flat

    def _give(self, flat: Tensor) -> None:
        for p, part in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            p.grad = part.view_as(p)


def _fold(node: Node, values: dict[Node, Tensor], count: int) -> Tensor:
    """Value of a node of the tree over `count` microbatches, from the subtrees that were exchanged."""
    if node in values:
        return values[node]
    half = node.size // 2
    left = _fold(Node(node.start, half), values, count)
    if node.start + half >= count:
        return left
    return left + _fold(Node(node.start + half, half), values, count)


def bare(replica: nn.Module) -> nn.Module:
    """The model inside DDP's wrapper."""
    return replica.module if isinstance(replica, DistributedDataParallel) else replica


def ddp_options() -> dict[str, bool]:
    """How DDP must wrap a model: it must not overwrite the other workers' BatchNorm buffers (the loop combines the
    statistics itself), and gradients live in its buckets."""
    newer = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if newer else "broadcast_buffers": False, "gradient_as_bucket_view": True}
