"""Clip and averages of a step as CUDA graphs: two recordings, because the host reads between them whether the step was
skipped.

The optimiser's step itself is not recorded. Torch's fused kernels compute in float64 with learning rate and momentum as
numbers. A recording would keep the numbers of its step. A rate in a tensor is float32 there, which rounds otherwise,
and a momentum in a tensor is refused. The step is one operation for each group of weights, for Adam three.

| memory | written by | read by |
|---|---|---|
| gradients | each step, which copies its own there; the clip | the optimiser |
| the workers' rows | each step, which copies its own there | the clip |
| statistics, share of the average | each step, which copies its own there | the averages |
| flag to skip, numbers for the host | the clip | the optimiser, the host's copy |

A share in a tensor moves the average to the same bits as a number does: torch's kernels round both to float32, and
then compute alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ray_yolo.engine.cuda_graphs import LaunchRecorder, Recordings
from ray_yolo.engine.gradients import views_like
from ray_yolo.engine.learner import Learner
from ray_yolo.engine.update import Judged, Update, trained_weights
from ray_yolo.engine.worker_rows import Gathered, RowLayout
from ray_yolo.models.batch_norm import Statistics
from ray_yolo.ops import torch_internals


class GraphedUpdate(Update):
    """An `Update` that records its two functions and repeats them.

    What runs as written: steps in which a weight has no gradient, and numbers of microbatches or images without a
    recording. In all other steps the gradients are copied to one place, from which the recordings read them.
    """

    def __init__(self, statistics: Statistics, recordings: Recordings[_UpdateRecording]) -> None:
        super().__init__(statistics)
        self._recordings = recordings
        self._gradients: list[Tensor] = []

    def judge(self, learner: Learner, gathered: Gathered, layout: RowLayout, num_images: int) -> Judged:
        """As `Update.judge`. The result is valid until the next call."""
        weights = trained_weights(learner.optimizer)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if len(gradients) < len(weights):
            return super().judge(learner, gathered, layout, num_images)
        self._gradients = self._gradients or [torch.empty_like(gradient) for gradient in gradients]
        torch_internals.copy_(self._gradients, gradients)
        for weight, place in zip(weights, self._gradients, strict=True):
            weight.grad = place

        def judge(*memory: Tensor) -> Judged:
            return super(GraphedUpdate, self).judge(learner, Gathered(*memory), layout, num_images)

        shape = ("judge", layout, num_images, learner.spec.recipe.optimizer.clip_norm)
        judged: Judged = self._repeat(shape, judge, gathered)
        return judged

    def average(self, learner: Learner, total: Tensor, count: int, number: int) -> None:
        """As `Update.average`."""
        share = torch.full((), learner.ema.share(number), device=total.device)
        self._repeat(("average", count), partial(self._average, learner, count), (total, share))

    def _average(self, learner: Learner, count: int, total: Tensor, share: Tensor) -> None:
        self._statistics.apply(total, count)
        averages = learner.ema.pairs(learner.model).averages
        shares = share.repeat(sum(average.numel() for average in averages))
        learner.ema.move(learner.model, views_like(shares, averages))

    def _repeat(self, shape: Hashable, function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        """What the function returns of these inputs. Calls with equal shapes are repetitions of one function."""
        recording = self._recordings.use(shape, partial(_UpdateRecording, function, inputs))
        return function(*inputs) if recording is None else recording.repeat(inputs)


class _UpdateRecording:
    """A recorded function of inputs of one shape."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Tensor], recorder: LaunchRecorder) -> None:
        self._function = function
        self._inputs = [value.clone() for value in inputs]
        self._result: Any = None
        # Without a warm-up, which would change the averages. The function has run before, and needs no library.
        self._launch = recorder.record(self._run)

    def repeat(self, inputs: Sequence[Tensor]) -> Any:
        """What the function returns of these inputs, in memory that the next call writes."""
        for place, value in zip(self._inputs, inputs, strict=True):
            place.copy_(value)
        self._launch()
        return self._result

    def _run(self) -> None:
        self._result = self._function(*self._inputs)
