"""Exchanges and folds on a GPU's second stream access no memory that another stream may be using."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ray_yolo.engine import gradients
from ray_yolo.engine.collectives import Collectives, ddp_options, form_node_groups
from ray_yolo.engine.devices import SecondStream
from ray_yolo.engine.gradients import GradientTree
from tests.support.streams import FIRST, SECOND, FakeStream, Streams, model_streams

WORKERS = 4
MACHINES: dict[str, list[str] | None] = {"one stage": None, "two stages": list("aabb")}
SHARDS = {"aligned": [2, 2, 2, 2], "not aligned": [1, 3, 3, 2], "empty": [0, 3, 2, 1]}


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of four workers with GPUs, of which this process is the first; the others do nothing."""
    monkeypatch.setattr(gradients, "exchange_stream", lambda device: SecondStream(torch.device("cuda")))
    monkeypatch.setattr(gradients, "mark", lambda device: 0.0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORKERS)
    yield
    dist.destroy_process_group()


def train(streams: Streams, counts: list[int], machines: list[str] | None) -> None:
    """Three steps of worker 0; after each, its gradient is used and new memory is written."""
    collectives = Collectives(0, WORKERS)
    if machines:
        collectives = replace(collectives, node_groups=form_node_groups(machines, 0, timedelta(seconds=5)))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 100))
    replica = DistributedDataParallel(model, bucket_cap_mb=0.01, **ddp_options())
    tree = GradientTree(replica, collectives, 5)
    with streams:
        for _ in range(3):  # DDP rebuilds its buckets after the first
            tree.start(counts)
            for number in range(counts[0]):
                with tree.microbatch(last=number == counts[0] - 1):
                    tree.attach_row(torch.ones(5))
                    replica(torch.ones(2, 3, 6, 6)).sum().backward()
            if not counts[0]:
                (replica(torch.ones(2, 3, 6, 6)).sum() * 0).backward()
            row = tree.finish()
            for p in model.parameters():
                assert p.grad is not None
                p.data.add_(p.grad * row.sum())
            model.zero_grad(set_to_none=True)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("counts", SHARDS.values(), ids=SHARDS)
@pytest.mark.parametrize("machines", MACHINES.values(), ids=MACHINES)
def test_all_accesses_are_in_order(monkeypatch: pytest.MonkeyPatch, counts: list[int], machines: list[str] | None
                                   ) -> None:
    streams = model_streams(monkeypatch)
    train(streams, counts, machines)
    assert not streams.faults
    assert min(streams.kernels[name] for name in (FIRST, SECOND)) > 10


def no_order(streams: Streams) -> Any:
    """Planted: the second stream does not wait for the rows that the first one fills."""
    @contextlib.contextmanager
    def after_current(_: SecondStream) -> Iterator[None]:
        streams.current = SECOND
        yield
        streams.current = FIRST
    return SecondStream, "after_current", after_current


def no_wait(streams: Streams) -> Any:
    """Planted: the fold does not wait for the all-to-all."""
    return gradients._Exchange, "_wait", lambda _: None


def nothing_held(streams: Streams) -> Any:
    """Planted: rows are free as soon as they are sent."""
    send = gradients._Exchange._send

    def released(exchange: Any, rows: Tensor) -> None:
        send(exchange, rows)
        exchange._held.clear()
    return gradients._Exchange, "_send", released


def no_end(streams: Streams) -> Any:
    """Planted: DDP does not wait for the sums."""
    return streams, "_wait_for_futures", lambda: None


def copy_and_use(streams: Streams, patch: pytest.MonkeyPatch) -> None:
    """Three batches that are copied and used, each in the memory of the one before."""
    second, to = SecondStream(torch.device("cuda")), Tensor.to
    patch.setattr(Tensor, "to", lambda tensor, device, non_blocking: to(tensor, torch.double))  # a copy
    pinned = torch.zeros(4)
    with streams:
        for _ in range(3):
            [copy] = second.copied(torch.device("cuda"), [pinned])
            copy.add_(1.0)
            del copy


def test_copies_are_beside_the_kernels_and_before_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = model_streams(monkeypatch)
    copy_and_use(streams, monkeypatch)
    assert not streams.faults
    assert streams.kernels == {SECOND: 3, FIRST: 3}
    assert not streams.reached(SECOND).get(FIRST)  # no copy waits for a kernel


@pytest.mark.parametrize(("owner", "forgotten"), [(Tensor, "record_stream"), (FakeStream, "wait_stream")])
def test_copies_without_order_are_found(monkeypatch: pytest.MonkeyPatch, owner: type, forgotten: str) -> None:
    streams = model_streams(monkeypatch)
    monkeypatch.setattr(owner, forgotten, lambda *_: None)
    copy_and_use(streams, monkeypatch)
    assert streams.faults


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("plant", [no_order, no_wait, nothing_held, no_end])
@pytest.mark.parametrize("machines", MACHINES.values(), ids=MACHINES)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, plant: Any, machines: list[str] | None) -> None:
    streams = model_streams(monkeypatch)
    monkeypatch.setattr(*plant(streams))
    train(streams, SHARDS["not aligned"], machines)
    assert streams.faults
