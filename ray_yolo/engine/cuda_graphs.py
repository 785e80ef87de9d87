"""CUDA graphs: how a part of a training step is recorded, and when.

A small network on a fast GPU is bound by the host: each of its several hundred kernels takes longer to launch than to
run. A CUDA graph is a recorded sequence of launches, which one call repeats: the same kernels on the same memory, so
with the same bits. Three parts of a step can be recorded: the network's passes (`network_graph`), the loss's
(`loss_graph`), and the update (`update_graph`). Each has `Recordings` of its own, one for each shape of its inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import torch

PLAIN_USES = 3
"""Uses of a shape before it is recorded: libraries set themselves up in the first ones, and rare shapes never pay."""
MAX_RECORDINGS = 8
"""Further shapes, as of multi_scale, run as written: each recording holds its inputs and outputs."""
WARM_UP_PASSES = 2
"""Passes on the recorder's stream before a recording. Libraries have workspaces for each stream."""

Recording = TypeVar("Recording")


class LaunchRecorder(Protocol):
    """What can record the launches of a function, and repeat them."""

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run a function in the way in which it will be recorded."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Returns what repeats the function's launches on the same memory. A recorder need not run the function."""


class Recordings(Generic[Recording]):
    """The recordings of one part of a step, by the shape of its inputs.

    What runs as written: shapes that are new or too many, and every new one after a recording has failed.

    Args:
        part: its name in a complaint.
        complaints: receives in one line why a recording has failed.
    """

    def __init__(self, part: str, recorder: LaunchRecorder, complaints: list[str]) -> None:
        self._part, self._recorder, self._complaints = part, recorder, complaints
        self._uses: Counter[Hashable] = Counter()
        self._of_shape: dict[Hashable, Recording] = {}
        self._has_failed = False

    def __len__(self) -> int:
        return len(self._of_shape)

    def use(self, shape: Hashable, record: Callable[[LaunchRecorder], Recording | None]) -> Recording | None:
        """The recording of a shape; None: this use runs as written.

        Args:
            record: makes the recording once it is due; None: it cannot yet.
        """
        if shape in self._of_shape:
            return self._of_shape[shape]
        self._uses[shape] += 1
        if self._has_failed or self._uses[shape] <= PLAIN_USES or len(self) >= MAX_RECORDINGS:
            return None
        try:
            recording = record(self._recorder)
        except RuntimeError as error:  # too little memory, or an operation that cannot be recorded
            self._has_failed = True
            reason = " ".join(str(error).split())[:200]
            self._complaints.append(f"no further shape of the {self._part} is recorded as a CUDA graph: {reason}; "
                                    "--cuda-graphs off does not try it")
            return None
        if recording is not None:
            self._of_shape[shape] = recording
        return recording


def record_passes(recorder: LaunchRecorder, forward: Callable[[], None], backward: Callable[[], None]
                  ) -> tuple[Callable[[], None], Callable[[], None]]:
    """What repeats a forward pass, and what repeats the backward pass that follows it. Both have run before in this
    order: a first pass also chooses kernels and makes memory that later ones use."""
    def run_both() -> None:
        forward()
        backward()

    recorder.warm_up(run_both)
    return recorder.record(forward), recorder.record(backward)


class CudaRecorder:
    """Records CUDA graphs, all on one stream and with one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run a function on the recorder's stream."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_PASSES):
                torch.clear_autocast_cache()
                function()
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record a function's launches without running them."""
        graph = torch.cuda.CUDAGraph()
        # A weight that was cast outside the graph would keep its value in all repetitions; one that is cast inside is
        # in the graph's memory, and must not be used outside.
        torch.clear_autocast_cache()
        # Other threads, such as the one that pins batches, may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        torch.clear_autocast_cache()
        replay: Callable[[], None] = graph.replay
        return replay
