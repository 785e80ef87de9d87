"""Who does what, and the tree in which gradients are summed: every worker computes the same, nobody has to ask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class TreeNode(NamedTuple):
    """A subtree of the sum over microbatches start .. start + size - 1; size a power of two, start a multiple of it."""

    start: int
    size: int


def shard(count: int, worker: int, num_workers: int) -> range:
    """The worker's contiguous part of `count` things; parts differ by at most one and cover each thing once."""
    return range(count * worker // num_workers, count * (worker + 1) // num_workers)


def balanced_shard(costs: Sequence[float], worker: int, num_workers: int) -> list[int]:
    """The worker's part of things of unequal cost, ascending: dearest first, each goes to whoever has least so far."""
    loads, mine = [0.0] * num_workers, []
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        taker = loads.index(min(loads))
        loads[taker] += costs[number]
        if taker == worker:
            mine.append(number)
    return sorted(mine)


def aligned_nodes(part: range) -> Iterator[TreeNode]:
    """The fewest aligned nodes that cover a contiguous range, from left to right."""
    start = part.start
    while start < part.stop:
        size = start & -start or 1 << (part.stop - 1).bit_length()
        while start + size > part.stop:
            size //= 2
        yield TreeNode(start, size)
        start += size


def parent(left: TreeNode, right: TreeNode) -> TreeNode | None:
    """The node above two neighbours, or None if they are not its two halves."""
    if left.size == right.size and left.start % (2 * left.size) == 0:
        return TreeNode(left.start, 2 * left.size)
    return None
