"""A model of a GPU's streams. It finds accesses to memory that no wait puts in order, though a CPU runs the kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

FIRST, SECOND = "first", "second"

Clock = dict[str, int]
"""The number of kernels of each stream that have ended."""


@dataclass
class Access:
    """One kernel's access to a block of memory."""

    stream: str
    number: int  # of the kernel on its stream
    writes: bool
    name: str


@dataclass
class Block:
    """Memory of the caching allocator: it is free in the order of the stream that it was allocated on."""

    stream: str
    storage: StorageWeakRef
    recorded: set[str] = field(default_factory=set)  # further streams, whose kernels the allocator waits for
    accesses: list[Access] = field(default_factory=list)


class Streams(TorchDispatchMode):
    """Kernels in the order of a device's streams: each is on the current stream, and ends before the next one there.

    `faults` describes kernels that may run at the same time and access the same memory, one of them to write it, and
    memory that is freed while another stream's kernel may still use it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = FIRST
        self.faults: list[str] = []
        self.kernels: dict[str, int] = {}  # launched on each stream
        self._clocks: dict[str, Clock] = {}  # what has ended before the next kernel of a stream
        self._blocks: dict[int, Block] = {}
        self._futures: list[Clock] = []  # of the futures that DDP waits for

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._collect()
        if function.is_view:
            return result
        name, schema = str(function), function._schema
        written: list[Any] = []
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info and argument.alias_info.is_write:
                written.append(args[place] if place < len(args) else (kwargs or {}).get(argument.name))
        is_allocation = "empty" in name
        reads = [] if is_allocation else tensors((args, kwargs))
        writes = [] if is_allocation else tensors((written, result))
        for tensor in tensors(result):
            self._block(tensor)
        self._launch(self.current, name, reads, writes)
        return result

    def wait(self, clock: Clock, stream: str = "") -> None:
        """Let a stream, by default the current one, wait for kernels."""
        self._collect()
        own = self._clock(stream or self.current)
        for other, number in clock.items():
            own[other] = max(own.get(other, 0), number)

    def reached(self, stream: str = "") -> Clock:
        """What has ended when a stream, by default the current one, has ended its kernels so far."""
        return dict(self._clock(stream or self.current))

    def collective(self, received: Tensor, sent: Tensor, *_: Any, group: Any = None, async_op: bool = True) -> Work:
        """NCCL's all-to-all or all-gather: on the group's own stream, after the current one."""
        stream = f"NCCL {id(group)}"
        self.wait(self.reached(), stream)
        self._launch(stream, "collective", [sent], [received])
        return Work(self, self.reached(stream))

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """`torch.cuda.stream`: the context of a stream."""
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def record(self, tensor: Tensor, stream: FakeStream) -> None:
        """`Tensor.record_stream`."""
        self._block(tensor).recorded.add(stream.name)

    def complete(self) -> None:
        """A future is complete when the current stream comes here. DDP's stream waits for it at the end of backward."""
        if not self._futures:
            torch.autograd.Variable._execution_engine.queue_callback(self._wait_for_futures)  # before DDP's own
        self._futures.append(self.reached())

    def _wait_for_futures(self) -> None:
        for clock in self._futures:
            self.wait(clock)
        self._futures = []

    def _launch(self, stream: str, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        clock = self._clock(stream)
        clock[stream] = self.kernels[stream] = self.kernels.get(stream, 0) + 1
        for accessed, is_write in ((reads, False), (writes, True)):
            for tensor in accessed:
                block = self._block(tensor)
                for other in block.accesses:
                    is_before = other.number <= clock.get(other.stream, 0)
                    if not is_before and (is_write or other.writes):
                        self.faults.append(f"{name} on {stream} and {other.name} on {other.stream} are not in order")
                block.accesses.append(Access(stream, clock[stream], is_write, name))

    def _block(self, tensor: Tensor) -> Block:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            self._blocks[storage._cdata] = Block(self.current, StorageWeakRef(storage))
        return self._blocks[storage._cdata]

    def _collect(self) -> None:
        """Free the blocks that no tensor uses."""
        for place, block in list(self._blocks.items()):
            if not block.storage.expired():
                continue
            del self._blocks[place]
            for access in block.accesses:
                is_over = access.number <= self._clock(block.stream).get(access.stream, 0)
                if not is_over and access.stream not in block.recorded:
                    self.faults.append(f"memory of {block.stream} is free before {access.name} on {access.stream}")

    def _clock(self, stream: str) -> Clock:
        return self._clocks.setdefault(stream, {})


@dataclass(frozen=True)
class FakeStream:
    """A stream as torch.cuda has it."""

    streams: Streams
    name: str
    device: str = "cuda"

    def wait_stream(self, other: FakeStream) -> None:
        self.streams.wait(self.streams.reached(other.name), self.name)


@dataclass(frozen=True)
class Work:
    """A collective in progress."""

    streams: Streams
    end: Clock

    def wait(self) -> None:
        self.streams.wait(self.end)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def model_streams(patch: pytest.MonkeyPatch) -> Streams:
    """Streams that torch.cuda, collectives and futures use from here on."""
    streams = Streams()
    patch.setattr(torch.cuda, "Stream", lambda device, priority: FakeStream(streams, SECOND))
    patch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(streams, streams.current))
    patch.setattr(torch.cuda, "stream", streams.on)
    patch.setattr(Tensor, "record_stream", lambda tensor, stream: streams.record(tensor, stream))
    patch.setattr(dist, "all_to_all_single", streams.collective)
    patch.setattr(dist, "all_gather_into_tensor", streams.collective)
    original: Callable[..., None] = torch.futures.Future.set_result

    def set_result(future: Any, value: Tensor) -> None:
        streams.complete()
        original(future, value)

    patch.setattr(torch.futures.Future, "set_result", set_result)
    return streams
