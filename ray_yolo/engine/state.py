"""A learner as plain tensors and JSON: to and from checkpoints, and other workers.

The state contains no generator state: every random draw has a key (ops.seeding), so the progress is enough to continue.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints import state_file
from ray_yolo.checkpoints.layout import checkpoint_folder
from ray_yolo.config.model_facts import plugin_of
from ray_yolo.core.errors import CheckpointError, TrainingError
from ray_yolo.core.events import EpochEvent
from ray_yolo.core.structures import Progress
from ray_yolo.core.threads import run_in_thread
from ray_yolo.core.versioned import FORMAT
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.learner import Learner, TrainState, build_learner
from ray_yolo.engine.membership import Activity, Generation
from ray_yolo.engine.spec import TrainSpec, WorkerContext

T = TypeVar("T")

MEETING_SECONDS = 5.0  # workers of which some still download meet this often


TRAINED = ("meta", "ema")
"""The entries of a captured state that inference needs."""


def capture(learner: Learner, about: dict[str, Any]) -> dict[str, Any]:
    """The complete state: tensors by name, and the JSON text `meta` with `about` (recipe, names, ...)."""
    state, optimizer = learner.state, learner.optimizer.state_dict()
    meta = {**about, "progress": list(state.progress), "best_fitness": state.best_fitness,
            "best_epoch": state.best_epoch, "class_maps": list(state.class_maps),
            "skipped_in_row": state.skipped_in_row, "epoch_sums": list(state.epoch_sums),
            "last_epoch": state.last_epoch and state.last_epoch.fields,
            "skipped": [state.skipped, state.first_skipped], "moved": state.moved,
            "scaler": learner.scaler.state_dict()}
    return {
        "meta": json.dumps(meta),
        "model": learner.model.state_dict(),
        "ema": learner.ema.model.state_dict(),
        "optimizer": {str(number): {name: torch.as_tensor(value) for name, value in entry.items() if value is not None}
                      for number, entry in optimizer["state"].items()},
    }


def restore(learner: Learner, saved: dict[str, Any]) -> None:
    """Load a captured state.

    Raises:
        CheckpointError: if the tensors do not fit the model.
    """
    meta = json.loads(saved["meta"])
    try:
        learner.model.load_state_dict(saved["model"])
        learner.ema.model.load_state_dict(saved["ema"])
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit the model: {str(error).splitlines()[-1].strip()}") from None
    optimizer = learner.optimizer.state_dict()
    # load_state_dict keeps references to its tensors; without copies, training would change the caller's dict. A fused
    # optimiser needs each state tensor in its parameter's memory layout
    trained = [parameter for group in learner.optimizer.param_groups for parameter in group["params"]]
    optimizer["state"] = {}
    for number, entry in saved["optimizer"].items():
        own = {}
        for name, value in entry.items():
            is_count = value.dim() == 0  # a count of steps
            own[name] = value.clone() if is_count else torch.empty_like(trained[int(number)]).copy_(value)
        optimizer["state"][int(number)] = own
    learner.optimizer.load_state_dict(optimizer)
    if meta["scaler"]:
        learner.scaler.load_state_dict(meta["scaler"])
    skipped, first_skipped = meta["skipped"]
    learner.state = TrainState(
        Progress(*meta["progress"]), meta["best_fitness"], meta["best_epoch"], tuple(meta["class_maps"]),
        meta["skipped_in_row"], tuple(meta["epoch_sums"]),
        meta["last_epoch"] and EpochEvent.model_validate(meta["last_epoch"]), skipped, first_skipped, meta["moved"])


def fingerprint(learner: Learner) -> Tensor:
    """() int64 hash that changes with any flipped bit of the weights, the statistics or their moving average."""
    tensors = [*learner.model.state_dict().values(), *learner.ema.model.state_dict().values()]
    sums = torch.stack([tensor.view(torch.int32).sum() for tensor in tensors if tensor.is_floating_point()])
    return (sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum()  # odd weights detect swapped tensors


def resume(learner: Learner, context: WorkerContext, collectives: Collectives, warn: Callable[[str], None]) -> None:
    """Load the newest verified checkpoint on the recording worker's storage; without one, start over. Collective.

    Raises:
        CheckpointError: if there are checkpoints and none of them can be resumed.
        TrainingError: if the recipe is exact and the checkpoint was trained with another number of threads.
    """
    spec, stored, activity = learner.spec, context.stored, context.activity

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
        if learner.state.progress.step:  # it has trained
            restore(learner, capture(build_learner(spec, context), {}))
        return

    def download_chosen() -> None:
        if stored and collectives.rank > 0:
            stored.download(spec.run_dir, chosen)

    if stored:
        run_on_all(download_chosen, collectives, activity)
    saved = state_file.read_state(checkpoint_folder(spec.run_dir, chosen) / "state.pt")
    meta = json.loads(saved["meta"])
    if spec.recipe.exact and meta["threads"] != torch.get_num_threads():  # they affect the result
        raise TrainingError(f"threads: the checkpoint was trained with {meta['threads']} arithmetic threads per "
                            f"worker, this worker uses {torch.get_num_threads()}; exact needs the same number")
    restore(learner, saved)


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


def sync_from_peer(learner: Learner, generation: Generation) -> None:
    """Load the state of the most advanced worker, from its memory. Collective.

    That worker keeps its own, and so do all if none is behind. If one is, all others get a copy, also those that have
    an equal state.
    """
    if not generation.behind:
        return
    collectives, source = generation.collectives, cast(int, generation.source)
    if collectives.rank == source:
        collectives.broadcast_state(capture(learner, {}), source)
    else:
        restore(learner, collectives.broadcast_state(None, source))


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
