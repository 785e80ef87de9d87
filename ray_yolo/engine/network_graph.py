"""The network's forward and backward pass as CUDA graphs.

A recording belongs to one shape of images. Its inputs and outputs have fixed memory. So have the weights, which
optimisers change in place, and the scratch memory of BatchNorm.

| memory | written by | read by |
|---|---|---|
| images | each forward pass, which copies its images there | the forward graph |
| levels | the forward graph | the loss |
| gradients of the levels | each backward pass, which copies the loss's there | the backward graph |
| gradients of the weights | the backward graph | each backward pass, which copies them to new memory |

A microbatch's backward pass is queued before the next forward pass, so all recordings share the memory of their
activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from ray_yolo.engine.cuda_graphs import LaunchRecorder, Recordings, record_passes
from ray_yolo.engine.gradients import views_like
from ray_yolo.ops import torch_internals

LevelTensors = tuple[Tensor, ...]
PassShape = tuple[torch.Size, bool, torch.dtype]
GradientLayout = dict[int, tuple[int, ...]]
"""The strides of each level's gradient, by the level's number. The order in which a bias's gradient is summed can
depend on them: some losses give slices of one tensor, which are not dense."""


class GraphedForward:
    """A replacement for a model's `forward`, which records the passes of training and repeats them.

    What runs as written: evaluation, empty microbatches, and shapes without a recording.
    """

    def __init__(self, model: nn.Module, recordings: Recordings[_Recording]) -> None:
        self._model, self._recordings = model, recordings
        self._plain_forward: Callable[[Tensor], LevelTensors] = partial(type(model).forward, model)
        self._layouts: dict[PassShape, GradientLayout] = {}

    def __call__(self, images: Tensor) -> LevelTensors:
        """As the model's `forward`. The levels are valid until the next call."""
        if not (self._model.training and torch.is_grad_enabled() and len(images)):
            return self._plain_forward(images)
        device = images.device.type
        shape = (images.shape, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

        def record(recorder: LaunchRecorder) -> _Recording | None:
            layout = self._layouts.get(shape)  # None: no pass of this shape had a backward pass
            return _Recording(self._model, images, layout, recorder) if layout else None

        recording = self._recordings.use(shape, record)
        if recording is None:
            return self._watched_forward(shape, images)
        levels: LevelTensors = _Repeat.apply(recording, images, *recording.weights)
        return levels

    def remove(self) -> None:
        """Give the model its own forward again. The recordings and their memory end with this object."""
        del vars(self._model)["forward"]

    def _watched_forward(self, shape: PassShape, images: Tensor) -> LevelTensors:
        """A pass as written, of which the layouts of the levels' gradients are noted."""
        levels = self._plain_forward(images)
        if not all(level.requires_grad for level in levels):  # a frozen head: such a pass is not recorded
            return levels

        def note_layout(number: int, gradient: Tensor) -> None:
            strides = gradient.stride()
            if 0 in strides:  # One number stands for many elements. The recording's own memory cannot be laid out so.
                strides = torch.empty_like(gradient, device="meta").stride()
            self._layouts.setdefault(shape, {})[number] = strides

        for number, level in enumerate(levels):
            level.register_hook(partial(note_layout, number))
        return levels


def repeat_passes(model: nn.Module, recordings: Recordings[_Recording]) -> GraphedForward:
    """Replace a model's `forward` on this object. A second call replaces the first one's recordings.

    DDP and hooks on weights see no difference, because the weights are inputs of the repeated passes. Hooks on layers
    do not run.
    """
    graphed = GraphedForward(model, recordings)
    vars(model)["forward"] = graphed
    return graphed


@contextmanager
def _as_written(model: nn.Module) -> Iterator[None]:
    """Context in which a model has its own `forward`."""
    replacement = vars(model).pop("forward")
    try:
        yield
    finally:
        vars(model)["forward"] = replacement


class _Recording:
    """The recorded passes for one shape of images."""

    def __init__(self, model: nn.Module, images: Tensor, layout: GradientLayout, recorder: LaunchRecorder) -> None:
        self._model = model
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.weights = list(trained.values())
        # The weights' memory under other tensors: autograd binds a tensor to the stream of its first backward pass, and
        # the weights' own is that of the training.
        self._aliases = {name: weight.detach().requires_grad_() for name, weight in trained.items()}
        self._images = images.clone()
        self._gradients = torch.zeros(sum(weight.numel() for weight in self.weights), device=images.device)
        self._layout = layout
        self._level_gradients: list[Tensor] = []
        self._levels: LevelTensors = ()
        self._is_used: list[bool] = []  # whether the levels depend on each weight

        self._repeat_forward, self._repeat_backward = record_passes(recorder, self._run_forward, self._run_backward)

    def forward(self, images: Tensor) -> LevelTensors:
        """The levels of these images, in memory that the next call writes."""
        self._images.copy_(images)
        self._repeat_forward()
        return tuple(level.detach() for level in self._levels)

    def backward(self, level_gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the weights, in new memory: `.grad` may keep them while the next pass runs."""
        torch_internals.copy_(self._level_gradients, level_gradients)
        self._repeat_backward()
        gradients = views_like(self._gradients.clone(), self.weights)
        return [gradient if used else None for gradient, used in zip(gradients, self._is_used, strict=True)]

    def _run_forward(self) -> None:
        with torch.enable_grad(), _as_written(self._model):
            self._levels = functional_call(self._model, self._aliases, (self._images,))
        if not self._level_gradients:
            self._level_gradients = [
                torch.empty_strided(level.shape, self._layout[number], dtype=level.dtype, device=level.device).zero_()
                for number, level in enumerate(self._levels)
            ]

    def _run_backward(self) -> None:
        # A backward pass that is not recorded runs without autocast as well.
        with torch.autocast(self._images.device.type, enabled=False):
            found = torch.autograd.grad(
                self._levels, list(self._aliases.values()), self._level_gradients, allow_unused=True)
        self._is_used = [gradient is not None for gradient in found]
        places = views_like(self._gradients, self.weights)
        used_places, used_gradients = [], []
        for place, gradient in zip(places, found, strict=True):
            if gradient is not None:
                used_places.append(place)
                used_gradients.append(gradient)
        torch_internals.copy_(used_places, used_gradients)


class _Repeat(torch.autograd.Function):
    """The recorded passes as a function of images and weights."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, images: Tensor, *weights: Tensor) -> LevelTensors:
        ctx.recording = recording
        return recording.forward(images)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *level_gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.recording.backward(level_gradients))
