"""One training from start to end: checks, resources, run folder, workers, result.

`python -m ray_yolo.train` and `YOLO.train` call `fit`. With `num_workers` 0, the same session runs in this process,
without Ray, and leaves the same log, checkpoints and records.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from ray_yolo.checkpoints.local import check_weights, slim_weights
from ray_yolo.config.placement import Placement, RunConfig
from ray_yolo.config.recipe import AUTO_BATCH, Recipe
from ray_yolo.core import deadline
from ray_yolo.core.events import ResourcesEvent, Summary
from ray_yolo.core.formatting import format_number
from ray_yolo.core.signals import uninterrupted
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.core.system import OtherPrograms, cores, keep_freed_memory
from ray_yolo.data.image_cache import decoded_bytes, node_room
from ray_yolo.engine.callbacks import Hooks, TrainingCallbacks
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.devices import local_device
from ray_yolo.engine.loading import loader_memory
from ray_yolo.engine.membership import Activity, Rendezvous, warns_without_progress
from ray_yolo.engine.plan import Plan
from ray_yolo.engine.session import run_session
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.state import TRAINED
from ray_yolo.plots.page import Section, notebook_html, read_picture
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.run_dir import Run, begin_run, find_run
from ray_yolo.runs.warnings import forward_warnings
from ray_yolo.runs.worker_lock import await_former_workers
from ray_yolo.runtime.graceful_stop import extend_if_saved, graceful_signals, stops_at
from ray_yolo.runtime.preflight import (
    check_cluster,
    check_early,
    cluster_asked_for,
    compare_initial_weights,
    first_record,
    planned_recipe,
    read_dataset,
    slower_precision,
    spec_of_run,
    unused_lines,
    with_workers,
)
from ray_yolo.runtime.resources import Images, LoaderRoom, NodeResources, busy_line, share_out
from ray_yolo.runtime.startup import StartupStatus
from ray_yolo.sinks.base import Sink, Sinks
from ray_yolo.sinks.callbacks import Callbacks, check_functions
from ray_yolo.sinks.report import (
    dry_placement_line,
    fine_tuning_line,
    idle_line,
    licence_line,
    placement_line,
    tf32_line,
    transfer_line,
)
from ray_yolo.sinks.run_logger import RunLogger, best_epochs

if TYPE_CHECKING:
    from ray_yolo.runtime.workers.pool_jobs import PoolShare


@dataclass(frozen=True)
class TrainResult:
    """The results of a training."""

    run_dir: Path
    best: Path  #: weights of the best epoch
    last: Path  #: weights of the last epoch
    epochs: int  #: trained in all
    best_epoch: int  #: weights/best.pt is from it, counted from 1; 0 without a validation
    best_fitness: float  #: the recipe's objective: by default 0.1 mAP50 + 0.9 mAP50-95
    metrics: dict[str, float]  #: precision, recall, mAP50, mAP50-95 of weights/best.pt
    paused: bool = False  #: it ended after `stop_after` epochs or `max_hours`, with more to train

    def _repr_html_(self) -> str:
        """For a notebook: metrics, epochs and paths, and the curves if they are drawn."""
        facts = [(name, format_number(value)) for name, value in self.metrics.items()]
        facts += [("best epoch", f"{self.best_epoch} of {self.epochs}"), ("best weights", str(self.best)),
                  ("run", str(self.run_dir))]
        return notebook_html(Section("training paused" if self.paused else "training done", facts=facts),
                             read_picture(self.run_dir / "results.png"))


def fit(config: RunConfig, *, quiet: bool = False,
        command: Sequence[str] = tuple(sys.orig_argv), queue: PoolShare | None = None,
        trained: Callable[[], None] = lambda: None, has_own_records: bool = True,
        functions: Mapping[str, object] = MappingProxyType({}),
        origins: Mapping[str, str] = MappingProxyType({})) -> TrainResult:
    """Train as configured, or continue the run of the same configuration.

    Args:
        quiet: print nothing.
        command: recorded as the command of this training.
        queue: of a standing worker pool; None: start workers for this training.
        trained: called when log and weights are complete, before the records that are derived from them.
        has_own_records: start a process that makes the run's records; False if the caller has one for several runs.
        functions: of the caller, by name, as in `sinks.callbacks`; they replace those of the `callbacks` setting.
        origins: of the settings by path, as of `resolve_config`; recorded for the run's page.

    Raises:
        InputError: for all user errors, before any cluster work (exit 2).
        ResourcesError: if the cluster can never hold the workers (exit 4).
        TrainingError: if training fails for good (exit 3).
        KeyboardInterrupt: if a stop was requested.
    """
    began = time.monotonic()
    others = OtherPrograms()
    of_file, given = check_early(config), check_functions(functions)
    run = _find(config)
    try:
        with StartupStatus(sys.stderr, quiet=quiet) as status:
            status.run_dir = run.folder if run else None
            if run:
                await_former_workers(run.folder, lambda text: status.print(f"warning: {text}"))
            status.phase("reading the data set")
            read = _read_by(config, run)
            description, train, val = read_dataset(read)
            asked = config
            transfer = None if run else compare_initial_weights(config.recipe, train.names)
            config, workers_reason = with_workers(config, run)
            gpus = _connect(config.placement, run, queue, status, train, val)
            if run and (slower := slower_precision(run, gpus)):
                status.print(f"warning: {slower}")
            status.phase("building the model")
            is_new = run is None
            run = run or begin_run(config.placement, first_record(
                config, train, gpus, command, transfer, origins))
            spec = spec_of_run(run, config.placement.max_workers, train, val, read.data)
            unused = unused_lines(asked, RunConfig(recipe=spec.recipe, placement=config.placement), description, train,
                                  val, gpus) if has_own_records else []
            for line in [] if is_new else unused:  # the log of a new run has them
                status.print(line)
            placement, resources = _share_out(config.placement, gpus, spec)
            is_here = placement.num_workers == 0 and not gpus
            if is_here and (busy := busy_line(resources.threads, others.cores(), os.cpu_count() or 1)):
                status.print(f"warning: {busy}")
            reasons = [workers_reason, *resources.reasons, tf32_line(spec.recipe, gpus)]
            resources = resources.model_copy(update={"reasons": tuple(reason for reason in reasons if reason)})
            status.watch_workers(run.folder, 0 if config.placement.num_workers == 0 else config.placement.min_workers,
                                 partial(_describe_wait, config.placement, gpus))
            result = _train(run, spec, placement, resources, gpus, of_file, given, quiet=quiet, unused=unused,
                            queue=queue, trained=trained, has_own_records=has_own_records,
                            end=began + 3600 * config.placement.max_hours if config.placement.max_hours else math.inf)
    finally:
        deadline.end(run.release if run else None)
    return result


def _train(run: Run, spec: TrainSpec, placement: Placement, resources: ResourcesEvent, gpus: float, of_file: Hooks,
           given: Hooks, *, quiet: bool, unused: Sequence[str], queue: PoolShare | None, trained: Callable[[], None],
           has_own_records: bool, end: float) -> TrainResult:
    local = placement.num_workers == 0
    hooks = of_file | given
    print_error = partial(print, file=sys.stderr)
    callbacks = Callbacks(hooks, run.folder, spec.recipe, print_error)
    is_asked = (lambda: bool(callbacks.stopped_by)) if hooks else None
    sinks: list[Sink] = [callbacks] if hooks else []
    in_other_sessions = False
    if not local:
        from ray_yolo.runtime.cluster import is_shared
        from ray_yolo.runtime.prometheus import RayMetrics

        in_other_sessions = is_shared()
        sinks.append(RayMetrics(run.folder))
    own_sinks = Sinks(run.folder / EVENTS_FILE, sinks, print_error)
    try:
        with RunLogger(run, spec, placement, local=local, quiet=quiet, unused=unused,
                       writer=queue.recorder if queue else None,
                       has_own_records=has_own_records, in_other_sessions=in_other_sessions) as run_logger:
            run_logger.emit(resources)
            if lost := run.lost_checkpoints():
                run_logger.warn(lost)
            if local:
                with (_local_worker(placement, gpus, run_logger, run, hooks) as (context, rendezvous),
                      stops_at(end, rendezvous.stop, is_asked)):
                    summary = cast(Summary, run_session(spec, context, placement, run_logger.emit, rendezvous))
            else:
                from ray_yolo.runtime.workers.run import train_on_ray, worker_callbacks

                summary = train_on_ray(spec, placement, gpus, run_logger, queue, run, end, is_asked,
                                       worker_callbacks(placement.callbacks, of_file, given))
            if summary.stopped and callbacks.stopped_by and not placement.nosave:
                summary = summary.model_copy(update={"stopped": False, "stopped_early": True})
                run_logger.emit_end("done", f"{callbacks.stopped_by} returned 'stop'")
            elif summary.stopped and (callbacks.stopped_by or time.monotonic() >= end):
                summary = summary.model_copy(update={"stopped": False, "paused": True})
                by = f"{callbacks.stopped_by} returned 'stop'" if callbacks.stopped_by else (
                    f"paused after {placement.max_hours:g} hours (--hours)")
                run_logger.emit_end("stopped", by)
            if summary.stopped:  # on the request of a caller that runs this in a thread
                raise KeyboardInterrupt
            run.check_in_place()
            if not summary.paused:
                if run.remote:
                    run.remote.download_result()
                check_weights(run.folder, summary.step)
            trained()
            if not summary.paused:
                try:
                    slim_weights(run.folder, TRAINED)
                except OSError as error:
                    run_logger.warn(f"weights/ still holds whole checkpoints: {error}")
        if not summary.paused:
            run.finish()  # last: until then the same command finds the run again after a crash
        callbacks.result = result = _result(run, summary)
    finally:
        own_sinks.finish()
    return result


class Planned(NamedTuple):
    """What a start would train."""

    config: RunConfig  # it is complete as far as that is possible without a cluster
    notes: tuple[str, ...]  # about initial weights and settings that follow the placement


def dry_run(config: RunConfig) -> Planned:
    """The training of a start, after all its checks. It starts nothing and changes no run.

    Settings that only a running cluster determines stay open. Raises the same errors as `fit`.
    """
    check_early(config)
    if run := _find(config):
        run.release()
    read = _read_by(config, run)
    description, train, val = read_dataset(read)
    given = config
    transfer = run.training.transfer if run else compare_initial_weights(config.recipe, train.names)
    if (run and run.training.num_workers is not None) or not cluster_asked_for(config.placement):
        config, _ = with_workers(config, run)
    from ray_yolo.runtime import cluster

    placement = config.placement
    gpus = cluster.planned_gpus(placement)
    if run:
        asked = run.training.asked
        recipe = spec_of_run(run, placement.max_workers, train, val, read.data).recipe
    else:
        asked = config.recipe
        recipe = planned_recipe(asked, placement, train, gpus)
    planned = config.model_copy(update={"recipe": recipe})
    notes = [dry_placement_line(asked, recipe), placement_line(asked, recipe), fine_tuning_line(asked, recipe)]
    if recipe.batch_size not in (None, AUTO_BATCH) and recipe.microbatch:
        notes.append(idle_line(Plan(recipe, len(train)), placement.max_workers))
    if transfer:
        notes += [transfer.note, transfer_line(transfer, recipe.weights)]
        notes += [f"new values: {name}" for name in transfer.left_out]
        notes.append(licence_line(transfer.licence, recipe.weights))
    notes += unused_lines(given, planned, description, train, val, gpus)
    return Planned(planned, tuple(note for note in notes if note))


def _find(config: RunConfig) -> Run | None:
    return find_run(config.recipe, config.placement, labels=lambda: read_dataset(config.recipe)[1].digest)


def _read_by(config: RunConfig, run: Run | None) -> Recipe:
    """The recipe for reading the data set; with `--resume`, that of the run, possibly with a new path of the data."""
    if run is None or not config.placement.resume:
        return config.recipe
    moved = {"data": config.recipe.data} if "data" in config.recipe.model_fields_set else {}
    return run.training.recipe.model_copy(update=moved)


def _connect(placement: Placement, run: Run | None, queue: PoolShare | None, status: StartupStatus,
             *indices: AnnotationIndex) -> float:
    """Connect to the cluster, wait for its resources and check its nodes. Returns the GPUs of each worker."""
    if placement.num_workers == 0:
        return float(local_device(placement.gpus_per_worker).type == "cuda")
    with uninterrupted():
        from ray_yolo.runtime import cluster  # here, as below: Ray takes seconds

    status.phase("connecting to Ray" if cluster_asked_for(placement) else "starting Ray")
    gpus = cluster.connect_and_wait(placement, status.print)
    status.phase("checking the cluster's nodes")
    for warning in [] if queue else check_cluster(placement, run, *indices):  # the pool's nodes were checked before
        status.print(f"warning: {warning}")
    return gpus


def _describe_wait(placement: Placement, gpus: float) -> str:
    from ray_yolo.runtime import cluster

    return cluster.describe_wait(placement, gpus)


def _share_out(placement: Placement, gpus: float, spec: TrainSpec) -> tuple[Placement, ResourcesEvent]:
    num_bytes = sum(decoded_bytes(index, spec.recipe.imgsz) for index in (spec.train, spec.val))
    need = loader_memory(spec.recipe, len(spec.train), len(spec.val), gpu=gpus > 0)
    if placement.num_workers == 0:
        nodes, room = [NodeResources(cores(), torch.cuda.device_count())], node_room()
        if placement.workers < 0 and _runs_a_script():
            placement = placement.model_copy(update={"workers": 0})
    else:
        from ray_yolo.runtime import cluster
        from ray_yolo.runtime.node_checks import least_room

        nodes, room = cluster.free_nodes(placement), least_room()
    return share_out(placement, gpus, nodes, spec.recipe.threads, Images(num_bytes, room.images),
                     LoaderRoom(room.shared, need.per_loader, need.in_use))


def _runs_a_script() -> bool:
    """Whether this process runs a user's script: loader processes would run it again, unless it has a guard."""
    main = sys.modules["__main__"]
    return main.__spec__ is None and hasattr(main, "__file__")


@contextmanager
def _local_worker(placement: Placement, gpus: float, run_logger: RunLogger, run: Run, hooks: Hooks
                  ) -> Iterator[tuple[WorkerContext, Rendezvous]]:
    """Context of a session in this process: yields its worker's context, and its only group, which a signal stops."""
    keep_freed_memory()
    device, rendezvous, activity = torch.device("cuda" if gpus else "cpu"), Rendezvous(Collectives()), Activity()
    if run.remote:
        run.remote.on_loss = rendezvous.stop
    with (warns_without_progress(activity, run_logger.warn), graceful_signals(run_logger.warn, rendezvous.stop),
          forward_warnings(run_logger.warn, placement.loader_processes) as loader_init):
        yield WorkerContext(
            activity=activity, callbacks=TrainingCallbacks(hooks, run_logger.warn), device=device,
            cache=placement.image_cache,
            cuda_graphs=placement.cuda_graphs, colour_kernel=placement.colour_kernel,
            loader_processes=placement.loader_processes, loader_init=loader_init, threads=placement.threads,
            stored=run.remote.checkpoints if run.remote else None), rendezvous
        if rendezvous.orders.stop:
            run_logger.recorder.flush()
            extend_if_saved([run.folder])


def _result(run: Run, summary: Summary) -> TrainResult:
    weights = run.folder / "weights"
    _, best = best_epochs(run.folder)
    metrics = (best.metrics if best else None) or {}
    return TrainResult(run_dir=run.folder, best=weights / "best.pt", last=weights / "last.pt",
                       epochs=summary.epoch + 1, best_epoch=(best.epoch if best else summary.best_epoch) + 1,
                       best_fitness=summary.best_fitness if best is None or best.fitness is None else best.fitness,
                       metrics={name: number for name, number in metrics.items() if number is not None},
                       paused=summary.paused)
