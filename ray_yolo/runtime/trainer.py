"""One training from start to end: Placement -> Ray -> workers, with the run's records kept on the driver.

`fit` is what `python -m ray_yolo.train` and `YOLO.train` call. With `num_workers` 0 the same session runs in this
process, without Ray, and keeps the same records and checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.exceptions
import ray.train
import torch

from ray_yolo.config import Placement, Recipe, RunConfig, resolve
from ray_yolo.engine.build import Host, Job, local_device
from ray_yolo.engine.runs import Run, open_run
from ray_yolo.engine.session import run_session
from ray_yolo.errors import RayYoloError, TrainingError
from ray_yolo.ops.memory import keep_freed_memory
from ray_yolo.runtime import cluster
from ray_yolo.runtime.aside import run_aside
from ray_yolo.runtime.bookkeeping import Bookkeeping
from ray_yolo.runtime.callbacks import Callbacks, load_callbacks
from ray_yolo.runtime.prepare import check_model, first_start, foreseen, job_of, read_dataset
from ray_yolo.runtime.stopping import ask_to_stop, signals_ask
from ray_yolo.runtime.worker import to_wire, train_worker


@dataclass(frozen=True)
class TrainResult:
    """What a training leaves behind."""

    run_dir: Path
    best: Path  # weights of the best epoch
    last: Path  # weights of the last epoch
    epochs: int  # trained in all
    best_epoch: int  # counted from 0, as in results.csv
    best_fitness: float  # 0.1 mAP50 + 0.9 mAP50-95
    metrics: dict[str, float]  # precision, recall, mAP50, mAP50-95 of the last epoch


def fit(config: RunConfig, *, quiet: bool = False, link: Mapping[str, Any] | None = None,
        command: Sequence[str] = tuple(sys.orig_argv)) -> TrainResult:
    """Train as configured, or continue the run that the same configuration began.

    Args:
        quiet: print nothing.
        link: `parent_run_id` and `tags` for MLflow, for the trial of a sweep.
        command: what is recorded as the command that trains this.

    Raises:
        InputError: for anything the user can get wrong, before any cluster work (exit 2).
        ResourcesError: if the cluster can never hold the workers (exit 4).
        TrainingError: if training fails for good (exit 3).
        KeyboardInterrupt: if it was told to stop.
    """
    placement = config.placement
    check_early(config)
    found = None if placement.resume else read_dataset(config.recipe)
    run = open_run(config.recipe, placement)
    try:
        _, train, val = found or read_dataset(Recipe.model_validate(run.record["recipe"]))
        local = placement.num_workers == 0
        gpus = _local_gpus(placement) if local else cluster.connect(placement)
        if run.is_new:
            first_start(run, config, train, gpus, command)
        job = job_of(run, placement.max_workers, train, val)
        callbacks = Callbacks(placement.callbacks, run.folder, lambda text: print(text, file=sys.stderr))
        callbacks.start(job.recipe)
        result = None
        try:
            with Bookkeeping(run, job, placement, local=local, quiet=quiet, link=link or {}) as books:
                summary = (_fit_here if local else _fit_on_ray)(job, placement, gpus, books)
                if summary["stopped"]:  # by whoever has called this in a thread of his
                    raise KeyboardInterrupt
                run.finish()
            result = _result(run, summary)
        finally:
            callbacks.finish(result)
    finally:
        run.release()
    return result


def foresee(config: RunConfig) -> Recipe:
    """The recipe that a start would train by, after all its checks; nothing is started, and no run is made or changed.

    What only the GPUs of a running cluster decide stays open.

    Raises:
        InputError, ResourcesError: as `fit` does.
    """
    placement = config.placement
    check_early(config)
    if placement.resume:
        run = open_run(config.recipe, placement)
        run.release()
        recipe = Recipe.model_validate(run.record["recipe"])
        _, train, val = read_dataset(recipe)
        return job_of(run, placement.max_workers, train, val).recipe
    _, train, _ = read_dataset(config.recipe)
    gpus = _local_gpus(placement) if placement.num_workers == 0 else cluster.foreseen_gpus(placement)
    return foreseen(config.recipe, placement, train, gpus)


def check_early(config: RunConfig) -> None:
    """Refuse what does not fit together, before anything is started: GPUs that this process has not, batch sizes and
    workers, model, callbacks."""
    if config.placement.num_workers == 0:
        _local_gpus(config.placement)
    load_callbacks(config.placement.callbacks)
    if not config.placement.resume:
        resolve(config.recipe, config.placement.max_workers, gpu=False)
        check_model(config.recipe)


def _fit_here(job: Job, placement: Placement, gpus: float, books: Bookkeeping) -> dict[str, Any]:
    """The session in this process."""
    keep_freed_memory()
    device = torch.device("cuda" if gpus else "cpu")
    host = Host(device=device, prepare_model=lambda model: model.to(device), cache=placement.cache,
                loader_processes=placement.loader_processes, threads=max(1, int(placement.cpus_per_worker)))
    with signals_ask(lambda text: books.emit("warning", message=text)) as stop_asked:
        return run_session(job, host, placement, books.emit, lambda _: None, stop_asked)


def _fit_on_ray(job: Job, placement: Placement, gpus: float, books: Bookkeeping) -> dict[str, Any]:
    """The session on Ray Train workers, restarted after failures that Ray itself does not retry.

    Ray restarts worker groups (`max_failures`); a dead controller or a failed process-group setup it does not. Each
    attempt is a Ray run of its own, because our checkpoints, not Ray's, say where to continue.
    """
    cluster.check_storage(job.run_dir)
    cluster.wait_for_room(placement, gpus)
    config = {"job": to_wire(job), "placement": placement.model_dump(mode="json"), "recorder": books.recorder}
    attempts, tell = placement.max_failures, lambda text: books.emit("warning", message=text)

    def before_end(outcome: Future[ray.train.Result]) -> None:
        try:
            ask_to_stop([job.run_dir], tell, outcome.done)
        finally:
            if not outcome.done():
                cluster.stop_workers(job.run_dir)  # or they would train on, and nobody would record it

    while True:
        trainer = cluster.build_trainer(train_worker, config, placement, gpus, job.run_dir)
        try:
            return run_aside(trainer.fit, before_end).return_value
        except ray.train.WorkerGroupError as error:
            raise cause(error) from error
        except (ray.train.ControllerError, ray.exceptions.ActorDiedError) as error:
            if attempts == 0:
                raise TrainingError(f"Ray could not run the training: {error}") from error
            attempts -= 1
            reason = str(error).strip().splitlines()[-1]
            tell(f"Ray's controller failed and is started again: {reason}")


def cause(error: ray.train.WorkerGroupError) -> RayYoloError:
    """One worker's error: ours where there is one, because the others only lost their connection to it."""
    failures = sorted(error.worker_failures.items())
    for _, failure in failures:
        cause = getattr(failure, "cause", failure)
        if isinstance(cause, RayYoloError):
            return cause
    number, failure = failures[0]
    return TrainingError(f"worker {number} failed: {failure}")


def _local_gpus(placement: Placement) -> float:
    """GPUs that in-process training uses: one if there is one and it was not refused."""
    return float(local_device(placement.gpus_per_worker).type == "cuda")


def _result(run: Run, summary: dict[str, Any]) -> TrainResult:
    weights = run.folder / "weights"
    last = summary["last_epoch"] or {}
    return TrainResult(run_dir=run.folder, best=weights / "best.pt", last=weights / "last.pt",
                       epochs=summary["epoch"] + 1, best_epoch=summary["best_epoch"],
                       best_fitness=summary["best_fitness"], metrics=last.get("metrics") or {})
