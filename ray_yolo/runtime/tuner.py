"""A sweep over the whole cluster: many trials at once, each a distributed training, one ledger.

    <project>/<name>/ledger.jsonl        the truth: what was proposed, from what, and what came of it
    <project>/<name>/trials/trialN/      the run folder of each trial, as of any training
    <project>/<name>/evolve.csv, hyp_evolve.yaml, *.png    made from the ledger

Kill the driver at any point and start the same command again: rows that ended stay, rows that were running go on from
their checkpoints under their own numbers, and proposals continue.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import ray.tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler

from ray_yolo.config import RunConfig, recipe_digest, resolve
from ray_yolo.engine.events import follow
from ray_yolo.engine.ledger import Ledger, Sweep, Trial
from ray_yolo.engine.results import EVENTS_FILE
from ray_yolo.engine.runs import Run, open_run
from ray_yolo.engine.sweep_files import best_trial, read_warm_start, replay_command, write_sweep_files
from ray_yolo.errors import ConfigError, TrainingError
from ray_yolo.plots.tune import plot_genes, plot_progress
from ray_yolo.runtime import cluster
from ray_yolo.runtime.prepare import read_dataset
from ray_yolo.runtime.searcher import LedgerSearcher
from ray_yolo.runtime.tracking import tracking_uri
from ray_yolo.runtime.tracking_sweep import close_parent_run, open_parent_run
from ray_yolo.runtime.trainer import fit
from ray_yolo.tune_config import TuneConfig
from ray_yolo.tune_search import Search
from ray_yolo.tune_space import load_space, overlay

LEDGER_FILE = "ledger.jsonl"


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
    settings = config.sweep
    space = load_space(settings.space, config.recipe)
    _, train, _ = read_dataset(config.recipe)
    if space.search.algorithm == "tpe":
        raise ConfigError("search.algorithm: tpe is not run by this version; use evolve, random or grid")
    if space.search.scheduler.name == "pbt":
        raise ConfigError("search.scheduler: pbt needs trials that exchange checkpoints, which this version does not "
                          "do; use asha, median or none")
    warm = read_warm_start(settings.warm_start, space.space, space.search) if settings.warm_start else []
    proposals = replace(space.space, starts=(*space.space.starts, *warm))
    run = open_run(config.recipe, config.placement)
    try:
        gpus = cluster.connect(config.placement)
        resolved = resolve(config.recipe, settings.workers_per_trial, gpu=gpus > 0)
        if run.is_new:
            run.first_start(digest=recipe_digest(config.recipe), space=settings.space, trials=settings.trials)
        sweep = Sweep(proposals, space.search, config.recipe, train.digest)
        ledger = Ledger(run.folder / LEDGER_FILE, sweep, resolved)
        return _search(config, space.search, ledger, run, gpus, (lambda text: None) if quiet else print)
    finally:
        run.release()


def _search(config: TuneConfig, settings: Search, ledger: Ledger, run: Run, gpus: float,
            say: Callable[[str], None]) -> SearchResult:
    slots = concurrent_trials(config, gpus)
    total = config.sweep.trials
    done = sum(trial.has_ended for trial in ledger.trials)
    say(f"{run.folder}: {total} trials, {done} of them done, {slots} at a time")
    parent = _parent_run(config, run.folder)

    def told(ledger: Ledger, trial: Trial) -> None:
        write_sweep_files(run.folder, ledger.recipe, ledger.trials)
        say(_line(trial, ledger.trials, total))

    searcher = LedgerSearcher(ledger, total, told)
    wire = _wire(config, ledger, run.folder, settings, parent)
    # Memory, not CPU: even a hundredth of a CPU would take a worker's place away
    trainable = ray.tune.with_resources(ray.tune.with_parameters(train_trial, wire=wire), {"memory": 1e6})
    ray.tune.Tuner(
        trainable,
        tune_config=ray.tune.TuneConfig(search_alg=searcher, num_samples=-1, max_concurrent_trials=slots,
                                        scheduler=_scheduler(settings, config.recipe.epochs), reuse_actors=False),
        run_config=ray.tune.RunConfig(name=f"{run.folder.name}-{os.getpid()}", storage_path=str(run.folder / "ray"),
                                      verbose=0)).fit()
    return _finish(config, ledger, run, parent, say)


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


def train_trial(config: Mapping[str, Any], wire: Mapping[str, Any]) -> None:
    """One trial, as Ray Tune's function: a training in a thread, its epochs reported as they are recorded."""
    run_config = trial_config(wire, config["trial"], config["genes"])
    folder = Path(run_config.placement.project) / run_config.placement.name
    done: queue.Queue[str] = queue.Queue()

    def run() -> None:
        try:
            fit(run_config, quiet=True, link=wire["link"])
            done.put("")
        except BaseException as error:
            done.put(f"{type(error).__name__}: {error}")

    if (folder / "finished").exists():  # it ended, and the driver died before it could note that
        done.put("")
    else:
        threading.Thread(target=run, daemon=True).start()
    settings, log, failure = Search.model_validate(wire["search"]), follow(folder / EVENTS_FILE), None
    while failure is None:
        try:
            failure = done.get(timeout=0.5)
        except queue.Empty:
            failure = None
        _report_epochs(next(log), settings)
    if failure:
        ray.tune.report({"failed": failure.splitlines()[0]})


def _report_epochs(events: list[dict[str, Any]], settings: Search) -> None:
    for event in events:
        fitness = settings.fitness(event["metrics"]) if event["type"] == "epoch" else None
        if fitness is not None:
            # as text: Tune would flatten what is nested
            ray.tune.report({"fitness": fitness, "epoch": event["epoch"] + 1,
                             "row": json.dumps({"metrics": event["metrics"], "losses": event["val"]})})


def trial_config(wire: Mapping[str, Any], number: int, genes: Mapping[str, Any]) -> RunConfig:
    """The training of a trial: the base recipe with its genes, in a run folder of its own under its own name."""
    config = RunConfig.model_validate({"recipe": wire["recipe"], "placement": wire["placement"]})
    placement = config.placement.model_copy(update={"name": f"trial{number}"})
    return RunConfig(recipe=overlay(config.recipe, genes), placement=placement)


def _wire(config: TuneConfig, ledger: Ledger, folder: Path, settings: Search, parent: str | None) -> dict[str, Any]:
    """What every trial is told, as plain JSON."""
    placement = {**config.placement.model_dump(mode="json"), "num_workers": config.sweep.workers_per_trial,
                 "project": str(folder / "trials"), "storage_path": "", "resume": "",
                 "mlflow_uri": _uri(config) or "off"}
    return {"recipe": {**ledger.recipe.model_dump(mode="json"), "data": _absolute(config.recipe.data)},
            "placement": placement, "search": settings.model_dump(mode="json"),
            "link": {"parent_run_id": parent} if parent else {}}


def _absolute(data: str) -> str:
    """A data set that trials find from their own working folders."""
    return str(Path(data).absolute()) if Path(data).suffix in (".yaml", ".yml") else data


def _scheduler(settings: Search, epochs: int) -> TrialScheduler:
    """Ray's own scheduler for the setting."""
    scheduler = settings.scheduler
    common = {"time_attr": "epoch", "metric": "fitness", "mode": "max"}
    if scheduler.name == "asha":
        return ASHAScheduler(**common, max_t=epochs, grace_period=settings.first_rung(epochs),
                             reduction_factor=scheduler.reduction)
    if scheduler.name == "median":
        return MedianStoppingRule(**common, grace_period=settings.first_rung(epochs),
                                  min_samples_required=scheduler.min_trials)
    return FIFOScheduler()


def _parent_run(config: TuneConfig, folder: Path) -> str | None:
    """The MLflow run of the sweep, made once and kept in the sweep's folder; None without tracking."""
    uri = _uri(config)
    return open_parent_run(folder, uri) if uri else None


def _uri(config: TuneConfig) -> str | None:
    return tracking_uri(config.placement.mlflow_uri, config.placement.storage_path or ".", os.environ)


def _line(trial: Trial, trials: tuple[Trial, ...], total: int) -> str:
    """A trial that has ended, for the console."""
    ended = sum(each.has_ended for each in trials)
    best = best_trial(trials)
    outcome = trial.reason
    if trial.fitness is not None:
        outcome = f"fitness {trial.fitness:.5g} after {trial.epochs} epochs"
    lead = f"; best {best.fitness:.5g} (trial {best.number})" if best else ""
    return f"{ended}/{total}  trial {trial.number} {trial.state}: {outcome}{lead}"


def _finish(config: TuneConfig, ledger: Ledger, run: Run, parent: str | None,
            say: Callable[[str], None]) -> SearchResult:
    """Make every file of the sweep, mark it as ended, and say where things are."""
    trials, folder = ledger.trials, run.folder
    ledger.close()
    best = best_trial(trials)
    if best is None:
        reasons = sorted({trial.reason for trial in trials})
        raise TrainingError(f"{folder}: all {len(trials)} trials failed: {'; '.join(reasons[:3])}")
    write_sweep_files(folder, ledger.recipe, trials)
    finished = [trial for trial in trials if trial.state == "finished"]
    fitness = [trial.fitness for trial in finished if trial.fitness is not None]
    numeric = {name: [float(trial.genes[name]) for trial in finished] for name, value in best.genes.items()
               if isinstance(value, (int, float))}
    plot_genes(numeric, fitness, folder / "evolve.png")
    plot_progress(fitness, folder / "progress.png")
    run.finish()
    uri = _uri(config)
    if parent and uri:
        close_parent_run(folder, uri, parent, best.number, best.fitness or 0.0)
    say(f"best: trial {best.number}, fitness {best.fitness:.5g}, in {folder / 'trials' / f'trial{best.number}'}\n"
        f"train with it: --hyp {folder / 'hyp_evolve.yaml'}\nrepeat it:     {replay_command(ledger.recipe, best)}")
    return SearchResult(folder, trials, best)
