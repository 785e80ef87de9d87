"""The state with which a worker joins others: that of the newest checkpoint, or of the worker that is furthest."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from ray_yolo.engine import checkpoint, state_files
from ray_yolo.engine.build import Job, Parts, build
from ray_yolo.engine.membership import Generation
from ray_yolo.engine.replicas import Replicas
from ray_yolo.engine.state import TrainState, capture, restore
from ray_yolo.errors import TrainingError


def resume(parts: Parts, replicas: Replicas, warn: Callable[[str], None]) -> TrainState:
    """The state of the newest verified checkpoint, as the recording worker sees it, or a new one. Collective.

    Raises:
        CheckpointError: if there are checkpoints and none of them can be gone on from.
        TrainingError: if it is not to be gone on from with these threads.
    """
    step, job, stored = -1, parts.job, parts.host.stored
    if replicas.worker == 0:
        told = stored.bring(job.run_dir) if stored else []
        step, problems = checkpoint.recover(job.run_dir, job.digest)
        for problem in (*told, *problems):
            warn(f"damaged checkpoint set aside: {problem}")
    chosen = int(replicas.gather(torch.tensor([[step]]))[0])
    if chosen < 0:
        return _start_over(parts) if parts.optimizer.state else TrainState()
    if stored and replicas.worker:
        stored.bring(job.run_dir, chosen)
    saved = state_files.read_state(job.run_dir / "checkpoints" / f"step-{chosen}" / "state.pt")
    _check_threads(job, json.loads(saved["meta"]))
    return restore(parts, saved)


def _start_over(parts: Parts) -> TrainState:
    """The state before the first step, where steps were taken that do not count."""
    host = replace(parts.host, replicas=Replicas(), prepare_model=lambda model: model.to(parts.host.device),
                   cache="none", loader_processes=0)
    return restore(parts, capture(build(parts.job, host), TrainState(), {}))


def take_over(parts: Parts, state: TrainState, generation: Generation) -> TrainState:
    """The state of the worker that is furthest, out of its memory; `state` where nobody is behind. Collective."""
    if not generation.behind:
        return state
    replicas, source = generation.replicas, cast(int, generation.source)
    own = capture(parts, state, {}) if replicas.worker == source else None
    given = replicas.share(own, source)
    return state if own else restore(parts, given)


def about(job: Job) -> dict[str, Any]:
    """What a checkpoint says of itself beside tensors."""
    return {"format": state_files.FORMAT, "recipe": job.recipe.model_dump(mode="json"), "digest": job.digest,
            "names": list(job.names), "architecture": job.architecture, "anchors": job.anchors,
            "threads": torch.get_num_threads(), "labels": job.train.digest,
            "versions": {"python": platform.python_version(), "torch": torch.__version__}}


def _check_threads(job: Job, meta: dict[str, Any]) -> None:
    """Under exact, arithmetic threads are part of the result."""
    if job.recipe.exact and meta["threads"] != torch.get_num_threads():
        raise TrainingError(f"threads: the checkpoint was trained with {meta['threads']} arithmetic threads per "
                            f"worker, this worker uses {torch.get_num_threads()}; exact needs the same number")
