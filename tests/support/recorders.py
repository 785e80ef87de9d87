"""Recorders for a CPU: a recording is the recorded function itself. That CUDA graphs repeat it to the bit, the rows of
`make gpu-test` show on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.utils._python_dispatch import _disable_current_modes

from ray_yolo.engine.cuda_graphs import LaunchRecorder, Recordings
from ray_yolo.engine.network_graph import GraphedForward, repeat_passes
from ray_yolo.models.detector import Detector


class FunctionRecorder:
    """Repeats a function by calling it."""

    def __init__(self) -> None:
        self.repeats = 0

    def warm_up(self, function: Callable[[], None]) -> None:
        function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        def repeat() -> None:
            self.repeats += 1
            function()

        return repeat


class UncountedRecorder(FunctionRecorder):
    """Repeats a function so that no mode counts its launches: those of a graph are one."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        def repeat() -> None:
            with _disable_current_modes():
                function()

        return repeat


class FailingRecorder(FunctionRecorder):
    """Has no memory for a recording."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("CUDA out of memory.\nTried to allocate 3 GiB")


def repeat_by(recorder: LaunchRecorder, network: Detector) -> GraphedForward:
    """Let a network's passes be repeated by this recorder."""
    return repeat_passes(network, Recordings("network", recorder, []))
