"""The gradient of a step: the sum over its microbatches in a fixed binary tree, for any number of workers.

Floating-point addition is not associative, so the order of a sum determines its last bits. Here the order depends only
on the microbatch numbers, so any number of workers gets the same bits. Each worker folds its own microbatches into
aligned subtrees: it takes `.grad` after each backward pass that runs without DDP's reduction. In the worker's last
backward pass of the step, DDP reduces. DDP's communication hook receives one bucket after another, with the gradient of
the last microbatch only. It adds the worker's subtrees, and exchanges the bucket while the backward pass continues:

| exchange   | effect                                       |
|------------|----------------------------------------------|
| all-to-all | worker c receives chunk c of all subtrees    |
| fold       | worker c completes the tree over its chunk   |
| all-gather | every worker receives the sums of all chunks |

A worker sends as many bytes as in a ring all-reduce: about twice the size of the parameters, for any number of workers.
If its share of the microbatches is not aligned, it sends this amount once per subtree.

If each machine (node of the cluster; here, a node is one of the tree) has the same number of workers and more than one,
the all-to-all has two stages. In the first one, the workers of a machine exchange and fold what they have: the worker
with place p then holds what the workers with place p on all machines need. The second stage is between these. Of G
workers, one value instead of G leaves the machine.

On a GPU, exchanges and folds are on a second stream. The backward pass waits for them at its end, in DDP.

Annotations are not deferred in this file: DDP inspects those of a communication hook.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.devices import Mark, exchange_stream, mark
from ray_yolo.ops import torch_internals
from ray_yolo.ops.sharding import TreeNode, aligned_nodes, parent, plan_folds

Value = list[Tensor]
"""The content of a tree node: the gradient of each parameter, and the row that is summed with it."""


class GradientTree:
    """Sums a step's gradients into every worker's `.grad`, and a row of numbers with them.

    For each step: `start`; for each of the worker's microbatches `microbatch` around forward, `attach_row` and
    backward; `finish`. A worker without a microbatch calls backward of any loss once, outside `microbatch`, because
    DDP's reduction needs every worker's backward pass.

    Args:
        replica: the model, wrapped by DDP if there are several workers. The tree registers DDP's communication hook.
        row_size: length of each microbatch's row.
    """

    def __init__(self, replica: nn.Module, collectives: Collectives, row_size: int) -> None:
        self._replica, self._collectives = replica, collectives
        self._parameters = [p for p in replica.parameters() if p.requires_grad]
        self._index = {id(p): number for number, p in enumerate(self._parameters)}
        self._row = self._parameters[0].new_zeros(row_size)  # what `attach_row` gave for the microbatch in progress
        self._nodes: list[tuple[TreeNode, Value]] = []  # this worker's subtrees, from left to right
        self._shards: list[range] = []  # each worker's leaves
        self._stages: list[_Stage] = []  # the stages of this step's exchanges
        self._next = 0  # this worker's next leaf
        self._leaf: TreeNode | None = None  # the leaf whose gradient DDP reduces
        self._exchanges: list[_Exchange] = []  # those of this step's buckets, in order
        self._second = exchange_stream(torch.device("cpu"))  # none
        self._exchanged: Mark = 0.0  # behind all kernels of the backward pass
        self.waits: list[tuple[Mark, Mark]] = []
        """The waits for other workers in the newest step: their begins and ends."""
        if isinstance(replica, DistributedDataParallel):
            self._second = exchange_stream(self._row.device)
            replica.register_comm_hook(self, GradientTree.exchange)

    def start(self, counts: Sequence[int]) -> None:
        """Begin a step in which worker w computes the next `counts[w]` leaves."""
        self._shards = [range(*pair) for pair in itertools.pairwise(itertools.accumulate(counts, initial=0))]
        self._stages = _plan_stages(self._shards, self._collectives)
        self._nodes, self._leaf, self._exchanges, self.waits = [], None, [], []
        self._next = self._shards[self._collectives.rank].start

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Context of the forward and backward pass of the worker's next microbatch.

        With `last`, for the worker's last microbatch of the step, the backward pass is collective.
        """
        replica, leaf = self._replica, TreeNode(self._next, 1)
        self._next += 1
        if last and isinstance(replica, DistributedDataParallel):
            self._leaf = leaf
            yield
            if self._second.exists:  # the device waits after DDP's last bucket until all are exchanged
                self.waits.append((self._exchanged, mark(self._row.device)))
            return
        with replica.no_sync() if isinstance(replica, DistributedDataParallel) else contextlib.nullcontext():
            yield
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None
        self._push(leaf, [*gradient, self._row])

    def attach_row(self, row: Tensor) -> None:
        """Sum a row of numbers, (row_size,), with the gradient of the current microbatch. Call it before backward."""
        self._row = row

    def finish(self) -> Tensor:
        """The sum of all rows, (row_size,); the sum of the gradients is in `.grad`. Every worker calls it once per
        step."""
        if self._exchanges:
            last = self._exchanges[-1]
            row = last.sum[last.length :][: len(self._row)]  # behind the bucket, before the padding
        else:
            count = self._shards[-1].stop
            *gradients, row = tree_sum(dict(self._nodes), count)
            for p, gradient in zip(self._parameters, gradients, strict=True):
                p.grad = gradient
        # They take several times the memory of the gradient. The stream that computes has waited for the second one.
        self._nodes, self._exchanges = [], []
        return row

    def close(self) -> None:
        """Release the model: DDP's native code refers to the hook, which the garbage collector cannot see."""
        vars(self).clear()

    def _push(self, node: TreeNode, value: Value) -> None:
        """Add a leaf to the right of the subtrees, and fold the subtrees that become complete."""
        while self._nodes and (above := parent(self._nodes[-1][0], node)):
            left = self._nodes.pop()[1]
            torch_internals.add_(left, value)
            node, value = above, left
        self._nodes.append((node, value))

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket over the tree; DDP's communication hook."""
        rows = self._rows(bucket)
        device = rows.device
        future = torch.futures.Future[Tensor](devices=[device] if device.type == "cuda" else None)
        with self._second.after_current():
            self._advance()  # It runs at each bucket, so that the order of exchanges is the same on every worker.
            self._exchanges.append(_Exchange(rows, bucket.buffer().numel(), self._stages, self._shards[-1].stop, future,
                                             self.waits))
            if bucket.is_last():
                for _ in self._stages:
                    self._advance()
                for exchange in self._exchanges:
                    exchange.finish()
        if bucket.is_last():
            self._exchanged = mark(device)
        return future

    def _advance(self) -> None:
        """Complete one stage of each exchange that has one left, and start its next collective."""
        for exchange in self._exchanges:
            if exchange.stages:
                exchange.fold()

    def _rows(self, bucket: dist.GradBucket) -> Tensor:
        """This worker's subtrees of a bucket, (nodes, length); in the last bucket with the attached rows."""
        parameters = bucket.parameters()
        own = [self._index[id(p)] for p in parameters]  # places of the bucket's tensors in a node's value
        shapes = list(parameters)  # DDP gives gradients their parameters' strides
        leaf_values = views_like(bucket.buffer(), parameters)  # the gradient of the last microbatch
        if bucket.is_last():  # the attached row is the last tensor of a value
            own.append(-1)
            shapes.append(self._row)
            leaf_values.append(self._row)

        # The last microbatch completes the subtrees at the right end, one after the other.
        node, merged = self._leaf, 0
        while node and merged < len(self._nodes):
            above = parent(self._nodes[-1 - merged][0], node)
            if not above:
                break
            node, merged = above, merged + 1
        num_kept = len(self._nodes) - merged
        kept, merging = self._nodes[:num_kept], self._nodes[num_kept:]

        length, workers = sum(shape.numel() for shape in shapes), self._collectives.num_workers
        padded = -(-length // workers) * workers  # one chunk of equal length for each worker
        num_rows = num_kept + (1 if node else 0)
        rows = bucket.buffer().new_zeros(num_rows, padded)
        for row, (_, value) in zip(rows, kept, strict=False):
            torch_internals.copy_(views_like(row, shapes), [value[i] for i in own])
        if node:
            total = views_like(rows[-1], shapes)
            torch_internals.copy_(total, leaf_values)
            for _, value in reversed(merging):  # the nearest subtree first, as in `_push`
                torch_internals.add_(total, [value[i] for i in own])
        return rows


class _Stage(NamedTuple):
    """One all-to-all of an exchange, between the members of a group."""

    group: dist.ProcessGroup | None  # None: all workers
    order: list[int] | None  # chunks in the order of the members that get them; None: as they are
    nodes: list[list[TreeNode]]  # each member sends its list


def _plan_stages(shards: Sequence[range], collectives: Collectives) -> list[_Stage]:
    """The stages of this worker's exchanges in a step with these shards of all workers."""
    own = [list(aligned_nodes(shard)) for shard in shards]  # the nodes of the tree that each worker has
    groups = collectives.node_groups
    if groups is None:
        return [_Stage(None, None, own)]
    here = groups.workers[groups.here]
    # The worker with place p on this machine gets the chunks of the workers with place p on all machines.
    order = [machine[place] for place in range(len(here)) for machine in groups.workers]
    folded = []  # the nodes that each machine has left after its inner folds
    for machine in groups.workers:
        nodes = tuple(node for worker in machine for node in own[worker])
        folded.append([node for node, _ in plan_folds(nodes, shards[-1].stop).rest])
    return [_Stage(groups.inside, order, [own[worker] for worker in here]), _Stage(groups.across, None, folded)]


class _Exchange:
    """The exchange of one bucket. On a CPU, it notes its waits for other workers in `waits`.

    Args:
        rows: this worker's subtrees, (nodes, length and padding); consumed.
        length: of the bucket.
        count: of the step's leaves.
        future: receives the sum.
    """

    def __init__(self, rows: Tensor, length: int, stages: Sequence[_Stage], count: int,
                 future: torch.futures.Future[Tensor], waits: list[tuple[Mark, Mark]]) -> None:
        self.length, self._count, self._future, self._waits = length, count, future, waits
        self.stages = list(stages)
        """Those that are not complete. The all-to-all of the first one has started."""
        self.sum = rows.new_empty(rows.shape[1])
        self._held: list[Tensor] = []  # they live until the step's end: see `SecondStream`
        self._send(rows)

    def _send(self, rows: Tensor) -> None:
        """Start the all-to-all of a stage with these rows, (nodes, chunks)."""
        stage = self.stages[0]
        num_rows, length = rows.shape  # a worker without a microbatch has no rows
        if stage.order:
            by_chunk = rows.view(num_rows, len(stage.order), length // len(stage.order))
            ordered = torch.stack([by_chunk[:, chunk] for chunk in stage.order], 1)  # a list as index would be copied
        else:
            ordered = rows
        members = len(stage.nodes)
        part = length // members  # the chunks of one member
        chunks = ordered.reshape(num_rows, members, part).transpose(0, 1).contiguous()
        sent_sizes = [num_rows * part] * members
        received_sizes = [len(nodes) * part for nodes in stage.nodes]
        self._received = rows.new_empty(sum(map(len, stage.nodes)), part)  # (nodes of all members, chunks of this one)
        self._work = _started(dist.all_to_all_single(
            self._received.view(-1), chunks.view(-1), received_sizes, sent_sizes, group=stage.group, async_op=True))
        self._held += [rows, chunks, self._received]

    def fold(self) -> None:
        """Add what a stage has brought. Start the next stage, or the all-gather of the sums of all chunks."""
        self._wait()
        stage = self.stages.pop(0)
        nodes = [node for nodes in stage.nodes for node in nodes]
        subtrees = {node: [value] for node, value in zip(nodes, self._received, strict=True)}
        values = [value for [value] in fold_nodes(subtrees, self._count).values()]
        if self.stages:
            self._send(torch.stack(values) if values else self._received[:0])
            return
        [chunk] = values
        self._work = _started(dist.all_gather_into_tensor(self.sum, chunk, async_op=True))

    def finish(self) -> None:
        """Pass the sum to DDP."""
        self._wait()
        self._future.set_result(self.sum[: self.length])

    def _wait(self) -> None:
        if self.sum.is_cuda:
            self._work.wait()  # the second stream waits, and not the host
            return
        began = mark(self.sum.device)
        self._work.wait()
        self._waits.append((began, mark(self.sum.device)))


def fold_nodes(subtrees: dict[TreeNode, Value], count: int) -> dict[TreeNode, Value]:
    """The nodes that remain after all additions of the binary tree of `count` leaves that are possible among these.

    Values are added in place. All additions of one level are one operation: 6 launches for 64 subtrees of equal size,
    instead of 63.
    """
    folds = plan_folds(tuple(subtrees), count)
    values = list(subtrees.values())
    for additions in folds.levels:
        lefts: Value = []
        rights: Value = []
        for left, right in additions:
            lefts += values[left]
            rights += values[right]
        torch_internals.add_(lefts, rights)
    return {node: values[place] for node, place in folds.rest}


def tree_sum(subtrees: dict[TreeNode, Value], count: int) -> Value:
    """The sum over the binary tree of `count` leaves, added in place.

    Args:
        subtrees: the values of nodes that cover each leaf once.
    """
    [total] = fold_nodes(subtrees, count).values()
    return total


def views_like(flat: Tensor, shapes: Iterable[Tensor]) -> list[Tensor]:
    """Consecutive views into a flat tensor, each with the shape and strides of one of `shapes`."""
    parts, start = [], flat.storage_offset()
    for shape in shapes:
        parts.append(flat.as_strided(shape.shape, shape.stride(), start))
        start += shape.numel()
    return parts


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "every worker is a member of the group"
    return work
