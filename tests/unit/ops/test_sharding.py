"""Shares cover everything once; the tree of gradients is the same however it is cut."""

from functools import reduce
from itertools import chain, pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from ray_yolo.ops.sharding import TreeNode, aligned_nodes, balanced_shard, parent, shard, shards_by_speed


def test_shares_cover_each_thing_once_in_order_and_differ_by_at_most_one() -> None:
    for count, workers in product((0, 1, 3, 7, 37), (1, 2, 3, 5, 8)):
        parts = [shard(count, worker, workers) for worker in range(workers)]
        assert [i for part in parts for i in part] == list(range(count)), (count, workers)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1, (count, workers)


SECONDS = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@given(st.integers(0, 40), SECONDS)
def test_shards_by_speed_cover_each_thing_once_in_order_and_leave_no_worker_out(count: int, seconds: list[int]) -> None:
    parts = shards_by_speed(count, tuple(seconds))
    assert list(chain(*parts)) == list(range(count))
    assert len(parts) == len(seconds)
    assert count < len(seconds) or min(map(len, parts)) >= 1


@given(st.integers(0, 7), SECONDS)
def test_no_other_shards_that_leave_no_worker_out_are_finished_earlier(count: int, seconds: list[int]) -> None:
    least = 1 if count >= len(seconds) else 0
    all_sizes = [sizes for sizes in product(range(least, count + 1), repeat=len(seconds)) if sum(sizes) == count]
    earliest = min(max(size * each for size, each in zip(sizes, seconds, strict=True)) for sizes in all_sizes)
    parts = shards_by_speed(count, tuple(seconds))
    assert max(len(part) * each for part, each in zip(parts, seconds, strict=True)) == earliest


def test_workers_of_equal_speed_have_equal_shards() -> None:
    for count, workers in product((0, 1, 3, 7, 37), (1, 2, 3, 5, 8)):
        expected = [shard(count, worker, workers) for worker in range(workers)]
        assert list(shards_by_speed(count, (0.25,) * workers)) == expected, (count, workers)


def test_hand_worked_shards_by_speed() -> None:
    assert shards_by_speed(4, (1.0, 3.0)) == (range(0, 3), range(3, 4))
    assert shards_by_speed(9, (2.0, 1.0)) == (range(0, 3), range(3, 9))
    assert shards_by_speed(3, (1.0, 100.0, 1.0)) == (range(0, 1), range(1, 2), range(2, 3))  # one each
    assert shards_by_speed(2, (1.0, 100.0, 1.0)) == (range(0, 1), range(1, 1), range(1, 2))


def test_aligned_nodes_cover_a_range_with_aligned_powers_of_two() -> None:
    for start, stop in product(range(0, 20, 3), range(20, 40, 3)):
        nodes = list(aligned_nodes(range(start, stop)))
        covered = [i for node in nodes for i in range(node.start, node.start + node.size)]
        assert covered == list(range(start, stop)), (start, stop)
        assert all(node.size & (node.size - 1) == 0 and node.start % node.size == 0 for node in nodes), (start, stop)
        assert all(parent(a, b) is None for a, b in pairwise(nodes)), (start, stop)  # none could be merged


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 9))
def test_balanced_shards_cover_each_thing_once_and_differ_by_one_of_them_at_most(costs: list[int],
                                                                                 workers: int) -> None:
    parts = [balanced_shard(costs, worker, workers) for worker in range(workers)]
    assert sorted(number for part in parts for number in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    loads = [sum(costs[number] for number in part) for part in parts]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_a_hand_worked_balanced_shard() -> None:
    """7 goes to the first, 6 and 3 to the second, 2 and 1 to the first."""
    assert [balanced_shard([2, 7, 1, 6, 3], worker, 2) for worker in (0, 1)] == [[0, 1, 2], [3, 4]]


def test_hand_worked_nodes() -> None:
    assert list(aligned_nodes(range(0, 6))) == [TreeNode(0, 4), TreeNode(4, 2)]
    assert list(aligned_nodes(range(3, 9))) == [TreeNode(3, 1), TreeNode(4, 4), TreeNode(8, 1)]
    assert list(aligned_nodes(range(5, 5))) == []


def test_pushing_leaves_and_merging_siblings_gives_the_aligned_nodes() -> None:
    def push(stack: list[TreeNode], number: int) -> list[TreeNode]:
        node = TreeNode(number, 1)
        while stack and (above := parent(stack[-1], node)):
            stack, node = stack[:-1], above
        return [*stack, node]

    for start, stop in [(0, 16), (0, 13), (5, 11), (7, 8)]:
        assert reduce(push, range(start, stop), []) == list(aligned_nodes(range(start, stop)))
