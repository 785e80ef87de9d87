"""The gradient of a step: the sum over its microbatches in a fixed binary tree, whoever computes them.

(Annotations are not deferred here: DDP inspects those of a communication hook.)

A floating-point sum that is cut differently rounds differently; this one is never cut differently, so any number of
workers ends with the same bits. Each worker folds its own microbatches into aligned subtrees, as `.grad` is taken after
each backward that ran without DDP's reduction. The last backward reduces: DDP's hook is handed bucket after bucket of
that microbatch's gradient alone, adds the worker's subtrees, and exchanges the bucket while backward goes on:

    all-to-all     chunk c of all subtrees goes to worker c
    fold           worker c finishes the tree over its chunk
    all-gather     the sums come back

which moves as many bytes as a ring's all-reduce, about twice the parameters for each worker however many there are
(times the subtrees that a worker holds, where its share of the microbatches is not aligned).
"""

import contextlib
import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_yolo.engine.collectives import Collectives
from ray_yolo.ops import torch_internals
from ray_yolo.ops.sharding import TreeNode, aligned_nodes, parent

Value = list[Tensor]
"""What a node of the tree holds: the gradient of each parameter, and the row that rides along."""


class GradientTree:
    """Forms the sum of a step's gradients in every worker's `.grad`, and of a row of numbers beside them.

    Args:
        replica: the model, wrapped by DDP where there are several workers; its hook is taken.
        row_size: length of the row that each microbatch has.
    """

    def __init__(self, replica: nn.Module, collectives: Collectives, row_size: int) -> None:
        self._replica, self._collectives = replica, collectives
        self._parameters = [p for p in replica.parameters() if p.requires_grad]
        self._index = {id(p): number for number, p in enumerate(self._parameters)}
        self._row = self._parameters[0].new_zeros(row_size)
        self._nodes: list[tuple[TreeNode, Value]] = []  # this worker's subtrees, from left to right
        self._parts: list[range] = []  # each worker's leaves
        self._leaf: TreeNode | None = None  # whose gradient DDP reduces
        self._exchanges: list[_Exchange] = []  # of this step's buckets, in order
        if isinstance(replica, DistributedDataParallel):
            replica.register_comm_hook(self, _reduce)

    def start(self, counts: Sequence[int]) -> None:
        """Begin a step of which worker w holds the next `counts[w]` leaves."""
        self._parts = [range(*pair) for pair in itertools.pairwise(itertools.accumulate(counts, initial=0))]
        self._nodes, self._leaf, self._exchanges = [], None, []
        self._next = self._parts[self._collectives.worker].start

    def microbatch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context of one forward and backward; `last` marks the worker's last of the step."""
        if last or not isinstance(self._replica, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._replica.no_sync()

    def backward(self, loss: Tensor, row: Tensor, *, last: bool) -> None:
        """The backward pass of the worker's next leaf. Collective if it is the worker's last."""
        node, self._next = TreeNode(self._next, 1), self._next + 1
        if last and isinstance(self._replica, DistributedDataParallel):
            self._leaf, self._row = node, row
            loss.backward()
            return
        loss.backward()
        value = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None
        self._push(node, [*value, row])

    def backward_of_nothing(self, loss: Tensor) -> None:
        """For a worker without a leaf: DDP's reduction needs every worker's backward. Collective."""
        loss.backward()

    def finish(self) -> Tensor:
        """The sum of all rows; the gradients' is in `.grad`. Called once per step by every worker."""
        if self._exchanges:
            row = self._exchanges[-1].behind[: len(self._row)]
        else:
            *gradients, row = _fold(_root(self._parts[-1].stop), dict(self._nodes), self._parts[-1].stop)
            for p, gradient in zip(self._parameters, gradients, strict=True):
                p.grad = gradient
        self._nodes, self._exchanges = [], []  # as large as the gradient, several times
        return row

    def close(self) -> None:
        """Let go of the model: DDP holds its hook where the garbage collector does not look, and the hook the model."""
        vars(self).clear()

    def _push(self, node: TreeNode, value: Value) -> None:
        """Add a leaf to the right of the subtrees, folding those that become whole."""
        while self._nodes and (above := parent(self._nodes[-1][0], node)):
            left = self._nodes.pop()[1]
            torch_internals.add_(left, value)
            node, value = above, left
        self._nodes.append((node, value))

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Have a bucket summed over the tree; the hook of DDP."""
        self._advance()
        here = bucket.buffer().device
        future = torch.futures.Future[Tensor](devices=[here] if here.type == "cuda" else None)
        self._exchanges.append(_Exchange(self._rows(bucket), bucket.buffer().numel(), self._parts, future))
        if bucket.is_last():
            self._advance()
            for exchange in self._exchanges:
                exchange.finish()
        return future

    def _advance(self) -> None:
        """The second half of the bucket before: issued by the hook, hence in the same order on every worker."""
        if self._exchanges:
            self._exchanges[-1].fold()

    def _rows(self, bucket: dist.GradBucket) -> Tensor:
        """This worker's subtrees of a bucket, (nodes, length); the last bucket's with the rows that ride along."""
        last = bucket.is_last()
        own = [self._index[id(p)] for p in bucket.parameters()] + [-1] * last
        shapes = [*bucket.parameters(), *[self._row] * last]  # DDP lays gradients out as their parameters lie in memory
        nodes, merged = list(self._nodes), 0
        leaf = self._leaf
        while leaf and merged < len(nodes) and (above := parent(nodes[-1 - merged][0], leaf)):
            leaf, merged = above, merged + 1
        kept = nodes[: len(nodes) - merged]
        length, workers = sum(shape.numel() for shape in shapes), self._collectives.num_workers
        rows = bucket.buffer().new_zeros(len(kept) + (leaf is not None), -(-length // workers) * workers)
        for place, (_, value) in zip(rows, kept, strict=False):
            torch_internals.copy_(_like(place, shapes), [value[i] for i in own])
        if leaf:
            inside = _like(rows[-1], shapes)
            torch_internals.copy_(inside, [*_like(bucket.buffer(), bucket.parameters()), *[self._row] * last])
            for _, value in reversed(nodes[len(kept):]):
                torch_internals.add_(inside, [value[i] for i in own])
        return rows


class _Exchange:
    """One bucket on its way: all-to-all, fold, all-gather."""

    def __init__(self, rows: Tensor, length: int, parts: Sequence[range], future: torch.futures.Future[Tensor]) -> None:
        self._length, self._future = length, future
        self._nodes = [list(aligned_nodes(part)) for part in parts]
        self._count = parts[-1].stop
        workers, chunk = len(parts), rows.shape[1] // len(parts)
        sent = rows.view(len(rows), workers, chunk).transpose(0, 1).contiguous()
        self._received = rows.new_empty(sum(map(len, self._nodes)), chunk)
        self._sum = rows.new_empty(workers * chunk)
        self._work = _begun(dist.all_to_all_single(
            self._received.view(-1), sent.view(-1), [len(nodes) * chunk for nodes in self._nodes],
            [len(rows) * chunk] * workers, async_op=True))

    @property
    def behind(self) -> Tensor:
        """The sum of what rides behind the bucket, padded."""
        return self._sum[self._length :]

    def fold(self) -> None:
        """Finish the tree over this worker's chunk and start to bring the chunks together."""
        self._work.wait()
        nodes = (node for part in self._nodes for node in part)
        values = {node: [value] for node, value in zip(nodes, self._received, strict=True)}
        [chunk] = _fold(_root(self._count), values, self._count)
        self._work = _begun(dist.all_gather_into_tensor(self._sum, chunk, async_op=True))

    def finish(self) -> None:
        """Hand the sum to DDP."""
        self._work.wait()
        self._future.set_result(self._sum[: self._length])


def _reduce(tree: GradientTree, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook."""
    return tree.exchange(bucket)


def _root(count: int) -> TreeNode:
    return TreeNode(0, 1 << (count - 1).bit_length())


def _fold(node: TreeNode, values: dict[TreeNode, Value], count: int) -> Value:
    """Value of a node of the tree over `count` leaves, from given subtrees, which are used up."""
    if node in values:
        return values[node]
    half = node.size // 2
    left = _fold(TreeNode(node.start, half), values, count)
    if node.start + half < count:
        torch_internals.add_(left, _fold(TreeNode(node.start + half, half), values, count))
    return left


def _like(flat: Tensor, shapes: Iterable[Tensor]) -> list[Tensor]:
    """Parts of a flat tensor, one after the other, each in the shape and memory order of one of `shapes`."""
    parts, start = [], flat.storage_offset()
    for shape in shapes:
        parts.append(flat.as_strided(shape.shape, shape.stride(), start))
        start += shape.numel()
    return parts


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "every worker is a member of the group"
    return work
