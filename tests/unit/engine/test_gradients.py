"""The sum over the tree of a step's microbatches."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ray_yolo.engine.gradients import Value, fold_nodes, tree_sum
from ray_yolo.ops import torch_internals
from ray_yolo.ops.sharding import TreeNode, aligned_nodes


def leaves(count: int) -> list[Tensor]:
    """Values of very different magnitudes, so that rounding depends on the order of the sum."""
    generator = torch.Generator().manual_seed(count)
    return list(torch.randn(count, 7, generator=generator) * 10 ** torch.randn(count, 1, generator=generator))


def recursive_sum(values: list[Tensor], start: int, size: int) -> Tensor:
    """The definition: a node is the sum of its two halves."""
    if size == 1:
        return values[start]
    half = size // 2
    left = recursive_sum(values, start, half)
    if start + half >= len(values):
        return left
    return left + recursive_sum(values, start + half, half)


def subtrees_of(values: list[Tensor], shards: list[range]) -> dict[TreeNode, Value]:
    """What the workers have folded: the fewest subtrees of each shard."""
    nodes = [node for shard in shards for node in aligned_nodes(shard)]
    return {node: [recursive_sum(values[:node.start + node.size], node.start, node.size).clone()] for node in nodes}


@given(st.integers(1, 40), st.sets(st.integers(1, 39)))
def test_any_cut_into_shards_gives_the_bits_of_the_definition(count: int, cuts: set[int]) -> None:
    values = leaves(count)
    bounds = [0, *sorted(cut for cut in cuts if cut < count), count]
    shards = [range(first, last) for first, last in itertools.pairwise(bounds)]
    [total] = tree_sum(subtrees_of(values, shards), count)
    assert torch.equal(total, recursive_sum(values, 0, 1 << (count - 1).bit_length()))


@given(st.integers(1, 40), st.sets(st.integers(1, 39)), st.lists(st.integers(0, 3), min_size=40, max_size=40))
def test_folding_by_machines_first_gives_the_same_bits(count: int, cuts: set[int], machines: list[int]) -> None:
    """Each shard is on any of four machines."""
    values = leaves(count)
    bounds = [0, *sorted(cut for cut in cuts if cut < count), count]
    folded: dict[TreeNode, Value] = {}
    for machine in range(4):
        shards = [range(first, last) for (first, last), where in zip(itertools.pairwise(bounds), machines, strict=False)
                  if where == machine]
        folded |= fold_nodes(subtrees_of(values, shards), count)
    [total] = tree_sum(folded, count)
    assert torch.equal(total, recursive_sum(values, 0, 1 << (count - 1).bit_length()))


def test_neighbours_on_a_machine_leave_one_subtree() -> None:
    shards = [range(4, 6), range(6, 7), range(7, 8)]
    assert list(fold_nodes(subtrees_of(leaves(16), shards), 16)) == [TreeNode(4, 4)]
    assert list(fold_nodes(subtrees_of(leaves(6), [range(4, 5), range(5, 6)]), 6)) == [TreeNode(4, 4)]
    assert list(fold_nodes(subtrees_of(leaves(16), [range(3, 5)]), 16)) == [TreeNode(3, 1), TreeNode(4, 1)]


@pytest.mark.parametrize(("workers", "launches"), [(1, 0), (2, 1), (8, 3), (64, 6)])
def test_one_operation_adds_a_level(workers: int, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    add = torch_internals.add_
    monkeypatch.setattr(torch_internals, "add_", lambda left, right: calls.append(len(left)) or add(left, right))
    each = 4
    values = leaves(workers * each)
    shards = [range(each * worker, each * (worker + 1)) for worker in range(workers)]
    tree_sum(subtrees_of(values, shards), len(values))
    assert len(calls) == launches
    assert sum(calls) == workers - 1
