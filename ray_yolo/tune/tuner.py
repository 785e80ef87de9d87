"""A sweep over the whole cluster: many trials at once, each a distributed training, with one ledger.

    <project>/<name>/ledger.jsonl        each proposal, the rows it follows from, and its result
    <project>/<name>/trials/trialN/      the run folder of each trial, as of any training
    <project>/<name>/evolve.csv, hyp_evolve.yaml, *.png    computed from the ledger

If the driver is killed, the same command continues the sweep: ended rows stay, running ones resume from their
checkpoints under their own numbers, and proposals continue. With more --trials, a finished sweep of that --name
continues.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import ray
import ray.tune

from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import recipe_digest, resolve
from ray_yolo.core.errors import ConfigError, TrainingError
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.index_cache import cache_folder
from ray_yolo.runs.folders import storage_folder
from ray_yolo.runs.location import location
from ray_yolo.runs.record import LEDGER_FILE, SweepRecord
from ray_yolo.runs.run_dir import Run, begin_run, find_run
from ray_yolo.runtime import cluster
from ray_yolo.runtime.graceful_stop import request_stop, run_in_background
from ray_yolo.runtime.preflight import (
    check_cluster,
    check_early,
    check_model,
    planned_recipe,
    read_dataset,
    resolve_recipe,
)
from ray_yolo.runtime.ray_internals import on_node
from ray_yolo.runtime.workers.pool_jobs import standing_pool
from ray_yolo.sinks.mlflow_client import tracking_uri
from ray_yolo.sinks.report import settings_line
from ray_yolo.sinks.run_logger import finalize_abandoned_run
from ray_yolo.storage.store import is_address
from ray_yolo.tune.console import SweepDisplay, closing_message
from ray_yolo.tune.evolution import Space, check_algorithm, grid_size
from ray_yolo.tune.files import drop_weights, keep_best, read_warm_start, write_sweep_files
from ray_yolo.tune.ledger import Ledger, Sweep, read_ledger, read_trials
from ray_yolo.tune.mlflow import Status, deliver, sweep_run
from ray_yolo.tune.plots import draw_plots
from ray_yolo.tune.search import Pbt, Search, TuneConfig
from ray_yolo.tune.searcher import LedgerCallback, LedgerSearcher, build_scheduler, tune_config_of
from ray_yolo.tune.space import TuneSpace, combinations, load_space
from ray_yolo.tune.trial import train_trial
from ray_yolo.tune.trials import Trial, best_trial, overlay


def concurrent_trials(config: TuneConfig, gpus: float) -> int:
    """The number of trials that fit into the cluster at once.

    Tune does not know what a trial's own workers need. Without this limit each trial would hold some of its workers,
    and all would wait for each other (a deadlock).

    Raises:
        ConfigError: if not even one trial fits.
    """
    if not (slots := room_for_trials(config, gpus)):
        total, workers = ray.cluster_resources(), config.sweep.workers_per_trial
        raise ConfigError(f"workers_per_trial: {workers} workers need {config.placement.cpus * workers:g} CPU and "
                          f"{gpus * workers:g} GPU, the cluster has {total.get('CPU', 0):g} and "
                          f"{total.get('GPU', 0):g}; use fewer")
    return slots


def room_for_trials(config: TuneConfig, gpus: float) -> int:
    """The number of trials that fit into the present cluster at once; 0: none."""
    total, workers = ray.cluster_resources(), config.sweep.workers_per_trial
    needed = {"CPU": config.placement.cpus * workers, "GPU": gpus * workers}
    slots = min(math.floor(total.get(kind, 0) / amount + 1e-9) for kind, amount in needed.items() if amount)
    return slots if config.sweep.max_concurrent == "auto" else min(slots, config.sweep.max_concurrent)


def trials_ahead(slots: int) -> int:
    """How many trials start up while others train: as few as keep the slots busy, since proposals ignore their results.

    Start-up takes some seconds, the shortest trials some ten. Two slots need two, because idle workers help other
    trials and two may end together; of more slots about an eighth ends during a start-up.
    """
    return min(slots, max(2, slots // 8))


@dataclass(frozen=True)
class SearchResult:
    """The result of a sweep."""

    folder: Path
    trials: tuple[Trial, ...]
    best: Trial


def search(config: TuneConfig, *, quiet: bool = False) -> SearchResult:
    """Run a sweep, or continue the one that the same configuration started.

    Raises:
        InputError: for bad input, before any cluster work.
        TrainingError: if every trial failed.
    """
    config, space, train = _checked(config)
    run = find_run(config.recipe, config.placement,
                   lambda folder: len(read_trials(read_ledger(folder / LEDGER_FILE))) < config.sweep.trials)
    try:
        gpus = cluster.connect(config.placement)
        slots = concurrent_trials(config, gpus)
        for warning in check_cluster(config.placement, run, train):
            print(f"warning: {warning}", file=sys.stderr)
        resolved = resolve_recipe(config.recipe, config.placement, train, gpus).model_copy(
            update={"objective": space.search.recipe_objective})
        run = run or begin_run(config.placement, SweepRecord(
            digest=recipe_digest(config.recipe), space=config.sweep.space, trials=config.sweep.trials))
        sweep = Sweep(space.space, space.search, config.recipe, train.digest)
        ledger = Ledger(run.folder / LEDGER_FILE, sweep, resolved, run.remote)
        display = SweepDisplay(io.StringIO() if quiet else sys.stdout, config.sweep.trials, config.recipe.epochs,
                               trials=ledger.trials)
        return _search(config, space, ledger, run, slots, gpus, display)
    finally:
        if run:
            run.release()


def dry_run(config: TuneConfig) -> TuneConfig:
    """The resolved configuration of a sweep, after all checks. Starts and writes nothing.

    Raises:
        InputError: as `search` does.
    """
    config, _, train = _checked(config)
    recipe = planned_recipe(config.recipe, config.placement, train, cluster.planned_gpus(config.placement))
    return config.model_copy(update={"recipe": recipe})


def _checked(config: TuneConfig) -> tuple[TuneConfig, TuneSpace, AnnotationIndex]:
    """Check everything that needs no cluster.

    Returns:
        The configuration, with each trial's workers in its placement and at most as many trials as a grid has points;
        the space with warm starts; and the training labels.

    Raises:
        InputError: for what cannot be searched or trained.
    """
    loaded, settings = load_space(config.sweep.space, config.recipe), config.sweep
    space = loaded.space
    trials = min(settings.trials, grid_size(space.genes)) if space.algorithm == "grid" else settings.trials
    config = config.model_copy(update={
        "sweep": settings.model_copy(update={"trials": trials}),
        "placement": config.placement.model_copy(update={"num_workers": settings.workers_per_trial})})
    check_algorithm(space)
    loaded.search.check(config.recipe)
    if isinstance(loaded.search.scheduler, Pbt) and is_address(config.placement.storage_path):
        raise ConfigError("storage_path: trials of population based training continue from each other's files; give a "
                          "folder that all nodes mount, or another scheduler")
    check_early(RunConfig(recipe=config.recipe, placement=config.placement))
    _check_genes(config, space)
    _, train, _ = read_dataset(config.recipe)
    warm = read_warm_start(settings.warm_start, space, loaded.search) if settings.warm_start else []
    return config, loaded._replace(space=replace(space, starts=(*space.starts, *warm))), train


def _check_genes(config: TuneConfig, space: Space) -> None:
    """Refuse genes by which a trial could not be trained: batches that workers cannot share, models, weights."""
    for genes in combinations(space.genes):
        resolve(overlay(config.recipe, genes), config.placement.max_workers, gpu=False)
    for name, value in [(gene.name, str(value)) for gene in space.genes if gene.name in ("model", "weights")
                        for value in gene.values]:
        check_model(overlay(config.recipe, {name: value}))
        if Path(value).is_file() and not Path(value).is_absolute():
            raise ConfigError(f"{name}: {value}: give an absolute path; each trial has its own working folder")


def _search(config: TuneConfig, space: TuneSpace, ledger: Ledger, run: Run, slots: int, gpus: float,
            display: SweepDisplay) -> SearchResult:
    """Start or continue the sweep of a run folder."""
    total, folder = config.sweep.trials, run.folder
    done = sum(trial.has_ended for trial in ledger.trials)
    display.say(f"{location(folder)}: {total} trials, {done} of them done, {slots} at a time")
    display.say(f"each trial, except for its genes: {settings_line(ledger.recipe)}")
    all_random = space.search.random_warning(total, len(space.space.starts))
    for warning in filter(None, (*space.warnings, all_random, ledger.warning)):
        display.say(f"warning: {warning}")
    parent = _track(config, folder, ledger.trials, "RUNNING")
    try:
        with contextlib.closing(display):
            _run_trials(config, space, ledger, folder, slots, gpus, parent, display)
        return _finish(config, ledger, run, parent, display)
    except BaseException as error:
        interrupted = isinstance(error, (KeyboardInterrupt, SystemExit))
        if interrupted:
            display.say("interrupted; the same command continues")
        if parent:
            _track(config, folder, ledger.trials, "KILLED" if interrupted else "FAILED")
        raise


def _uri(config: TuneConfig) -> str | None:
    return tracking_uri(config.placement.mlflow_uri, storage_folder(config.placement), os.environ)


def _track(config: TuneConfig, folder: Path, trials: Sequence[Trial], status: Status) -> str | None:
    """Update the sweep's MLflow run. Returns its id; None without tracking."""
    uri = _uri(config)
    return deliver(folder, uri, sweep_run(config, trials, status)) if uri else None


def _run_trials(config: TuneConfig, space: TuneSpace, ledger: Ledger, folder: Path, slots: int, gpus: float,
                parent: str | None, display: SweepDisplay) -> None:
    """Run the unfinished and the newly proposed trials with Ray Tune, until all have ended.

    One worker pool trains all trials. While its workers are busy, `trials_ahead` more trials start up, unless
    --max-concurrent limits them.
    """
    payload = _payload(config, ledger, folder, space.search, parent)
    workers = config.placement.model_copy(update={"num_workers": (1, slots * config.sweep.workers_per_trial)})
    grows = config.sweep.max_concurrent == "auto"
    ahead = grows and not isinstance(space.search.scheduler, Pbt)

    @lru_cache(maxsize=1)
    def limit(second: int) -> int:
        slots = max(1, room_for_trials(config, gpus))
        return slots + ahead * trials_ahead(slots)

    with standing_pool(workers, gpus, display.say, grows=grows) as queue:
        trainable = ray.tune.with_parameters(train_trial, payload=payload, queue=queue)
        try:
            _tune(config, space, ledger, folder, lambda: limit(int(time.monotonic())), trainable, display)
        except (KeyboardInterrupt, SystemExit):  # the workers still exist, and can save the step in progress
            running = (trial.folder_name for trial in ledger.trials if trial.state == "running")
            request_stop([folder / "trials" / name for name in running], display.say)
            raise


def _tune(config: TuneConfig, space: TuneSpace, ledger: Ledger, folder: Path, limit: Callable[[], int],
          trainable: Any, display: SweepDisplay) -> None:
    """Run the trainable for each trial, at most `limit()` at once."""
    node: dict[str, Any] = {}
    if ledger.stored:  # the folder of the sweep is on this node
        node = {"bundle_label_selector": [on_node(ray.get_runtime_context().get_node_id())]}
    # Memory, not CPU: even a hundredth of a CPU would take the slot of a worker
    trainable = ray.tune.with_resources(trainable, ray.tune.PlacementGroupFactory([{"memory": 1e6}], **node))
    scheduler = build_scheduler(space.search, space.space, config.recipe.epochs, config.recipe.seed)
    param_space: dict[str, Any] = {}
    searcher: LedgerSearcher | None = LedgerSearcher(ledger, config.sweep.trials, limit)
    if isinstance(space.search.scheduler, Pbt):  # Ray's takes the whole population at once, and no searcher
        param_space, searcher = _population(ledger, config.sweep.trials), None
        if not param_space:
            return
    drops = searcher is not None and not config.sweep.keep_weights  # under PBT other trials may continue from them
    callback = LedgerCallback(ledger, display, scheduler, searcher, drops=drops)
    tune = ray.tune.Tuner(
        trainable, param_space=param_space,
        tune_config=ray.tune.TuneConfig(
            search_alg=searcher, num_samples=-1 if searcher else 1, scheduler=scheduler,
            max_concurrent_trials=None if searcher else limit(),
            reuse_actors=True, trial_name_creator=_trial_name, trial_dirname_creator=_trial_name),
        run_config=ray.tune.RunConfig(
            name=f"{folder.name}-{os.getpid()}", storage_path=str(folder / "ray"), verbose=0, callbacks=[callback],
            failure_config=ray.tune.FailureConfig(max_failures=config.placement.max_failures)))
    run_in_background(tune.fit)
    callback.check_room()


def _trial_name(trial: Any) -> str:
    return f"trial{trial.config['trial']}"


def _population(ledger: Ledger, total: int) -> dict[str, Any]:
    """All trials that have not ended, as Tune's grid over their numbers; empty if there is none."""
    while len(ledger.trials) < total:
        ledger.propose()
    configs = {trial.number: tune_config_of(trial) for trial in ledger.to_run}
    if not configs:
        return {}
    return {"trial": ray.tune.grid_search(list(configs)),
            "genes": ray.tune.sample_from(lambda config: configs[config["trial"]]["genes"]),
            "origin": ray.tune.sample_from(lambda config: configs[config["trial"]]["origin"])}


def _payload(config: TuneConfig, ledger: Ledger, folder: Path, settings: Search, parent: str | None) -> dict[str, Any]:
    """What all trials share, as plain JSON; see `train_trial`."""
    placement = {**config.placement.model_dump(mode="json"), "resume": "", "mlflow_uri": _uri(config) or "off",
                 "registered_name": "", "cpus_per_worker": config.placement.cpus}
    placement |= ({"project": str(Path(config.placement.project) / folder.name / "trials")} if ledger.stored else
                  {"project": str(folder / "trials"), "storage_path": ""})
    if isinstance(settings.scheduler, Pbt):  # keep the checkpoints from which other trials may continue
        placement |= {"save_period": settings.scheduler.interval_epochs, "nosave": False}
    file, colon, name = config.placement.callbacks.partition(":")
    placement["callbacks"] = f"{_absolute(file)}{colon}{name}"
    return {"recipe": {**ledger.recipe.model_dump(mode="json"), "data": _absolute(config.recipe.data),
                       "model": _absolute(ledger.recipe.model)},
            "placement": placement, "search": settings.model_dump(mode="json"), "link": {"parent_run_id": parent},
            "cache": str(cache_folder().absolute()) if ledger.stored else ""}


def _absolute(name: str) -> str:
    """The name of a data set, model or file of callbacks, valid in the working folder of any trial."""
    path = Path(name)
    is_path = path.suffix in (".yaml", ".yml", ".py") or (path / "data.yaml").is_file()
    return str(path.absolute()) if is_path and path.exists() else name


def _finish(config: TuneConfig, ledger: Ledger, run: Run, parent: str | None, display: SweepDisplay) -> SearchResult:
    """Write every file of the sweep, mark it as finished, and print where its results are."""
    trials, folder = ledger.trials, run.folder
    ledger.close()
    for trial in trials:
        finalize_abandoned_run(folder / "trials" / trial.folder_name, _uri(config), {"parent_run_id": parent})
    best = best_trial(trials)
    if best is None:
        reasons = sorted({trial.reason for trial in trials})
        raise TrainingError(f"{folder}: all {len(trials)} trials failed: {'; '.join(reasons[:3])}")
    write_sweep_files(folder, ledger.recipe, trials)
    keep_best(folder, best)
    if not config.sweep.keep_weights:
        beaten = {name for trial in trials for name in trial.lineages} - {best.folder_name}
        with ThreadPoolExecutor() as pool:  # a store needs a moment for each
            list(pool.map(drop_weights, (folder / "trials" / name for name in beaten)))
    draw_plots(folder, trials, best)
    if parent:
        _track(config, folder, trials, "FINISHED")
    run.finish()
    display.say(closing_message(folder, ledger.recipe, best))
    return SearchResult(folder, trials, best)
