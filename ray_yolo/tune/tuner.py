"""A sweep over the whole cluster: many trials at once, each a distributed training, one ledger.

    <project>/<name>/ledger.jsonl        the truth: what was proposed, from what, and what came of it
    <project>/<name>/trials/trialN/      the run folder of each trial, as of any training
    <project>/<name>/evolve.csv, hyp_evolve.yaml, *.png    made from the ledger

Kill the driver at any point and start the same command again: rows that ended stay, rows that were running go on from
their checkpoints under their own numbers, and proposals continue. With more --trials a finished sweep of that --name
goes on.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import random
import shlex
import shutil
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import ray
import ray.tune

from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe, recipe_digest, resolve
from ray_yolo.errors import ConfigError, TrainingError
from ray_yolo.runlog.bookkeeping import settle
from ray_yolo.runlog.event_log import read_lines
from ray_yolo.runlog.mlflow_client import tracking_uri
from ray_yolo.runlog.narrator import settings_line
from ray_yolo.runlog.run_dir import Run, begin_run, find_run, storage_folder
from ray_yolo.runtime import cluster
from ray_yolo.runtime.aside import run_aside
from ray_yolo.runtime.prepare import check_model, check_storage, decide, foreseen, read_dataset
from ray_yolo.runtime.stopping import ask_to_stop
from ray_yolo.runtime.trainer import check_early
from ray_yolo.structures import AnnotationIndex
from ray_yolo.tune.config import TuneConfig
from ray_yolo.tune.console import SweepDisplay
from ray_yolo.tune.evolution import Space, grid_size
from ray_yolo.tune.files import best_trial, drop_weights, read_warm_start, write_sweep_files
from ray_yolo.tune.ledger import LEDGER_FILE, Ledger, Sweep, Trial, read_trials
from ray_yolo.tune.mlflow import close_parent_run, open_parent_run, stop_runs
from ray_yolo.tune.plots import plot_genes, plot_lineage, plot_progress
from ray_yolo.tune.proposals import check_algorithm
from ray_yolo.tune.replay import replay_command
from ray_yolo.tune.schedulers import build_scheduler
from ray_yolo.tune.search import Pbt, Search
from ray_yolo.tune.searcher import LedgerCallback, LedgerSearcher, tune_config_of
from ray_yolo.tune.space import TuneSpace, combinations, load_space, overlay
from ray_yolo.tune.trial import train_trial


@dataclass(frozen=True)
class SearchResult:
    """What a sweep leaves behind."""

    folder: Path
    trials: tuple[Trial, ...]
    best: Trial


def search(config: TuneConfig, *, quiet: bool = False) -> SearchResult:
    """Search as configured, or continue the sweep that the same configuration began.

    Raises:
        InputError: for anything the user can get wrong, before any cluster work.
        TrainingError: if every trial has failed.
    """
    config, space, train = _checked(config)
    run = find_run(config.recipe, config.placement, lambda folder: _has_more(folder, config.sweep.trials))
    try:
        gpus = cluster.connect(config.placement)
        slots = concurrent_trials(config, gpus)
        check_storage(config.placement, run)
        resolved = decide(config.recipe, config.placement, train, gpus).model_copy(
            update={"objective": space.search.recipe_objective})
        run = run or begin_run(config.placement, {"digest": recipe_digest(config.recipe), "space": config.sweep.space,
                                                  "trials": config.sweep.trials})
        sweep = Sweep(space.space, space.search, config.recipe, train.digest)
        ledger = Ledger(run.folder / LEDGER_FILE, sweep, resolved)
        return _search(config, space, sweep, ledger, run, slots, io.StringIO() if quiet else sys.stdout)
    finally:
        if run:
            run.release()


def foresee(config: TuneConfig) -> TuneConfig:
    """The sweep that a start would begin, after all its checks; nothing is started or made.

    Raises:
        InputError: as `search` does.
    """
    config, _, train = _checked(config)
    recipe = foreseen(config.recipe, config.placement, train, cluster.foreseen_gpus(config.placement))
    return config.model_copy(update={"recipe": recipe})


def _checked(config: TuneConfig) -> tuple[TuneConfig, TuneSpace, AnnotationIndex]:
    """The adapted configuration, its space with warm starts and the training labels, all of them fit for a search."""
    found = load_space(config.sweep.space, config.recipe)
    config = _adapted(config, found.space)
    train = _check(config, found)
    warm = read_warm_start(config.sweep.warm_start, found.space, found.search) if config.sweep.warm_start else []
    return config, found._replace(space=replace(found.space, starts=(*found.space.starts, *warm))), train


def _has_more(folder: Path, trials: int) -> bool:
    """Whether a sweep that has ended has fewer trials than are asked for now."""
    return len(read_trials(read_lines(folder / LEDGER_FILE))) < trials


def _adapted(config: TuneConfig, space: Space) -> TuneConfig:
    """The configuration with each trial's workers in its placement, and no more trials than a grid has points."""
    sweep = config.sweep
    if space.algorithm == "grid":
        sweep = sweep.model_copy(update={"trials": min(sweep.trials, grid_size(space.genes))})
    placement = config.placement.model_copy(update={"num_workers": sweep.workers_per_trial})
    return config.model_copy(update={"sweep": sweep, "placement": placement})


def _check(config: TuneConfig, space: TuneSpace) -> AnnotationIndex:
    """Refuse what cannot be searched or trained, before any cluster work. Returns the training labels."""
    check_algorithm(space.space)
    _check_search(space.search, config.recipe)
    check_early(RunConfig(recipe=config.recipe, placement=config.placement))
    _check_genes(config, space.space)
    _, train, _ = read_dataset(config.recipe)
    return train


def _check_genes(config: TuneConfig, space: Space) -> None:
    """Refuse what some trials could not be trained by: batches that the workers cannot share, models, weights."""
    for genes in combinations(space.genes):
        resolve(overlay(config.recipe, genes), config.placement.max_workers, gpu=False)
    files = [(gene.name, str(value)) for gene in space.genes if gene.name in ("model", "weights")
             for value in gene.values]
    for name, value in files:
        check_model(overlay(config.recipe, {name: value}))
        if Path(value).is_file() and not Path(value).is_absolute():
            raise ConfigError(f"{name}: {value}: give its whole path; trials have working folders of their own")


def _search(config: TuneConfig, space: TuneSpace, sweep: Sweep, ledger: Ledger, run: Run, slots: int, stream: TextIO
            ) -> SearchResult:
    """The sweep of a run folder, from where it was left."""
    settings = config.sweep
    display = SweepDisplay(stream, settings.trials, config.recipe.epochs, trials=ledger.trials)
    _tell_begin(display, run.folder, ledger, settings.trials, slots, space)
    parent = _parent_run(config, run.folder)
    try:
        with contextlib.closing(display):
            _run_trials(config, sweep, ledger, run.folder, slots, parent, display)
        return _finish(config, ledger, run, parent, display)
    except BaseException as error:
        interrupted = isinstance(error, (KeyboardInterrupt, SystemExit))
        if interrupted:
            running = (trial.folder_name for trial in ledger.trials if trial.state == "running")
            ask_to_stop([run.folder / "trials" / name for name in running], display.say)
            display.say("interrupted; the same command continues")
        if parent and (uri := _uri(config)):
            stop_runs(run.folder, uri, parent, ledger.trials, "KILLED" if interrupted else "FAILED")
        raise


def _check_search(settings: Search, recipe: Recipe) -> None:
    """Refuse a search that maximises something else than its trials, or whose scheduler would wait in vain for a
    fitness at every epoch, or changes what is changed.
    """
    if recipe.objective not in (Recipe().objective, settings.recipe_objective):
        raise ConfigError("objective: what a sweep and its trials maximise is the search.objective of its space; write "
                          "it there, and leave objective out")
    if recipe.noval and settings.scheduler.name != "none":
        raise ConfigError(f"noval: the scheduler {settings.scheduler.name} judges trials by the validation of every "
                          "epoch; leave --noval out, or use scheduler: none")
    if recipe.changes and settings.scheduler.name == "pbt":
        raise ConfigError("changes: population based training makes changes of its own; leave --changes out, or use "
                          "another scheduler")


def _tell_begin(display: SweepDisplay, folder: Path, ledger: Ledger, total: int, slots: int, space: TuneSpace) -> None:
    done = sum(trial.has_ended for trial in ledger.trials)
    display.say(f"{folder}: {total} trials, {done} of them done, {slots} at a time")
    display.say(f"each trial, where its genes say nothing else: {settings_line(ledger.recipe)}")
    all_random = space.search.random_warning(total, len(space.space.starts))
    for warning in filter(None, (*space.warnings, all_random)):
        display.say(f"warning: {warning}")


def _run_trials(config: TuneConfig, sweep: Sweep, ledger: Ledger, folder: Path, slots: int, parent: str | None,
                display: SweepDisplay) -> None:
    """Have Ray Tune run what the ledger has not seen the end of, and what it proposes, until enough has ended."""
    wire = _wire(config, ledger, folder, sweep.search, parent)
    # Memory, not CPU: even a hundredth of a CPU would take a worker's place away
    trainable = ray.tune.with_resources(ray.tune.with_parameters(train_trial, wire=wire), {"memory": 1e6})
    scheduler = build_scheduler(sweep.search, sweep.space, config.recipe.epochs)
    param_space: dict[str, Any] = {}
    searcher: LedgerSearcher | None = LedgerSearcher(ledger, config.sweep.trials)
    if isinstance(sweep.search.scheduler, Pbt):  # Ray's takes its whole population at once, and from no searcher
        param_space, searcher = _population(ledger, config.sweep.trials), None
        random.seed(config.recipe.seed)
        if not param_space:
            return
    warnings.filterwarnings("ignore", "Consider boosting PBT")  # reusing processes: a trial's are Ray Train's
    drops = searcher is not None and not config.sweep.keep_weights  # under PBT others may still go on from them
    callback = LedgerCallback(ledger, display, scheduler, searcher, drops=drops)
    tune = ray.tune.Tuner(
        trainable, param_space=param_space,
        tune_config=ray.tune.TuneConfig(
            search_alg=searcher, num_samples=-1 if searcher else 1, max_concurrent_trials=slots, scheduler=scheduler,
            reuse_actors=False, trial_name_creator=lambda trial: f"trial{trial.config['trial']}",
            trial_dirname_creator=lambda trial: f"trial{trial.config['trial']}"),
        run_config=ray.tune.RunConfig(
            name=f"{folder.name}-{os.getpid()}", storage_path=str(folder / "ray"), verbose=0, callbacks=[callback],
            failure_config=ray.tune.FailureConfig(max_failures=config.placement.max_failures)))
    run_aside(tune.fit)
    callback.finish()


def _population(ledger: Ledger, total: int) -> dict[str, Any]:
    """All trials that have not ended, as Tune's grid over their numbers; empty if there is none."""
    while len(ledger.trials) < total:
        ledger.propose()
    told = {trial.number: tune_config_of(trial) for trial in ledger.to_run}
    if not told:
        return {}
    return {"trial": ray.tune.grid_search(list(told)),
            "genes": ray.tune.sample_from(lambda config: told[config["trial"]]["genes"]),
            "origin": ray.tune.sample_from(lambda config: told[config["trial"]]["origin"])}


def concurrent_trials(config: TuneConfig, gpus: float) -> int:
    """Trials that fit into the cluster at once.

    Tune does not know what a trial's own workers need: without this limit trials would hold a part of their workers
    each and wait for each other for ever.

    Raises:
        ConfigError: if not even one trial fits.
    """
    there, workers = ray.cluster_resources(), config.sweep.workers_per_trial
    needed = {"CPU": config.placement.cpus_per_worker * workers, "GPU": gpus * workers}
    room = min(math.floor(there.get(kind, 0) / amount + 1e-9) for kind, amount in needed.items() if amount)
    if room < 1:
        raise ConfigError(f"workers_per_trial: {workers} workers need {needed['CPU']:g} CPU and {needed['GPU']:g} GPU, "
                          f"the cluster has {there.get('CPU', 0):g} and {there.get('GPU', 0):g}; use fewer")
    return room if config.sweep.max_concurrent == "auto" else min(room, config.sweep.max_concurrent)


def _wire(config: TuneConfig, ledger: Ledger, folder: Path, settings: Search, parent: str | None) -> dict[str, Any]:
    """What every trial is told, as plain JSON."""
    placement = {**config.placement.model_dump(mode="json"), "project": str(folder / "trials"), "storage_path": "",
                 "resume": "", "mlflow_uri": _uri(config) or "off"}
    if isinstance(settings.scheduler, Pbt):  # what others may go on from is kept
        placement |= {"save_period": settings.scheduler.interval_epochs, "nosave": False}
    file, colon, name = config.placement.callbacks.partition(":")
    placement["callbacks"] = f"{_absolute(file)}{colon}{name}"
    return {"recipe": {**ledger.recipe.model_dump(mode="json"), "data": _absolute(config.recipe.data),
                       "model": _absolute(ledger.recipe.model)},
            "placement": placement, "search": settings.model_dump(mode="json"),
            "link": _link(parent)}


def _absolute(name: str) -> str:
    """A data set, model or file of callbacks that trials find from their own working folders."""
    path = Path(name)
    is_path = path.suffix in (".yaml", ".yml", ".py") or (path / "data.yaml").is_file()
    return str(path.absolute()) if is_path and path.exists() else name


def _parent_run(config: TuneConfig, folder: Path) -> str | None:
    """The MLflow run of the sweep, made once and kept in the sweep's folder; None without tracking."""
    uri = _uri(config)
    return open_parent_run(folder, uri, config) if uri else None


def _uri(config: TuneConfig) -> str | None:
    return tracking_uri(config.placement.mlflow_uri, storage_folder(config.placement), os.environ)


def _finish(config: TuneConfig, ledger: Ledger, run: Run, parent: str | None, display: SweepDisplay) -> SearchResult:
    """Make every file of the sweep, mark it as ended, and say where things are."""
    trials, folder, uri = ledger.trials, run.folder, _uri(config)
    ledger.close()
    for trial in trials:
        settle(folder / "trials" / trial.folder_name, uri, _link(parent))
    best = best_trial(trials)
    if best is None:
        reasons = sorted({trial.reason for trial in trials})
        raise TrainingError(f"{folder}: all {len(trials)} trials failed: {'; '.join(reasons[:3])}")
    write_sweep_files(folder, ledger.recipe, trials)
    weights = _keep_best(folder, best)
    for name in [] if config.sweep.keep_weights else [name for trial in trials for name in trial.pasts]:
        if name != best.folder_name:
            drop_weights(folder / "trials" / name)
    _draw(folder, trials, best)
    if parent and uri:
        close_parent_run(folder, uri, parent, trials, best)
    run.finish()
    display.say(closing_message(folder, ledger.recipe, best, weights))
    return SearchResult(folder, trials, best)


def closing_message(folder: Path, recipe: Recipe, best: Trial, weights: Path) -> str:
    """What came of a sweep over `recipe`, and how to use it."""
    return (f"best: trial {best.number}, fitness {best.fitness:.5g}, weights {weights}\n"
            f"train with it: --hyp {shlex.quote(str(folder / 'hyp_evolve.yaml'))}\n"
            f"repeat it:     {replay_command(recipe, best.past)}")


def _keep_best(folder: Path, best: Trial) -> Path:
    """Put the best trial's weights beside the ledger, as weights/best.pt and last.pt."""
    weights = folder / "weights"
    weights.mkdir(exist_ok=True)
    for path in (folder / "trials" / best.folder_name / "weights").glob("[bl][ea]st.*"):
        shutil.copyfile(path, weights / path.name)
    return weights / "best.pt"


def _draw(folder: Path, trials: tuple[Trial, ...], best: Trial) -> None:
    """The pictures of a sweep."""
    finished = [trial for trial in trials if trial.state == "finished"]
    fitness = [trial.fitness for trial in finished if trial.fitness is not None]
    numeric = {name: [float(trial.genes[name]) for trial in finished] for name, value in best.genes.items()
               if isinstance(value, (int, float))}
    plot_genes(numeric, fitness, [trial.rung for trial in finished], folder / "evolve.png")
    plot_progress([math.nan if trial.fitness is None else trial.fitness for trial in trials],
                  [trial.rung for trial in trials], folder / "progress.png")
    fitness_of = {trial.number: trial.fitness for trial in finished}
    plot_lineage({trial.number: [n for n in trial.forebears if n in fitness_of] for trial in finished}, fitness_of,
                 best.number, folder / "lineage.png")


def _link(parent: str | None) -> dict[str, Any]:
    """What ties a trial's MLflow run to the sweep's."""
    return {"parent_run_id": parent} if parent else {}
