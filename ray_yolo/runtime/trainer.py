"""One training from start to end: Placement -> Ray -> workers, with the run's records kept on the driver.

`fit` is what `python -m ray_yolo.train` and `YOLO.train` call. With `num_workers` 0 the same session runs in this
process, without Ray, and keeps the same records and checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ray_yolo.checkpoints.local import check_weights, slim_weights
from ray_yolo.config.placement import Images, NodeResources, Placement, Resources, RunConfig, share_out
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.events import PlacementEvent, Summary, WarningEvent
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.core.system import cores, keep_freed_memory
from ray_yolo.data.image_cache import decoded_bytes, room_for_images
from ray_yolo.engine.build import TrainSpec, WorkerContext, local_device
from ray_yolo.engine.session import run_session
from ray_yolo.engine.state import TRAINED
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.run_dir import Run, begin_run, find_run
from ray_yolo.runs.warnings import forward_warnings
from ray_yolo.runtime.graceful_stop import graceful_signals
from ray_yolo.runtime.preflight import (
    check_cluster,
    check_early,
    cluster_asked_for,
    first_record,
    planned_recipe,
    read_dataset,
    slower_precision,
    spec_of,
    with_workers,
)
from ray_yolo.sinks.base import Sink, Sinks
from ray_yolo.sinks.callbacks import Callbacks
from ray_yolo.sinks.run_logger import RunLogger, best_epochs

if TYPE_CHECKING:
    from ray_yolo.runtime.workers.pool_jobs import QueueHandle


@dataclass(frozen=True)
class TrainResult:
    """What a training leaves behind."""

    run_dir: Path
    best: Path  #: weights of the best epoch
    last: Path  #: weights of the last epoch
    epochs: int  #: trained in all
    best_epoch: int  #: of these weights; counted from 0, as in results.csv
    best_fitness: float  #: by the recipe's objective: 0.1 mAP50 + 0.9 mAP50-95 unless it says otherwise
    metrics: dict[str, float]  #: precision, recall, mAP50, mAP50-95 of the last epoch


def fit(config: RunConfig, *, quiet: bool = False, link: Mapping[str, Any] | None = None,
        command: Sequence[str] = tuple(sys.orig_argv), queue: QueueHandle | None = None) -> TrainResult:
    """Train as configured, or continue the run that the same configuration began.

    Args:
        quiet: print nothing.
        link: `parent_run_id` and `tags` for MLflow, for the trial of a sweep.
        command: what is recorded as the command that trains this.
        crew: workers that stand ready; None: it starts its own.

    Raises:
        InputError: for anything the user can get wrong, before any cluster work (exit 2).
        ResourcesError: if the cluster can never hold the workers (exit 4).
        TrainingError: if training fails for good (exit 3).
        KeyboardInterrupt: if it was told to stop.
    """
    hooks = check_early(config)
    run = _find(config)
    try:
        _, train, val = read_dataset(_read_by(config, run))
        config, why = with_workers(config, run, train)
        placement, local = config.placement, config.placement.num_workers == 0
        gpus = _join(placement, run, queue, train, val)
        if run and (slower := slower_precision(run, gpus)):
            _complain(f"warning: {slower}")
        run = run or begin_run(placement, first_record(config, train, gpus, command))  # nothing was made before
        spec = spec_of(run, placement.max_workers, train, val)
        resources = _share_out(placement, gpus, spec)
        if why:
            resources = replace(resources, reasons=(why, *resources.reasons))
        placement = resources.placement
        callbacks = Callbacks(hooks, run.folder, spec.recipe, _complain)
        told = [*([callbacks] if hooks else []), *_metrics(run, local)]
        calls = Sinks(run.folder / EVENTS_FILE, told, _complain)
        try:
            with RunLogger(run, spec, placement, local=local, quiet=quiet, link=link or {}) as run_logger:
                run_logger.emit(resources.event)
                summary = (_fit_here(spec, placement, gpus, run_logger, run) if local else
                           _fit_on_ray(spec, placement, gpus, run_logger, queue, run))
                if summary.stopped:  # by whoever has called this in a thread of his
                    raise KeyboardInterrupt
                run.download_result()
                _complete_weights(run.folder, summary.step, run_logger.warn)
            run.finish()  # all is told: whoever dies before this finds the run again, and nothing left to train
            callbacks.result = result = _result(run, summary)
        finally:
            calls.finish()
    finally:
        if run:
            run.release()
    return result


def dry_run(config: RunConfig) -> RunConfig:
    """What a start would train, and on how many workers, after all its checks. It starts nothing and changes no run.

    What only a running cluster decides stays open. What cannot be used is refused as by `fit`.
    """
    check_early(config)
    if run := _find(config):
        run.release()
    _, train, val = read_dataset(_read_by(config, run))
    if (run and run.training.num_workers is not None) or not cluster_asked_for(config.placement):
        config, _ = with_workers(config, run, train)
    placement = config.placement
    if run:
        recipe = spec_of(run, placement.max_workers, train, val).recipe
    else:
        from ray_yolo.runtime import cluster

        recipe = planned_recipe(config.recipe, placement, train, cluster.planned_gpus(placement))
    return config.model_copy(update={"recipe": recipe})


def _find(config: RunConfig) -> Run | None:
    """`find_run` of a training."""
    return find_run(config.recipe, config.placement, labels=lambda: read_dataset(config.recipe)[1].digest)


def _read_by(config: RunConfig, run: Run | None) -> Recipe:
    """The recipe by which the data set is read: of `--resume` the run's, whose data may lie elsewhere by now."""
    if run is None or not config.placement.resume:
        return config.recipe
    moved = {"data": config.recipe.data} if "data" in config.recipe.model_fields_set else {}
    return run.training.recipe.model_copy(update=moved)


def _join(placement: Placement, run: Run | None, queue: QueueHandle | None, *indices: AnnotationIndex) -> float:
    """The GPUs of each worker, once there are as many as were asked for, and all can train `run` on this data."""
    if placement.num_workers == 0:
        return float(local_device(placement.gpus_per_worker).type == "cuda")
    from ray_yolo.runtime import cluster  # here, as below: Ray takes seconds, and a training without it needs none

    gpus = cluster.connect_and_wait(placement)
    for concern in [] if queue else check_cluster(placement, run, *indices):  # a crew's nodes were looked at before
        _complain(f"warning: {concern}")
    return gpus


def _share_out(placement: Placement, gpus: float, spec: TrainSpec) -> Resources:
    """What each worker is given."""
    num_bytes = sum(decoded_bytes(index, spec.recipe.imgsz) for index in (spec.train, spec.val))
    if placement.num_workers == 0:
        nodes, room = [NodeResources(cores(), torch.cuda.device_count())], room_for_images()
        if placement.workers < 0 and _runs_a_script():
            placement = placement.model_copy(update={"workers": 0})
    else:
        from ray_yolo.runtime import cluster
        from ray_yolo.runtime.node_checks import least_room_for_images

        nodes, room = cluster.free_nodes(placement), least_room_for_images()
    return share_out(placement, gpus, nodes, spec.recipe.threads, Images(num_bytes, room))


def _runs_a_script() -> bool:
    """Whether this process runs a file of the user's: loader processes would run it again, unless it has a guard."""
    main = sys.modules["__main__"]
    return main.__spec__ is None and hasattr(main, "__file__")


def _fit_here(
    spec: TrainSpec, placement: Placement, gpus: float, run_logger: RunLogger, run: Run
) -> Summary:
    """The session in this process."""
    keep_freed_memory()
    device = torch.device("cuda" if gpus else "cpu")

    def notify(text: str) -> None:
        run_logger.emit(WarningEvent(message=text))

    with (
        graceful_signals(notify) as stop_requested,
        forward_warnings(notify, placement.loader_processes) as loader_init,
    ):
        context = WorkerContext(
            device=device,
            prepare_model=lambda model: model.to(device),
            cache=placement.image_cache,
            loader_processes=placement.loader_processes,
            loader_init=loader_init,
            threads=placement.threads,
            stored=run.remote_checkpoints,
        )
        return cast(Summary, run_session(
            spec, context, placement, run_logger.emit,
            stop_requested=lambda: stop_requested() or run.is_lost))


def _fit_on_ray(spec: TrainSpec, placement: Placement, gpus: float, run_logger: RunLogger, queue: QueueHandle | None,
                run: Run) -> Summary:
    """The session on workers of Ray: those of a crew, or its own."""
    from ray_yolo.runtime.workers import pool_jobs
    from ray_yolo.runtime.workers.coordinator import Coordinator
    from ray_yolo.runtime.workers.failures import FailurePolicy, in_order
    from ray_yolo.runtime.workers.pool import train_on_pool, uses_pool
    from ray_yolo.runtime.workers.rendezvous import start_here, watchdog
    from ray_yolo.runtime.workers.worker import to_payload, train_on_pool_worker, train_worker

    on_pool = queue is not None or uses_pool(placement)
    if not on_pool:
        from ray_yolo.runtime.workers import torch_trainer  # here: it takes seconds, and the others need none of it
    coordinator: Any = None
    if queue:
        coordinator = pool_jobs.JobCoordinator(queue, placement.min_workers)
    elif on_pool or torch_trainer.replaces_in_place(placement):
        coordinator = start_here(Coordinator, placement.min_workers)
    config = {"spec": to_payload(spec), "placement": placement.model_dump(mode="json"), "recorder": run_logger.recorder,
              "coordinator": coordinator, "on_pool": on_pool, "stored": run.remote_payload}
    with watchdog(coordinator, spec.run_dir, run_logger.warn):
        if queue:
            return pool_jobs.train(config, placement, spec)
        if on_pool:
            policy = FailurePolicy(spec.run_dir, placement.max_failures, run_logger.recorder)
            return in_order(lambda: train_on_pool(
                train_on_pool_worker, config, placement, gpus, policy,
                lambda group, instead_of: run_logger.emit(PlacementEvent(group=group, instead_of=instead_of))),
                spec.run_dir, policy.notify)
        summary: Summary = torch_trainer.run_workers(train_worker, config, placement, gpus, spec.run_dir, "training",
                                                 run_logger.recorder)
    return summary


def _metrics(run: Run, local: bool) -> list[Sink]:
    """What Ray is told, if it is there."""
    if local:
        return []
    from ray_yolo.runtime.prometheus import RayMetrics

    return [RayMetrics(run.folder)]


def _complete_weights(run_dir: Path, step: int, warn: Callable[[str], None]) -> None:
    """Leave the weights of an ended training as they are used: verified, and without what only training needs."""
    check_weights(run_dir, step)
    try:
        slim_weights(run_dir, TRAINED)
    except OSError as error:
        warn(f"weights/ still holds whole checkpoints: {error}")


def _complain(text: str) -> None:
    print(text, file=sys.stderr)


def _result(run: Run, summary: Summary) -> TrainResult:
    weights = run.folder / "weights"
    _, best = best_epochs(run.folder)
    last, epoch, fitness = summary.last_epoch, summary.best_epoch, summary.best_fitness
    return TrainResult(run_dir=run.folder, best=weights / "best.pt", last=weights / "last.pt",
                       epochs=summary.epoch + 1, best_epoch=best.epoch if best else epoch,
                       best_fitness=fitness if best is None or best.fitness is None else best.fitness,
                       metrics={name: number for name, number in ((last and last.metrics) or {}).items()
                                if number is not None})
