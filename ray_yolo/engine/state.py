"""The state of a training between two optimiser steps, and its conversion to and from plain tensors and JSON.

The state contains no generator state: every random draw has a key (ops.seeding), so the progress is enough to continue.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints import state_file
from ray_yolo.config.model_facts import plugin_of
from ray_yolo.core.errors import CheckpointError, TrainingError
from ray_yolo.core.events import EpochEvent
from ray_yolo.core.structures import Progress
from ray_yolo.core.threads import run_in_thread
from ray_yolo.core.versioned import FORMAT
from ray_yolo.engine.build import TrainComponents, TrainSpec, build
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.membership import Activity, Generation

T = TypeVar("T")

MEETING_SECONDS = 5.0  # between two meetings of workers of which some still download


@dataclass
class TrainState:
    """Progress, and the few values that cannot be recomputed from it."""

    progress: Progress = field(default_factory=Progress)
    best_fitness: float = -1.0
    best_epoch: int = -1
    class_maps: tuple[float, ...] = ()  # mAP50-95 per class of the last validation; drives image weights
    skipped_in_row: int = 0
    epoch_sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0)  # loss terms times images; images
    last_epoch: EpochEvent | None = None  # the event of the last completed epoch: emitted again if it was lost
    skipped: int = 0  # steps of this epoch
    first_skipped: int = 0  # number of the first of them
    moved: bool = False  # a step has changed the weights

    def count(self, losses: Tensor, num_images: int, skipped: bool) -> None:
        """Add the step that has just ended to the epoch's losses, or to its skipped steps."""
        self.skipped_in_row = self.skipped_in_row + 1 if skipped else 0
        if skipped:
            self.first_skipped = self.first_skipped if self.skipped else self.progress.step
            self.skipped += 1
        else:
            new = (*(losses.double() * num_images).tolist(), num_images)
            self.epoch_sums = tuple(old + more for old, more in zip(self.epoch_sums, new, strict=True))

    def close_epoch(self) -> tuple[float, ...]:
        """Advance to the next epoch. Returns this epoch's mean of each loss term per image; NaN without images."""
        *sums, images = self.epoch_sums
        self.progress = Progress(self.progress.epoch + 1, 0, self.progress.step)
        self.epoch_sums, self.skipped = (0.0,) * len(self.epoch_sums), 0
        return tuple(value / images if images else math.nan for value in sums)


TRAINED = ("meta", "ema")
"""The entries of a captured state that inference needs."""


def capture(components: TrainComponents, state: TrainState, about: dict[str, Any]) -> dict[str, Any]:
    """The complete state: tensors by name, and the JSON text `meta` with `about` (recipe, names, ...)."""
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
        "optimizer": {str(number): {name: torch.as_tensor(value) for name, value in entry.items() if value is not None}
                      for number, entry in optimizer["state"].items()},
    }


def restore(components: TrainComponents, saved: dict[str, Any]) -> TrainState:
    """Load a captured state into newly built components.

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
    # load_state_dict keeps references to its tensors; without copies, training would change the caller's dict. A fused
    # optimiser needs each state tensor in its parameter's memory layout
    trained = [parameter for group in components.optimizer.param_groups for parameter in group["params"]]
    optimizer["state"] = {}
    for number, entry in saved["optimizer"].items():
        own = {}
        for name, value in entry.items():
            is_count = value.dim() == 0  # a count of steps
            own[name] = value.clone() if is_count else torch.empty_like(trained[int(number)]).copy_(value)
        optimizer["state"][int(number)] = own
    components.optimizer.load_state_dict(optimizer)
    if meta["scaler"]:
        components.scaler.load_state_dict(meta["scaler"])
    skipped, first_skipped = meta["skipped"]
    return TrainState(Progress(*meta["progress"]), meta["best_fitness"], meta["best_epoch"],
                      tuple(meta["class_maps"]), meta["skipped_in_row"], tuple(meta["epoch_sums"]),
                      meta["last_epoch"] and EpochEvent.model_validate(meta["last_epoch"]), skipped, first_skipped,
                      meta["moved"])


def fingerprint(components: TrainComponents) -> Tensor:
    """() int64 hash that changes with any flipped bit of the weights, the statistics or their moving average."""
    tensors = [*components.model.state_dict().values(), *components.ema.model.state_dict().values()]
    sums = torch.stack([tensor.view(torch.int32).sum() for tensor in tensors if tensor.is_floating_point()])
    return (sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum()  # odd weights detect swapped tensors


def resume(components: TrainComponents, collectives: Collectives, warn: Callable[[str], None], *, is_new: bool
           ) -> TrainState:
    """The state of the newest verified checkpoint on the recording worker's storage, or a new state. Collective.

    Args:
        is_new: the components have not trained, nor taken a state.

    Raises:
        CheckpointError: if there are checkpoints and none of them can be resumed.
        TrainingError: if the recipe is exact and the checkpoint was trained with another number of threads.
    """
    spec, stored, activity = components.spec, components.context.stored, components.context.activity

    def find_newest() -> int:
        if collectives.rank > 0:
            return -1
        download_problems = stored.download(spec.run_dir) if stored else []
        step, problems = checkpoint.recover(spec.run_dir, spec.digest)
        for problem in (*download_problems, *problems):
            warn(f"damaged checkpoint set aside: {problem}")
        return step

    found = run_on_all(find_newest, collectives, activity)
    chosen = int(collectives.gather(torch.tensor([[found]]))[0])
    if chosen < 0:
        return TrainState() if is_new else _start_over(components)

    def download_chosen() -> None:
        if stored and collectives.rank > 0:
            stored.download(spec.run_dir, chosen)

    if stored:
        run_on_all(download_chosen, collectives, activity)
    saved = state_file.read_state(spec.run_dir / "checkpoints" / f"step-{chosen}" / "state.pt")
    meta = json.loads(saved["meta"])
    if spec.recipe.exact and meta["threads"] != torch.get_num_threads():  # they affect the result
        raise TrainingError(f"threads: the checkpoint was trained with {meta['threads']} arithmetic threads per "
                            f"worker, this worker uses {torch.get_num_threads()}; exact needs the same number")
    return restore(components, saved)


def run_on_all(work: Callable[[], T], collectives: Collectives, activity: Activity) -> T:
    """Run `work` on every worker at once. Returns this worker's result, when all have ended. Collective.

    A download may take longer than a collective may wait, and longer than a worker may make no progress. Workers
    therefore meet every few seconds.
    """
    result = run_in_thread(work, "resume")
    while True:
        wait([result], MEETING_SECONDS)
        activity.enter("joining")
        ended = collectives.gather(torch.tensor([[int(result.done())]]))
        if ended.all():
            return result.result()


def _start_over(components: TrainComponents) -> TrainState:
    """The state before the first step, for components that have already trained."""
    context = replace(components.context, collectives=Collectives(), cache="none", loader_processes=0,
                      prepare_model=lambda model: model.to(components.context.device))
    return restore(components, capture(build(components.spec, context), TrainState(), {}))


def sync_from_peer(components: TrainComponents, state: TrainState, generation: Generation) -> TrainState:
    """The state of the most advanced worker, from its memory. Collective.

    That worker keeps its own, and so do all if none is behind. If one is, all others get a copy, also those that have
    an equal state.
    """
    if not generation.behind:
        return state
    collectives, source = generation.collectives, cast(int, generation.source)
    if collectives.rank == source:
        collectives.broadcast_state(capture(components, state, {}), source)
        return state
    return restore(components, collectives.broadcast_state(None, source))


def about(spec: TrainSpec) -> dict[str, Any]:
    """What a checkpoint says about its training, besides tensors and progress."""
    plugin = plugin_of(spec.recipe.model)
    return {
        "format": FORMAT,
        "recipe": spec.recipe.model_dump(mode="json"),
        "digest": spec.digest,
        "names": list(spec.names),
        "architecture": spec.architecture,
        "anchors": spec.anchors,
        "weights_licence": spec.weights_licence,
        "threads": torch.get_num_threads(),
        "labels": spec.train.digest,
        "pixel_range": dict(spec.train.pixel_range),
        "plugin": [plugin.package, plugin.version] if plugin else None,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
