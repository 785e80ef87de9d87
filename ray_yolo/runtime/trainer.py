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
from ray_yolo.config.placement import Images, Node, Placement, Resources, RunConfig, share_out
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.events import PlacementEvent, Summary, WarningEvent
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.core.system import cores, keep_freed_memory
from ray_yolo.data.image_cache import decoded_bytes, room_for_images
from ray_yolo.engine.build import Host, Job, local_device
from ray_yolo.engine.session import run_session
from ray_yolo.engine.state import TRAINED
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.remote_run import StoredRun
from ray_yolo.runs.run_dir import Run, begin_run, find_run
from ray_yolo.runs.warnings import warnings_told
from ray_yolo.runtime.graceful_stop import signals_ask
from ray_yolo.runtime.preflight import (
    check_cluster,
    check_early,
    cluster_asked_for,
    first_record,
    foreseen,
    job_of,
    read_dataset,
    slower_precision,
    with_workers,
)
from ray_yolo.sinks.base import Projection, Projections
from ray_yolo.sinks.callbacks import Callbacks
from ray_yolo.sinks.run_logger import Bookkeeping, best_epochs

if TYPE_CHECKING:
    from ray_yolo.runtime.workers.pool_jobs import CrewHandle


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
        command: Sequence[str] = tuple(sys.orig_argv), crew: CrewHandle | None = None) -> TrainResult:
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
        gpus = _join(placement, run, crew, train, val)
        if run and (slower := slower_precision(run, gpus)):
            _complain(f"warning: {slower}")
        run = run or begin_run(placement, first_record(config, train, gpus, command))  # nothing was made before
        job = job_of(run, placement.max_workers, train, val)
        resources = _share_out(placement, gpus, job)
        if why:
            resources = replace(resources, reasons=(why, *resources.reasons))
        placement = resources.placement
        callbacks = Callbacks(hooks, run.folder, job.recipe, _complain)
        told = [*([callbacks] if hooks else []), *_metrics(run, local)]
        calls = Projections(run.folder / EVENTS_FILE, told, _complain)
        try:
            with Bookkeeping(run, job, placement, local=local, quiet=quiet, link=link or {}) as books:
                books.emit(resources.event)
                summary = (_fit_here(job, placement, gpus, books, run.stored) if local else
                           _fit_on_ray(job, placement, gpus, books, crew, run.stored))
                if summary.stopped:  # by whoever has called this in a thread of his
                    raise KeyboardInterrupt
                if run.stored:
                    run.stored.bring_result()
                _complete_weights(run.folder, summary.step, books.warn)
            run.finish()  # all is told: whoever dies before this finds the run again, and nothing left to train
            callbacks.result = result = _result(run, summary)
        finally:
            calls.finish()
    finally:
        if run:
            run.release()
    return result


def foresee(config: RunConfig) -> RunConfig:
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
        recipe = job_of(run, placement.max_workers, train, val).recipe
    else:
        from ray_yolo.runtime import cluster

        recipe = foreseen(config.recipe, placement, train, cluster.foreseen_gpus(placement))
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


def _join(placement: Placement, run: Run | None, crew: CrewHandle | None, *indices: AnnotationIndex) -> float:
    """The GPUs of each worker, once there are as many as were asked for, and all can train `run` on this data."""
    if placement.num_workers == 0:
        return float(local_device(placement.gpus_per_worker).type == "cuda")
    from ray_yolo.runtime import cluster  # here, as below: Ray takes seconds, and a training without it needs none

    gpus = cluster.join(placement)
    for concern in [] if crew else check_cluster(placement, run, *indices):  # a crew's nodes were looked at before
        _complain(f"warning: {concern}")
    return gpus


def _share_out(placement: Placement, gpus: float, job: Job) -> Resources:
    """What each worker is given."""
    num_bytes = sum(decoded_bytes(index, job.recipe.imgsz) for index in (job.train, job.val))
    if placement.num_workers == 0:
        nodes, room = [Node(cores(), torch.cuda.device_count())], room_for_images()
        if placement.workers < 0 and _runs_a_script():
            placement = placement.model_copy(update={"workers": 0})
    else:
        from ray_yolo.runtime import cluster
        from ray_yolo.runtime.node_checks import least_room_for_images

        nodes, room = cluster.free_nodes(placement), least_room_for_images()
    return share_out(placement, gpus, nodes, job.recipe.threads, Images(num_bytes, room))


def _runs_a_script() -> bool:
    """Whether this process runs a file of the user's: loader processes would run it again, unless it has a guard."""
    main = sys.modules["__main__"]
    return main.__spec__ is None and hasattr(main, "__file__")


def _fit_here(job: Job, placement: Placement, gpus: float, books: Bookkeeping, stored: StoredRun | None) -> Summary:
    """The session in this process."""
    keep_freed_memory()
    device = torch.device("cuda" if gpus else "cpu")

    def tell(text: str) -> None:
        books.emit(WarningEvent(message=text))

    with signals_ask(tell) as stop_asked, warnings_told(tell, placement.loader_processes) as loader_init:
        host = Host(device=device, prepare_model=lambda model: model.to(device), cache=placement.image_cache,
                    loader_processes=placement.loader_processes, loader_init=loader_init,
                    threads=placement.threads, stored=stored.checkpoints if stored else None)
        return cast(Summary, run_session(
            job, host, placement, books.emit,
            stop_asked=lambda: stop_asked() or (stored is not None and stored.is_lost)))


def _fit_on_ray(job: Job, placement: Placement, gpus: float, books: Bookkeeping, crew: CrewHandle | None,
                stored: StoredRun | None) -> Summary:
    """The session on workers of Ray: those of a crew, or its own."""
    from ray_yolo.runtime.workers import pool_jobs
    from ray_yolo.runtime.workers.coordinator import Roster
    from ray_yolo.runtime.workers.failures import Judge, in_order
    from ray_yolo.runtime.workers.pool import has_places, train_in_places
    from ray_yolo.runtime.workers.rendezvous import start_here, watched
    from ray_yolo.runtime.workers.worker import to_wire, train_in_place, train_worker

    in_places = crew is not None or has_places(placement)
    if not in_places:
        from ray_yolo.runtime.workers import torch_trainer  # here: it takes seconds, and the others need none of it
    roster: Any = None
    if crew:
        roster = pool_jobs.CrewRoster(crew, placement.min_workers)
    elif in_places or torch_trainer.replaces_in_place(placement):
        roster = start_here(Roster, placement.min_workers)
    config = {"job": to_wire(job), "placement": placement.model_dump(mode="json"), "recorder": books.recorder,
              "roster": roster, "in_places": in_places, "stored": stored and stored.wire}
    with watched(roster, job.run_dir, books.warn):
        if crew:
            return pool_jobs.train(config, placement, job)
        if in_places:
            judge = Judge(job.run_dir, placement.max_failures, books.recorder)
            return in_order(lambda: train_in_places(
                train_in_place, config, placement, gpus, judge,
                lambda group, instead_of: books.emit(PlacementEvent(group=group, instead_of=instead_of))),
                job.run_dir, judge.tell)
        summary: Summary = torch_trainer.run_workers(train_worker, config, placement, gpus, job.run_dir, "training",
                                                 books.recorder)
    return summary


def _metrics(run: Run, local: bool) -> list[Projection]:
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
