"""What each worker is given of its node, by table."""

from __future__ import annotations

import pytest

from ray_yolo.config.placement import Placement
from ray_yolo.runtime.resources import (
    Images,
    LoaderRoom,
    NodeResources,
    busy_line,
    count_places,
    most_cpus,
    share_out,
    workers_here,
    workers_on,
)

GB = 10**9
FITS, TOO_LARGE = Images(2 * GB, 2 * GB), Images(2 * GB + 1, 2 * GB)
GPU_NODE = NodeResources(96, 8)


CPUS = (
    ([NodeResources(2)], 1, 0, "PACK", 2),
    ([NodeResources(2)], 2, 0, "PACK", 1),
    ([NodeResources(2)], 3, 0, "PACK", 1),  # at least one: whether they fit is asked elsewhere
    ([NodeResources(7)], 2, 0, "PACK", 3),
    ([NodeResources(8), NodeResources(8)], 2, 0, "PACK", 8),
    ([NodeResources(8), NodeResources(8)], 2, 0, "STRICT_PACK", 4),
    ([NodeResources(8), NodeResources(64)], 2, 0, "STRICT_SPREAD", 8),
    # three on the large one are more than one on each and a half
    ([NodeResources(4), NodeResources(64)], 3, 0, "SPREAD", 21),
    ([NodeResources(0), NodeResources(16)], 4, 0, "PACK", 4),  # a head without CPUs
    ([NodeResources(5), NodeResources(16)], 4, 0, "PACK", 5),  # other jobs use 11 of the first one's
    ([NodeResources(16)], 8, 0, "PACK", 2),  # an elastic range by its high bound
    ([NodeResources(2.5)], 1, 0, "PACK", 2),
    ([NodeResources(16, is_shared=True)], 1, 0, "PACK", 8),  # half is left to other jobs
    ([NodeResources(16, is_shared=True)], 16, 0, "PACK", 1),
    ([NodeResources(2, is_shared=True)], 2, 0, "PACK", 1),
    ([NodeResources(60, 1, cpus_per_gpu=8)], 1, 1, "PACK", 8),  # other jobs use 7 GPUs with few CPUs
    ([NodeResources(6, 2, cpus_per_gpu=8)], 2, 1, "PACK", 3),  # and here with many
    ([NodeResources(96, 8, cpus_per_gpu=12, is_shared=True)], 8, 1, "PACK", 12),
    ([], 1, 0, "PACK", 1),
    ([GPU_NODE], 1, 1, "PACK", 12),  # a GPU's part, however many workers there are
    ([GPU_NODE], 8, 1, "PACK", 12),
    ([GPU_NODE], 4, 2, "PACK", 24),
    ([GPU_NODE], 16, 0.5, "PACK", 6),
    ([NodeResources(64), NodeResources(16, 1)], 1, 1, "PACK", 16),  # a node without GPUs holds none of these workers
    ([GPU_NODE, NodeResources(4, 1)], 9, 1, "PACK", 4),
    ([NodeResources(4, 8)], 8, 1, "PACK", 1),
)


def test_all_workers_have_the_most_cpus_that_fit_at_once() -> None:
    for nodes, workers, gpus, strategy, cpus in CPUS:
        assert most_cpus(nodes, workers, gpus, strategy) == cpus, (nodes, workers, gpus, strategy)


CHOSEN = (
    ({}, [NodeResources(2)], 0, 0, FITS, (2, 2, 0, "ram")),
    ({"num_workers": 2}, [NodeResources(2)], 0, 0, FITS, (1, 1, 0, "ram")),
    ({"num_workers": "1-4"}, [NodeResources(16)], 0, 0, TOO_LARGE, (4, 3, 1, "none")),
    ({}, [NodeResources(3)], 0, 0, TOO_LARGE, (3, 3, 0, "none")),
    ({}, [NodeResources(4)], 0, 0, TOO_LARGE, (4, 3, 1, "none")),
    ({}, [NodeResources(4)], 0, 0, FITS, (4, 4, 0, "ram")),
    ({}, [NodeResources(7)], 0, 0, FITS, (7, 6, 1, "ram")),
    ({}, [NodeResources(64)], 0, 0, TOO_LARGE, (64, 57, 7, "none")),
    ({}, [NodeResources(128)], 0, 0, TOO_LARGE, (128, 120, 8, "none")),
    ({}, [GPU_NODE], 1, 0, TOO_LARGE, (12, 1, 11, "none")),
    ({}, [NodeResources(64, 1)], 1, 0, FITS, (64, 1, 63, "ram")),
    ({}, [NodeResources(128, 1)], 1, 0, FITS, (128, 64, 64, "ram")),
    ({}, [NodeResources(1, 1)], 1, 0, FITS, (1, 1, 0, "ram")),
    ({}, [NodeResources(64)], 0, 1, FITS, (2, 1, 1, "ram")),  # exact: the recipe has one thread, and the rest feeds it
    ({}, [NodeResources(1)], 0, 1, FITS, (1, 1, 0, "ram")),
    ({"cpus_per_worker": 3}, [NodeResources(2)], 0, 0, FITS, (3, 3, 0, "ram")),
    ({"cpus_per_worker": 0.5}, [NodeResources(2, 1)], 1, 0, FITS, (0.5, 1, 0, "ram")),
    ({"workers": 2}, [NodeResources(8)], 0, 0, FITS, (8, 6, 2, "ram")),
    ({"workers": 8}, [NodeResources(2)], 0, 0, FITS, (2, 1, 8, "ram")),
    ({"cache": "none"}, [NodeResources(2)], 0, 0, FITS, (2, 2, 0, "none")),
    ({"cache": "disk"}, [NodeResources(6)], 0, 0, FITS, (6, 6, 0, "disk")),
    ({}, [NodeResources(2)], 0, 0, None, (2, 2, 0, "none")),
)


def test_what_is_left_open_follows_from_the_node() -> None:
    """`chosen`: CPUs, threads, loader processes, cache."""
    for given, nodes, gpus, fixed, images, chosen in CHOSEN:
        placement, resources = share_out(Placement.model_validate(given), gpus, nodes, fixed, images)
        found = (placement.cpus, resources.threads, placement.loader_processes, placement.cache)
        assert found == (resources.cpus, resources.threads, resources.loader_processes, resources.cache)
        case = (given, nodes, gpus, fixed, images)
        assert found == chosen, case
        # nothing is open any more
        assert share_out(placement, gpus, [NodeResources(999)], fixed, images)[0] == placement, case
        if "workers" not in given:
            assert resources.threads + placement.loader_processes <= max(1, placement.cpus), case


def test_reasons_are_given_for_what_was_chosen_alone() -> None:
    nodes = [NodeResources(4), NodeResources(2)]
    _, event = share_out(Placement(num_workers=2), 0, nodes, 0, Images(3 * GB, 2 * GB))
    assert event.reasons == ("6 CPUs free for 2 workers", "3 GB of decoded images, 2 GB of memory available")
    (reason,) = share_out(Placement(num_workers=2), 0, [NodeResources(8, is_shared=True)])[1].reasons
    assert reason == "8 CPUs free for 2 workers, half of them left to other jobs"
    (reason,) = share_out(Placement(num_workers=2), 0, [NodeResources(3, is_shared=True)])[1].reasons
    assert reason == "3 CPUs free for 2 workers"  # each needs one, which is more than half
    asked = Placement(cpus_per_worker=1, workers=0, cache="none")
    assert share_out(asked, 0, [NodeResources(4)], 0, FITS)[1].reasons == ()


@pytest.mark.parametrize(("kind", "amount", "each", "places"), [
    ("GPU", 8, 0.6, 8), ("GPU", 8, 0.4, 16), ("GPU", 1, 1 / 3, 3), ("GPU", 2.5, 0.25, 10), ("GPU", 2.5, 0.6, 2),
    ("GPU", 8, 2, 4), ("GPU", 7, 2, 3), ("CPU", 8, 0.6, 13), ("CPU", 0.3, 0.1, 3), ("GPU", 0, 0.5, 0)])
def test_a_part_of_a_gpu_is_of_one_gpu(kind: str, amount: float, each: float, places: int) -> None:
    assert count_places(kind, amount, each) == places


def test_without_a_cluster_auto_is_a_worker_for_each_of_several_gpus() -> None:
    for gpus, each, workers in ((0, "auto", 0), (1, "auto", 0), (2, "auto", 2), (8, "auto", 8),
                                (8, 0.0, 0), (8, 2.0, 4), (2, 2.0, 0)):
        number, why = workers_here(gpus, each)
        assert number == workers, (gpus, each)
        assert why == (f"{gpus} GPUs here" if workers else
                       "in this process: no cluster was requested, and there is at most one GPU"), (gpus, each)
    assert workers_here(2, 0.5) == (0, "in this process: a part of a GPU is for one worker of a training")


def test_on_a_cluster_auto_is_a_worker_for_each_gpu_or_node() -> None:
    for nodes, gpus, cpus, workers, why in [
        ([GPU_NODE, NodeResources(4, 1)], 1, 1, 9, "free GPUs: 9"),
        ([GPU_NODE], 2, 1, 4, "free GPUs: 8"),
        ([GPU_NODE], 0.5, 1, 1, "a part of a GPU is for one worker of a training"),
        ([NodeResources(8, 0)], 1, 1, 1, "free GPUs: 0"),  # others have them all: it waits for one
        ([NodeResources(16), NodeResources(2), NodeResources(0)], 0, 1, 2, "nodes with free CPUs: 2"),
        ([NodeResources(16), NodeResources(2), NodeResources(0)], 0, 4, 1, "nodes with free CPUs: 1"),
        ([], 0, 1, 1, "nodes with free CPUs: 0"),
    ]:
        assert workers_on(nodes, gpus, cpus) == (workers, why), (nodes, gpus, cpus)


MB = 10**6


@pytest.mark.parametrize(("free", "asked", "workers", "images", "fitting"), [
    (64 * MB, 2, 1, 0, 0),  # a container's, with two batches of 13 MB in use and two ready for each loader
    (78 * MB, 2, 1, 0, 1), (130 * MB, 2, 1, 0, 2), (10**12, 64, 8, 0, 64), (0, 4, 1, 0, 0), (64 * MB, 0, 1, 0, 0),
    (260 * MB, 2, 2, 0, 2), (259 * MB, 2, 2, 0, 1), (10**9, 4, 1, 900 * MB, 1)])
def test_loaders_that_fit_shared_memory_by_hand(free: int, asked: int, workers: int, images: int, fitting: int) -> None:
    room = LoaderRoom(free, per_loader=52 * MB, per_worker=26 * MB)
    loaders, reason = room.limit(asked, workers, images)
    assert (loaders, bool(reason)) == (fitting, fitting < asked)
    if reason:
        assert reason.startswith(f"{fitting} loader process{'' if fitting == 1 else 'es'} instead of {asked}")
        assert ("cannot be written" in reason) is (free == 0)


def test_workers_of_a_node_share_its_memory_for_batches() -> None:
    room, nodes = LoaderRoom(300 * MB, per_loader=50 * MB, per_worker=25 * MB), [NodeResources(8), NodeResources(2)]
    for workers, loaders in ((1, 4), (2, 2), (8, 1)):  # of two CPUs each: up to four on the larger node
        asked = Placement(num_workers=workers, cpus_per_worker=2, workers=4)
        placement, resources = share_out(asked, 0, nodes, room=room)
        assert placement.workers == resources.loader_processes == loaders
        assert any("/dev/shm" in reason for reason in resources.reasons) is (loaders < 4)
    asked = Placement(num_workers=1, cpus_per_worker=2, workers=4)
    assert share_out(asked, 0, nodes, images=Images(200 * MB, 10**9), room=room)[0].workers == 1  # beside images


@pytest.mark.parametrize(("threads", "others", "machine", "is_reported"), [
    (2, 0.1, 2, False), (2, 0.9, 2, True), (1, 1.9, 2, False), (2, 5.0, 8, False), (4, 5.0, 8, True)])
def test_threads_on_cores_of_others_are_reported(
        threads: int, others: float, machine: int, is_reported: bool) -> None:
    line = busy_line(threads, others, machine)
    assert bool(line) == is_reported
    assert not line or (line.startswith(f"other programs use {others} of {machine} cores") and "--threads 1" in line)
