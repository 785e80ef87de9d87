"""Shards of work, and the tree in which gradients are summed; every worker computes both without communication."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple


class TreeNode(NamedTuple):
    """Subtree of the sum over microbatches start .. start + size - 1; size is a power of two that divides start."""

    start: int
    size: int


def shard(count: int, worker: int, num_workers: int) -> range:
    """The worker's contiguous shard of `count` items; shards differ by at most one and cover each item once."""
    return range(count * worker // num_workers, count * (worker + 1) // num_workers)


@lru_cache(maxsize=256)
def shards_by_speed(count: int, seconds: tuple[float, ...]) -> tuple[range, ...]:
    """Each worker's contiguous shard of `count` equal items, of which one takes worker w `seconds[w]`.

    The slowest worker finishes as early as possible: each next item goes to the worker that would finish it first. If
    there is an item for each worker, each gets at least one, so that its speed stays known. Workers of equal speed get
    the shards of `shard`.
    """
    workers = range(len(seconds))
    if len(set(seconds)) == 1:
        return tuple(shard(count, worker, len(seconds)) for worker in workers)
    at_least = 1 if count >= len(seconds) else 0
    sizes = [at_least] * len(seconds)
    # A heap of the times at which each worker would finish with one item more.
    finish = [((sizes[worker] + 1) * seconds[worker], worker) for worker in workers]
    heapq.heapify(finish)
    for _ in range(count - sum(sizes)):
        _, first = finish[0]
        sizes[first] += 1
        heapq.heapreplace(finish, ((sizes[first] + 1) * seconds[first], first))
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))


def balanced_shard(costs: Sequence[float], worker: int, num_workers: int) -> list[int]:
    """The worker's shard of items of unequal cost, ascending.

    Greedy: in falling order of cost each item goes to the worker with the least load.
    """
    loads, items = [0.0] * num_workers, []
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        least = loads.index(min(loads))
        loads[least] += costs[item]
        if least == worker:
            items.append(item)
    return sorted(items)


def aligned_nodes(part: range) -> Iterator[TreeNode]:
    """The fewest aligned nodes that cover a contiguous range, from left to right."""
    start = part.start
    while start < part.stop:
        size = start & -start or 1 << (part.stop - 1).bit_length()
        while start + size > part.stop:
            size //= 2
        yield TreeNode(start, size)
        start += size


class Folds(NamedTuple):
    """How the values of some nodes are added. A value is named by the place of its node in their sequence."""

    levels: tuple[tuple[tuple[int, int], ...], ...]  # additions by level: of the right value to the left one
    rest: tuple[tuple[TreeNode, int], ...]  # the nodes that remain, from left to right, and the places of their sums


@lru_cache(maxsize=256)
def plan_folds(nodes: tuple[TreeNode, ...], count: int) -> Folds:
    """The additions of the tree over `count` leaves that are possible among these nodes.

    If they cover all leaves, the root remains alone.
    """
    places = {node: place for place, node in enumerate(nodes)}
    levels: list[tuple[tuple[int, int], ...]] = []
    size = 1
    while size < count:
        additions: list[tuple[int, int]] = []
        for node in list(places):
            is_left_child = node.size == size and node.start % (2 * size) == 0
            if not is_left_child:
                continue
            sibling = TreeNode(node.start + size, size)
            if sibling in places:
                additions.append((places[node], places.pop(sibling)))
            elif sibling.start < count:  # the sibling is elsewhere
                continue
            # Without a sibling, as at the right edge, the value moves up as it is.
            places[TreeNode(node.start, 2 * size)] = places.pop(node)
        if additions:
            levels.append(tuple(additions))
        size *= 2
    return Folds(tuple(levels), tuple(sorted(places.items())))


def parent(left: TreeNode, right: TreeNode) -> TreeNode | None:
    """The parent of two adjacent nodes, or None if they are not its two halves."""
    if left.size == right.size and left.start % (2 * left.size) == 0:
        return TreeNode(left.start, 2 * left.size)
    return None
