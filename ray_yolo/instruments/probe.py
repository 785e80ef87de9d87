"""One optimiser step seen from inside: its pictures, the loss of each, its gradients, and what is not finite.

The training loop knows nothing of it. `ReplaySession` is a session that replaces two of its parts by ones that compute
the same and report to a `StepProbe`, and hooks on the model exist in the observed step only:

| part | what it reports |
|---|---|
| gradients | the start of each step, and the summed gradient before it is clipped |
| criterion | predictions and targets of each microbatch |
| hooks on modules and weights | the network's input, and the first tensors that are not finite |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import QUAD
from ray_yolo.core.errors import TrainingError
from ray_yolo.core.events import Emit, Summary
from ray_yolo.core.structures import Orders
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.gradients import GradientTree
from ray_yolo.engine.loop import StepResult
from ray_yolo.engine.membership import Rendezvous
from ray_yolo.engine.plan import Step
from ray_yolo.engine.session import Session
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.team import Team
from ray_yolo.models.criterion import Criterion, LossSums, image_numerators
from ray_yolo.ops.schedule import Rates

StepPhase = Literal["weights", "forward", "loss", "backward", "sum"]


class NotFinite(NamedTuple):
    """The first tensor of a phase that is not finite.

    | phase | `module` | `tensor` |
    |---|---|---|
    | weights: before the step | the layer | its weight, bias or statistic |
    | forward | the module whose output it is | output |
    | loss | loss | the term |
    | backward: of one microbatch | the module | gradient of its output, or of its weight or bias |
    | sum: over microbatches | the layer | summed gradient of its weight or bias |
    """

    phase: StepPhase
    module: str
    tensor: str
    microbatch: int | None = None  # a step's microbatches count from 0


class LayerNorms(NamedTuple):
    """Lengths (L2) of the gradient of a layer's parameters, before clipping, and of the parameters."""

    layer: str
    gradient: float
    weights: float


@dataclass
class ObservedMicrobatch:
    """What the network saw in a microbatch. All tensors are on the host."""

    images: Tensor  # (B, 3, H, W) uint8, as the network saw them
    targets: Tensor = field(default_factory=lambda: torch.zeros(0, 6))  # rows [image, class, x1, y1, x2, y2], pixels
    losses: Tensor = field(default_factory=lambda: torch.zeros(0, 0))  # (B, terms), with the microbatch's denominators


class StepProbe:
    """What happens inside one step.

    Args:
        wanted: number of the step to observe, counted from 1.
        before: number of steps trained so far.
    """

    def __init__(self, model: nn.Module, wanted: int, before: int) -> None:
        self._model, self._wanted, self._begun = model, wanted, before
        self._handles: list[RemovableHandle] = []
        self._numerators = torch.zeros(0)  # a row for each image of the present microbatch
        self.microbatches: list[ObservedMicrobatch] = []
        self.not_finite: dict[StepPhase, NotFinite] = {}
        """By phase, in the order in which they appeared: the first one is the cause of the others."""
        self.layers: list[LayerNorms] = []

    @property
    def has_begun(self) -> bool:
        """Whether the observed step has begun, or is over."""
        return self._begun >= self._wanted

    @property
    def is_active(self) -> bool:
        """Whether the observed step is in progress."""
        return bool(self._handles)

    def start_step(self) -> None:
        """A step begins."""
        self._begun += 1
        if self._begun != self._wanted:
            return
        for name, tensor in self._model.state_dict().items():
            self._check("weights", *_split(name), tensor)
        self._handles.append(self._model.register_forward_pre_hook(self._see_images))
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(partial(self._see_output, name)))
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                layer, kind = _split(name)
                see = partial(self._check, "backward", layer, f"gradient of its {kind}")
                self._handles.append(parameter.register_hook(_without_result(see)))

    def end_step(self, scale: float) -> None:
        """The backward passes of a step are over, and `.grad` has the sum over its microbatches, times `scale`."""
        if not self.is_active:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        squares: dict[str, list[float]] = {}  # sums of squares of gradient and weights, by layer
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None:
                continue
            layer, kind = _split(name)
            self._check("sum", layer, f"summed gradient of its {kind}", parameter.grad, in_microbatch=False)
            sums = squares.setdefault(layer, [0.0, 0.0])
            sums[0] += float(parameter.grad.double().div(scale).square().sum())
            sums[1] += float(parameter.detach().double().square().sum())
        self.layers = [LayerNorms(layer, gradient**0.5, weights**0.5)
                       for layer, (gradient, weights) in squares.items()]

    def see_predictions(self, numerators: Tensor, targets: Tensor) -> None:
        """The sums of the loss of each image of the present microbatch, and its targets."""
        self._numerators = numerators
        self.microbatches[-1].targets = targets.cpu()

    def see_terms(self, names: Sequence[str], terms: Tensor, terms_of: Callable[[Tensor], Tensor]) -> None:
        """The loss terms of the present microbatch, and how they follow from numerators."""
        rows = [terms_of(numerators).detach().cpu() for numerators in self._numerators]
        self.microbatches[-1].losses = torch.stack(rows) if rows else torch.zeros(0, len(names))
        for name, term in zip(names, terms.detach(), strict=True):
            self._check("loss", "loss", name, term)

    def _see_images(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        pixels = inputs[0].detach().mul(255).round().clamp(0, 255).to(torch.uint8).cpu()
        self.microbatches.append(ObservedMicrobatch(pixels))

    def _see_output(self, name: str, _: nn.Module, inputs: object, output: object) -> None:
        """Check a module's output, and later the gradient of it. Inner modules come before those that hold them."""
        module = name or "the model"
        for tensor in _tensors(output):
            self._check("forward", module, "output", tensor)
            if tensor.requires_grad:
                tensor.register_hook(_without_result(partial(self._check, "backward", module,
                                                             "gradient of its output")))

    def _check(self, phase: StepPhase, module: str, tensor: str, value: Tensor, *, in_microbatch: bool = True) -> None:
        if phase in self.not_finite or not value.is_floating_point() or bool(value.isfinite().all()):
            return
        microbatch = len(self.microbatches) - 1 if in_microbatch and phase != "weights" else None
        self.not_finite[phase] = NotFinite(phase, module, tensor, microbatch)


def _split(name: str) -> tuple[str, str]:
    """Layer and kind of a parameter or statistic: 'model.3.conv.weight' is the weight of 'model.3.conv'."""
    layer, _, kind = name.rpartition(".")
    return layer, kind


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _tensors(part)


def _without_result(see: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A hook of a tensor, whose result would replace the gradient."""
    def hook(gradient: Tensor) -> None:
        see(gradient)

    return hook


class _ObservedTree(GradientTree):
    """A gradient tree that reports each step to a probe."""

    def __init__(self, replica: nn.Module, row_size: int, probe: StepProbe, scaler: torch.amp.GradScaler) -> None:
        super().__init__(replica, Collectives(), row_size)
        self._probe, self._scaler = probe, scaler

    def start(self, counts: Sequence[int]) -> None:
        self._probe.start_step()
        super().start(counts)

    def finish(self) -> Tensor:
        row = super().finish()
        self._probe.end_step(self._scaler.get_scale())
        return row


class _ObservedLoss:
    """A loss that reports each microbatch of the observed step to a probe."""

    def __init__(self, loss: Criterion, probe: StepProbe) -> None:
        self._loss, self._probe = loss, probe
        self.names, self.num_counts = loss.names, loss.num_counts

    def measure(self, levels: Sequence[Tensor], targets: Tensor, image_size: tuple[int, int]) -> LossSums:
        """As `Criterion.measure`."""
        if self._probe.is_active:
            self._probe.see_predictions(image_numerators(self._loss, levels, targets, image_size), targets)
        return self._loss.measure(levels, targets, image_size)

    def terms(self, numerators: Tensor, counts: Tensor, progress: float = 1.0) -> Tensor:
        """As `Criterion.terms`."""
        terms = self._loss.terms(numerators, counts, progress)
        if self._probe.is_active:
            self._probe.see_terms(self.names, terms, lambda own: self._loss.terms(own, counts, progress))
        return terms


class ObservedImage(NamedTuple):
    """A picture of the observed step."""

    microbatch: int
    samples: tuple[int, ...]  # numbers of the images in the data set; several under `quad`
    pixels: Tensor  # (3, H, W) uint8, as the network saw it
    boxes: Tensor  # (n, 4) xyxy in its pixels
    classes: Tensor  # (n,) int64
    losses: tuple[float, ...]  # its part of each term of the step's loss: the parts of all pictures add up to it


class ReplaySession(Session):
    """A session on one worker that trains up to one step, observes it, stops after it, and saves nothing.

    It resumes from the newest checkpoint in `spec.run_dir`, as every session.

    Args:
        wanted: number of the step to observe.
        before: step of that checkpoint; 0 without one.
        trained: called after each step with its number.
    """

    def __init__(self, spec: TrainSpec, context: WorkerContext, wanted: int, before: int, emit: Emit,
                 trained: Callable[[int], None] = lambda step: None) -> None:
        super().__init__(spec, context, Placement(nosave=True), emit, Rendezvous(Collectives()))
        learner, self._trained = self.learner, trained
        self.probe = probe = StepProbe(learner.model, wanted, before)
        build_loss = learner.family.build_loss

        def build_observed_loss(*settings: Any) -> Criterion:  # also for later settings of the recipe
            return _ObservedLoss(build_loss(*settings), probe)

        learner.family = learner.family._replace(build_loss=build_observed_loss)
        learner.criterion = _ObservedLoss(learner.criterion, probe)
        self.wanted = wanted
        self.results: dict[int, StepResult] = {}
        """By step."""
        self.images: list[ObservedImage] = []

    def replay(self) -> None:
        """Train up to the observed step.

        Raises:
            TrainingError: if training fails before it.
        """
        try:
            self.train()
        except TrainingError:  # it may be the last of too many steps that were not finite
            if self.wanted not in self.results:
                raise

    @contextmanager
    def join(self) -> Iterator[Team | Summary | None]:
        with super().join() as team:
            if isinstance(team, Team):
                team.gradients = _ObservedTree(team.network, team.statistics.size, self.probe, self.learner.scaler)
            yield team

    def _poll_orders(self) -> Orders:
        return Orders(stop=self.probe.has_begun)

    def after_step(self, team: Team, step: Step, rates: Rates, result: StepResult) -> None:
        number = self.learner.state.progress.step
        self.results[number] = result
        if number == self.wanted:
            self.images = self._observed_images(team, step)
        self._trained(number)
        super().after_step(team, step, rates, result)

    def _observed_images(self, team: Team, step: Step) -> list[ObservedImage]:
        """The pictures of the observed step, in the order of its images."""
        plan, images = self.learner.plan, []
        order = team.loaders.sampler.order(self.learner.state.progress.epoch)
        for microbatch, seen in zip(plan.shard(step, 0, 1), self.probe.microbatches, strict=True):
            samples = [int(order[position]) for position in microbatch.images]
            per_picture = QUAD if plan.recipe.quad else 1
            share = microbatch.num_images / len(step.images)
            for number, pixels in enumerate(seen.images):
                rows = seen.targets[seen.targets[:, 0] == number]
                own = samples[number * per_picture : (number + 1) * per_picture]
                images.append(ObservedImage(microbatch.number, tuple(own), pixels, rows[:, 2:], rows[:, 1].long(),
                                            tuple((seen.losses[number] * share).tolist())))
        return images
