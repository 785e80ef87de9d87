"""The device of a process, its name, marks in its work, and a second stream of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Literal, cast

import torch
from torch import Tensor

from ray_yolo.core.errors import ResourcesError
from ray_yolo.core.system import processor_name

Mark = float | torch.cuda.Event
"""A point in a device's work: a time in seconds, or an event in the work that is queued on a GPU."""


def mark(device: torch.device) -> Mark:
    """A mark behind all work so far. The host does not wait for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def wait_for(point: Mark) -> None:
    """Wait until the device has come to a mark. A CPU is there at once."""
    if isinstance(point, torch.cuda.Event):
        point.synchronize()


def seconds_between(begin: Mark, end: Mark) -> float:
    """Seconds between two marks of one device, which has reached both."""
    if isinstance(begin, torch.cuda.Event):
        return begin.elapsed_time(cast(torch.cuda.Event, end)) / 1000
    return cast(float, end) - begin


class SecondStream:
    """A stream of kernels and copies beside the one that computes. A CPU has none: it works in the order of the calls.

    A tensor that kernels of both streams use must live until the first stream has waited for the second one. The
    allocator gives its memory to the next kernels of the stream that it was allocated on, without regard to others.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # its short kernels go before long ones

    @property
    def exists(self) -> bool:
        """Whether the device has streams."""
        return self._stream is not None

    def copied(self, device: torch.device, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Copies of tensors on the device, which begin at once. The current stream waits for them."""
        assert self._stream is not None, "a CPU needs no copies"
        current = torch.cuda.current_stream(device)
        with torch.cuda.stream(self._stream):
            copies = [tensor.to(device, non_blocking=True) for tensor in tensors]
        current.wait_stream(self._stream)
        for copy in copies:
            copy.record_stream(current)  # its memory is free when this stream has used it
        return copies

    def alone(self) -> contextlib.AbstractContextManager[object]:
        """Context whose kernels and copies run on this stream, without waiting for the current one."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextlib.contextmanager
    def after_current(self) -> Iterator[None]:
        """Context whose kernels run on this stream, after those that are on the current one so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield


@cache
def exchange_stream(device: torch.device) -> SecondStream:
    """The stream of this process's exchanges of gradients."""
    return SecondStream(device)


@cache
def copy_stream(device: torch.device) -> SecondStream:
    """The stream of this process's copies to a device."""
    return SecondStream(device)


def empty_images(device: torch.device, count: int, like: Tensor) -> Tensor:
    """Memory for images of a batch, channels last, into which `copy_images` copies; `to_device` makes them usable."""
    with copy_stream(device).alone():
        return torch.empty((count, *like.shape[1:]), dtype=like.dtype, device=device,
                           memory_format=torch.channels_last)


def copy_images(images: Tensor, place: Tensor) -> None:
    """Copy images to a part of such memory, beside the kernels that a GPU has still to run."""
    with copy_stream(place.device).alone():
        place.copy_(images, non_blocking=True)


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """The tensors on a device. From pinned memory they are copied to a GPU beside the kernels that it has still to run,
    on a stream of their own; the next kernels come after them."""
    if device.type != "cuda":
        return [tensor.to(device, non_blocking=True) for tensor in tensors]
    return copy_stream(device).copied(device, tensors)


def local_device(gpus_per_worker: float | Literal["auto"]) -> torch.device:
    """The device of this process: a GPU if there is one, unless `gpus_per_worker` is 0.

    Raises:
        ResourcesError: if a number of GPUs was requested, and there is none.
    """
    if gpus_per_worker not in ("auto", 0) and not torch.cuda.is_available():
        raise ResourcesError(f"gpus_per_worker: {gpus_per_worker:g} was requested, but this machine has no GPU that "
                             "torch can use; use --gpus-per-worker 0 (or auto), or a machine with one")
    return torch.device("cuda" if gpus_per_worker and torch.cuda.is_available() else "cpu")


def gpus_held(device: torch.device, gpus_per_worker: float | Literal["auto"]) -> float:
    """The number of GPUs that a worker on this device holds: it may hold more than it uses, or a part of one."""
    if device.type != "cuda":
        return 0.0
    return 1.0 if gpus_per_worker == "auto" else float(gpus_per_worker)


def device_name(device: torch.device) -> str:
    """The name of a GPU, or of this machine's processor. Kernels, and so the last bits of a result, depend on it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
