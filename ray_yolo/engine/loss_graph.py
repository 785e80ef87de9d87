"""The loss's forward and backward pass as CUDA graphs.

The shapes of a loss depend on the number of labels. Rows that no prediction can be assigned to are added up to a
multiple of `ROWS`, so a few recordings serve all batches. Such rows change no bit of a gradient: what they contribute
is masked, as are candidates that do not count (`ops/assign.py`). The losses themselves are sums over more zeros, whose
last bit may differ.

| memory | written by | read by |
|---|---|---|
| levels, targets | each forward pass, which copies its own there | both graphs |
| numerators, counts | the forward graph | the loss's terms |
| gradients of the numerators | each backward pass, which copies them there | the backward graph |
| gradients of the levels | the backward graph | the network's backward pass |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ray_yolo.engine.cuda_graphs import LaunchRecorder, Recordings, record_passes
from ray_yolo.models.criterion import Criterion, LossSums
from ray_yolo.ops import torch_internals
from ray_yolo.ops.assign import padded_targets

ROWS = 256
"""The numbers of targets of a recording are multiples of it."""


class GraphedLoss:
    """A criterion that records the passes of training and repeats them.

    What runs as written: passes without gradients or without images, and shapes without a recording.
    """

    def __init__(self, criterion: Criterion, recordings: Recordings[_LossRecording]) -> None:
        self._criterion, self._recordings = criterion, recordings
        self.names, self.num_counts = criterion.names, criterion.num_counts

    def measure(self, levels: Sequence[Tensor], targets: Tensor, image_size: tuple[int, int]) -> LossSums:
        """As `Criterion.measure`. The sums are valid until the next call."""
        if not (torch.is_grad_enabled() and len(levels[0]) and all(level.requires_grad for level in levels)):
            return self._criterion.measure(levels, targets, image_size)
        targets = padded_targets(targets.float(), ROWS)
        layouts = tuple((level.shape, level.stride(), level.dtype) for level in levels)
        recording = self._recordings.use((layouts, len(targets), image_size), partial(
            _LossRecording, self._criterion, levels, targets, image_size))
        if recording is None:
            return self._criterion.measure(levels, targets, image_size)
        return LossSums(*_RepeatLoss.apply(recording, targets, *levels))

    def terms(self, numerators: Tensor, counts: Tensor, progress: float = 1.0) -> Tensor:
        """As `Criterion.terms`."""
        return self._criterion.terms(numerators, counts, progress)


class _LossRecording:
    """The recorded passes for one shape of levels and targets."""

    def __init__(self, criterion: Criterion, levels: Sequence[Tensor], targets: Tensor, image_size: tuple[int, int],
                 recorder: LaunchRecorder) -> None:
        self._criterion, self._image_size = criterion, image_size
        self._levels = [level.detach().clone().requires_grad_() for level in levels]
        self._targets = targets.clone()
        self._gradient = torch.zeros(len(criterion.names), criterion.num_counts, device=targets.device)
        self._sums = LossSums(self._gradient, self._gradient)
        self._level_gradients: tuple[Tensor, ...] = ()

        self._repeat_forward, self._repeat_backward = record_passes(recorder, self._run_forward, self._run_backward)

    def forward(self, levels: Sequence[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Numerators and counts, in memory that the next call writes."""
        torch_internals.copy_([*self._levels, self._targets], [*levels, targets])
        self._repeat_forward()
        return self._sums.numerators.detach(), self._sums.counts.detach()

    def backward(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the levels, in memory that the next call writes."""
        self._gradient.copy_(gradient)
        self._repeat_backward()
        return self._level_gradients

    def _run_forward(self) -> None:
        with torch.enable_grad():
            self._sums = self._criterion.measure(self._levels, self._targets, self._image_size)

    def _run_backward(self) -> None:
        with torch.autocast(self._targets.device.type, enabled=False):
            self._level_gradients = torch.autograd.grad(self._sums.numerators, self._levels, self._gradient)


class _RepeatLoss(torch.autograd.Function):
    """The recorded passes as a function of levels; targets have no gradient."""

    @staticmethod
    def forward(ctx: Any, recording: _LossRecording, targets: Tensor, *levels: Tensor) -> tuple[Tensor, Tensor]:
        ctx.recording = recording
        numerators, counts = recording.forward(levels, targets)
        ctx.mark_non_differentiable(counts)
        return numerators, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.recording.backward(gradient))
