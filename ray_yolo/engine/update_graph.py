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

from ray_yolo.engine.cuda_graphs import MAX_RECORDINGS, PLAIN_USES, CudaRecorder, GraphedForward, LaunchRecorder
from ray_yolo.engine.gradients import views_like
from ray_yolo.engine.learner import Learner
from ray_yolo.engine.update import Gathered, Judged, RowLayout, Update, trained_weights
from ray_yolo.models.batch_norm import Statistics
from ray_yolo.ops import torch_internals


class GraphedUpdate(Update):
    """An `Update` that records its two functions and repeats them.

    What runs as written: steps in which a weight has no gradient, and further numbers of microbatches or images than
    `MAX_RECORDINGS`. What is not repeated, but runs on the same memory: such numbers while they are new, and everything
    new after a recording has failed.

    Args:
        graphs: of the network, which passes on the complaint of a failed recording.
        recorder: None: CUDA graphs, on a GPU.
    """

    def __init__(self, statistics: Statistics, graphs: GraphedForward, recorder: LaunchRecorder | None = None) -> None:
        super().__init__(statistics)
        self._graphs, self._recorder = graphs, recorder
        self._gradients: list[Tensor] = []
        self._parts: dict[Hashable, _Part] = {}
        self._failed = False

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

        key = ("judge", layout, num_images, learner.spec.recipe.optimizer.clip_norm)
        judged: Judged = self._repeat(key, judge, gathered)
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

    def _repeat(self, key: Hashable, function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        """What the function returns of these inputs. Inputs with equal keys have equal shapes."""
        if key not in self._parts:
            if len(self._parts) == MAX_RECORDINGS:
                return function(*inputs)
            self._parts[key] = _Part(function, inputs)
        part = self._parts[key]
        for place, value in zip(part.inputs, inputs, strict=True):
            place.copy_(value)
        if part.uses == PLAIN_USES and not self._failed:
            self._record(part, inputs[0].device)
        part.uses += 1
        part.launch()
        return part.result

    def _record(self, part: _Part, device: torch.device) -> None:
        """Let a part repeat its launches. It has run before, and needs no library: a trial would change the average."""
        if self._recorder is None:
            self._recorder = CudaRecorder(device)
        try:
            part.launch = self._recorder.record(part.run)
        except RuntimeError as error:  # too little memory, or an operation that cannot be recorded
            self._failed = True
            self._graphs.complain("update", error)


class _Part:
    """A function on memory of its own, for one shape of inputs."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        self._function = function
        self.inputs = [torch.empty_like(value) for value in inputs]
        self.uses = 0
        self.result: Any = None
        self.launch: Callable[[], None] = self.run
        """What computes the result: the function, or the repetition of its launches."""

    def run(self) -> None:
        """Call the function."""
        self.result = self._function(*self.inputs)
