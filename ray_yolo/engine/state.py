"""What a training is between two optimiser steps, as plain tensors and JSON, and back again.

No random state is in it: every draw is keyed (ops.seeding), so progress is enough to continue.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints import state_file
from ray_yolo.config.model_facts import plugin_of
from ray_yolo.core.errors import CheckpointError, TrainingError
from ray_yolo.core.events import EpochEvent
from ray_yolo.core.structures import Progress
from ray_yolo.engine.build import TrainComponents, TrainSpec, build
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.membership import Generation

START = Progress(0, 0, 0)


@dataclass
class TrainState:
    """Progress, and the few things that are remembered rather than computed."""

    progress: Progress = START
    best_fitness: float = -1.0
    best_epoch: int = -1
    class_maps: tuple[float, ...] = ()  # mAP50-95 per class of the last validation; drives image weights
    skipped_in_row: int = 0
    epoch_sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0)  # terms of the loss times images; images
    last_epoch: EpochEvent | None = None  # of the last finished epoch, to be repeated if it got lost
    skipped: int = 0  # steps of this epoch
    first_skipped: int = 0  # the number of the first of them
    moved: bool = False  # some step has changed the weights

    def count(self, losses: Tensor, num_images: int, skipped: bool) -> None:
        """Add the step just taken to the epoch's mean losses, or to those that were skipped."""
        self.skipped_in_row = self.skipped_in_row + 1 if skipped else 0
        if skipped:
            self.first_skipped = self.first_skipped if self.skipped else self.progress.step
            self.skipped += 1
        else:
            new = (*(losses.double() * num_images).tolist(), num_images)
            self.epoch_sums = tuple(old + more for old, more in zip(self.epoch_sums, new, strict=True))

    def close_epoch(self) -> tuple[float, ...]:
        """Go to the next epoch. Returns the mean of each term of the loss per image of this one, NaN of no image."""
        *sums, images = self.epoch_sums
        self.progress = Progress(self.progress.epoch + 1, 0, self.progress.step)
        self.epoch_sums, self.skipped = (0.0,) * len(self.epoch_sums), 0
        return tuple(value / images if images else math.nan for value in sums)


TRAINED = ("meta", "ema")
"""The parts of a captured state that whoever uses the weights needs."""


def capture(components: TrainComponents, state: TrainState, about: dict[str, Any]) -> dict[str, Any]:
    """Everything needed to continue: tensors by name, and JSON text `meta` with `about` (recipe, names, ...)."""
    optimizer = components.optimizer.state_dict()
    meta = {**about, "progress": list(state.progress), "best_fitness": state.best_fitness,
            "best_epoch": state.best_epoch, "class_maps": list(state.class_maps),
            "skipped_in_row": state.skipped_in_row, "epoch_sums": list(state.epoch_sums),
            "last_epoch": state.last_epoch and state.last_epoch.fields,
            "skipped": [state.skipped, state.first_skipped], "moved": state.moved,
            "scaler": components.scaler.state_dict()}
    return {
        "meta": json.dumps(meta),
        "model": components.model.state_dict(),
        "ema": components.ema.model.state_dict(),
        "optimizer": {str(number): _tensors(entry) for number, entry in optimizer["state"].items()},
    }


def restore(components: TrainComponents, saved: dict[str, Any]) -> TrainState:
    """Put a captured state into freshly built parts.

    Raises:
        CheckpointError: if the tensors do not fit the model.
    """
    meta = json.loads(saved["meta"])
    try:
        components.model.load_state_dict(saved["model"])
        components.ema.model.load_state_dict(saved["ema"])
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit the model: {str(error).splitlines()[-1].strip()}") from None
    optimizer = components.optimizer.state_dict()
    # load_state_dict keeps the very tensors it is given: copy, or the caller's dict would be trained along; and a fused
    # optimiser walks through memory: what belongs to a parameter has to lie as it does
    trained = [p for group in components.optimizer.param_groups for p in group["params"]]
    optimizer["state"] = {int(number): {name: torch.empty_like(trained[int(number)]).copy_(value) if value.dim()
                                        else value.clone() for name, value in entry.items()}
                          for number, entry in saved["optimizer"].items()}
    components.optimizer.load_state_dict(optimizer)
    if meta["scaler"]:
        components.scaler.load_state_dict(meta["scaler"])
    skipped, first_skipped = meta["skipped"]
    return TrainState(Progress(*meta["progress"]), meta["best_fitness"], meta["best_epoch"],
                      tuple(meta["class_maps"]), meta["skipped_in_row"], tuple(meta["epoch_sums"]),
                      meta["last_epoch"] and EpochEvent.model_validate(meta["last_epoch"]), skipped, first_skipped,
                      meta["moved"])


def fingerprint(components: TrainComponents) -> Tensor:
    """() int64 that any flipped bit of the weights, statistics or their average changes."""
    tensors = [*components.model.state_dict().values(), *components.ema.model.state_dict().values()]
    sums = torch.stack([tensor.view(torch.int32).sum() for tensor in tensors if tensor.is_floating_point()])
    return (sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum()  # swapped tensors are told apart, too


def _tensors(entry: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value) for name, value in entry.items() if value is not None}


def resume(components: TrainComponents, collectives: Collectives, warn: Callable[[str], None]) -> TrainState:
    """The state of the newest verified checkpoint, as the recording worker sees it, or a new one. Collective.

    Raises:
        CheckpointError: if there are checkpoints and none of them can be gone on from.
        TrainingError: if it is not to be gone on from with these threads.
    """
    step, spec, stored = -1, components.spec, components.context.stored
    if collectives.worker == 0:
        told = stored.download(spec.run_dir) if stored else []
        step, problems = checkpoint.recover(spec.run_dir, spec.digest)
        for problem in (*told, *problems):
            warn(f"damaged checkpoint set aside: {problem}")
    chosen = int(collectives.gather(torch.tensor([[step]]))[0])
    if chosen < 0:
        return _start_over(components) if components.optimizer.state else TrainState()
    if stored and collectives.worker:
        stored.download(spec.run_dir, chosen)
    saved = state_file.read_state(spec.run_dir / "checkpoints" / f"step-{chosen}" / "state.pt")
    _check_threads(spec, json.loads(saved["meta"]))
    return restore(components, saved)


def _start_over(components: TrainComponents) -> TrainState:
    """The state before the first step, where steps were taken that do not count."""
    context = replace(
        components.context,
        collectives=Collectives(),
        prepare_model=lambda model: model.to(components.context.device),
        cache="none",
        loader_processes=0,
    )
    return restore(components, capture(build(components.spec, context), TrainState(), {}))


def sync_from_peer(components: TrainComponents, state: TrainState, generation: Generation) -> TrainState:
    """The state of the worker that is furthest, out of its memory; `state` where nobody is behind. Collective."""
    if not generation.behind:
        return state
    collectives, source = generation.collectives, cast(int, generation.source)
    own = capture(components, state, {}) if collectives.worker == source else None
    given = collectives.share(own, source)
    return state if own else restore(components, given)


def about(spec: TrainSpec) -> dict[str, Any]:
    """What a checkpoint says of itself beside tensors."""
    plugin = plugin_of(spec.recipe.model)
    return {"format": state_file.FORMAT, "recipe": spec.recipe.model_dump(mode="json"), "digest": spec.digest,
            "names": list(spec.names), "architecture": spec.architecture, "anchors": spec.anchors,
            "threads": torch.get_num_threads(), "labels": spec.train.digest,
            "plugin": plugin and [plugin.package, plugin.version],
            "versions": {"python": platform.python_version(), "torch": torch.__version__}}


def _check_threads(spec: TrainSpec, meta: dict[str, Any]) -> None:
    """Under exact, arithmetic threads are part of the result."""
    if spec.recipe.exact and meta["threads"] != torch.get_num_threads():
        raise TrainingError(f"threads: the checkpoint was trained with {meta['threads']} arithmetic threads per "
                            f"worker, this worker uses {torch.get_num_threads()}; exact needs the same number")
