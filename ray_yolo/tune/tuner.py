"""A sweep over the whole cluster: many parallel trials, each a distributed training, with one ledger.

    <project>/<name>/ledger.jsonl        each proposal, the rows it follows from, and its result
    <project>/<name>/trials/trialN/      the run folder of each trial, as of any training
    <project>/<name>/evolve.csv, hyp_evolve.yaml, *.png    computed from the ledger

If the driver is killed, the same command continues the sweep. Ended rows are kept, running rows resume from their
checkpoints and keep their numbers, and proposals continue. With more --trials or --hours, a finished sweep with this
--name continues.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import ray
import ray.tune

from ray_yolo.config.effects import describe_unused, given_settings
from ray_yolo.config.fine_tuning import fine_tuned
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe, recipe_digest, resolve
from ray_yolo.config.settings import canonical
from ray_yolo.core import deadline
from ray_yolo.core.cache_folder import cache_folder
from ray_yolo.core.errors import ConfigError, TrainingError
from ray_yolo.core.files import atomic_write
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.runs.folders import is_held, project_folder, storage_folder
from ray_yolo.runs.location import location
from ray_yolo.runs.run_dir import Run, begin_run, find_run
from ray_yolo.runs.run_record import LEDGER_FILE, SweepRecord, read_record
from ray_yolo.runtime import cluster
from ray_yolo.runtime.map_on_workers import map_on_workers
from ray_yolo.runtime.preflight import (
    check_cluster,
    check_early,
    check_model,
    compare_initial_weights,
    planned_recipe,
    read_dataset,
    resolve_recipe,
    surroundings,
)
from ray_yolo.runtime.workers.pool_jobs import standing_pool
from ray_yolo.sinks.mlflow_client import tracking_uri
from ray_yolo.sinks.record_process import PROMPT_SECONDS, RecordProcess, waiting_limit
from ray_yolo.sinks.report import settings_line
from ray_yolo.sinks.run_logger import finalize_abandoned_run
from ray_yolo.tune.budget import Budget, describe, recorded_epoch_seconds
from ray_yolo.tune.claim import Claim
from ray_yolo.tune.console import SweepDisplay, closing_message
from ray_yolo.tune.dispatch import Dispatcher
from ray_yolo.tune.evolution import Space, grid_size
from ray_yolo.tune.files import drop_weights, keep_best, read_warm_start, write_sweep_files
from ray_yolo.tune.identity import DATA, identity_of
from ray_yolo.tune.latency import format_pareto, measure, networks, pareto
from ray_yolo.tune.ledger import Ledger, SweepEvent, read_ledger, read_trials, results_elsewhere, rung_results
from ray_yolo.tune.plots import draw_plots
from ray_yolo.tune.pool_log import log_pool
from ray_yolo.tune.ray_adapter import (
    LadderScheduler,
    SweepCallback,
    TaskSearcher,
    run_trials,
)
from ray_yolo.tune.records import write_options
from ray_yolo.tune.schedule import Outcome, Task, address, rungs_of
from ray_yolo.tune.search import Ladder, SweepConfig, TuneConfig
from ray_yolo.tune.space import TuneSpace, combinations, load_space, unused_under, warnings
from ray_yolo.tune.sweep_page import sweep_page
from ray_yolo.tune.trainable import train_task
from ray_yolo.tune.trials import Trial, best_trial, overlay

NOTE_SECONDS = 5.0  # between two notes of the time
_log = logging.getLogger(__name__)


def concurrent_trials(config: TuneConfig, gpus: float) -> int:
    """The number of trials that fit on the cluster in parallel.

    Tune does not track the resources of a trial's workers. Without this limit, each trial could hold some of its
    workers while all trials wait for each other (a deadlock).

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
    """The number of trials that fit on the current cluster, or else on this machine, in parallel; 0: none."""
    slots = cluster.parallel_trainings(config.placement, config.sweep.workers_per_trial, gpus)
    return slots if config.sweep.max_concurrent == "auto" else min(slots, config.sweep.max_concurrent)


def pool_range(sweep: SweepConfig, slots: int) -> tuple[int, int]:
    """The numbers of workers that the pool has at least, also if other jobs wait, and at most.

    A trial goes on with fewer workers than `workers_per_trial`, so without `min_slots` a sweep keeps one worker only.
    """
    kept = 1
    if sweep.min_slots > 1:
        kept = min(sweep.min_slots, slots) * sweep.workers_per_trial
    return kept, slots * sweep.workers_per_trial


def trials_ahead(slots: int) -> int:
    """The number of trials that start up while others train: the fewest that keep the slots busy.

    It is small, because the proposals of these trials ignore the results of those that still train. Start-up takes a
    few seconds, the shortest trials about ten. Two slots need two, because idle workers join other trials and two
    trials may end together. Of more slots, about an eighth ends during a start-up.
    """
    return min(slots, max(2, slots // 8))


@dataclass(frozen=True)
class SearchResult:
    """The result of a sweep."""

    folder: Path
    trials: tuple[Trial, ...]
    best: Trial
    claim: Claim | None = None  #: what may be said of the best trial


def search(config: TuneConfig, *, quiet: bool = False) -> SearchResult:
    """Run a sweep, or continue the one that the same configuration started.

    Raises:
        InputError: for bad input, before any cluster work.
        TrainingError: if every trial failed.
    """
    config, space, train, val = _checked(config)
    run = find_run(config.recipe, config.placement, lambda folder: _has_more(folder, config))
    try:
        gpus = cluster.connect(config.placement)
        slots = concurrent_trials(config, gpus)
        for warning in check_cluster(config.placement, run, train):
            print(f"warning: {warning}", file=sys.stderr)
        resolved = resolve_recipe(config.recipe, config.placement, train, gpus).model_copy(
            update={"objective": space.search.recipe_objective})
        is_new = run is None or not (run.folder / LEDGER_FILE).exists()
        latencies = _latencies(config, space, train, gpus) if is_new else {}
        run = run or begin_run(config.placement, SweepRecord(
            digest=recipe_digest(config.recipe), space=config.sweep.space, trials=config.sweep.most_trials))
        identity = identity_of(config.recipe, space.space, train, val)
        begun = _begun(config, space, resolved, train, slots, latencies, identity)
        ledger = Ledger(run.folder / LEDGER_FILE, begun, run.remote)
        return _Execution(config, ledger, run, slots, gpus, io.StringIO() if quiet else sys.stdout).run_to_end()
    finally:
        deadline.end(run.release if run else None)


def _begun(config: TuneConfig, space: TuneSpace, recipe: Recipe, train: AnnotationIndex, slots: int,
           latencies: Mapping[str, float], identity: dict[str, str]) -> SweepEvent:
    """The first line of the ledger of a sweep over `recipe`."""
    virtual_slots = config.sweep.virtual_slots or _processes(config, slots)
    return SweepEvent(identity=identity, space=space.space, search=space.search, recipe=recipe,
                      rungs=_rungs(space, recipe), latencies=latencies, virtual_slots=virtual_slots)


def _latencies(config: TuneConfig, space: TuneSpace, train: AnnotationIndex, gpus: float) -> dict[str, float]:
    """Milliseconds per image of each network of a space with a limit, on one worker."""
    if space.search.limit is None:
        return {}
    alone = config.placement.model_copy(update={"num_workers": 1})
    parts = [networks(space.space, config.recipe)]
    task = len(train.names), gpus
    [(_, found)] = map_on_workers(measure, task, parts, alone, gpus, timeout=alone.timeout_seconds)
    if (fastest := min(found.values())) > space.search.limit.latency_ms:
        raise ConfigError(f"search.limit.latency_ms: the fastest network of the space takes {fastest:.3g} ms an image "
                          f"here, over the limit of {space.search.limit.latency_ms:g}; raise it, or search smaller "
                          "models or image sizes")
    return found


class PlannedSweep(NamedTuple):
    """What a sweep would train, as far as it is known without a cluster."""

    config: TuneConfig
    notes: list[str]  # about its trainings


def dry_run(config: TuneConfig) -> PlannedSweep:
    """The sweep of a start, after all its checks. It starts and writes nothing.

    Raises:
        InputError: as `search` does.
    """
    config, space, train, _ = _checked(config)
    recipe = planned_recipe(config.recipe, config.placement, train, cluster.planned_gpus(config.placement))
    planned = config.model_copy(update={"recipe": recipe})
    return PlannedSweep(planned, [settings_line(recipe), *_describe(planned, space, train)])


def _describe(config: TuneConfig, space: TuneSpace, train: AnnotationIndex) -> list[str]:
    """The trainings of a sweep, line by line."""
    gpus = cluster.planned_gpus(config.placement) or 0.0  # None: the cluster decides, and is not asked here
    slots = max(1, room_for_trials(config, gpus))
    begun = _begun(config, space, config.recipe, train, slots, {}, {})
    seconds = recorded_epoch_seconds(project_folder(config.placement), config.recipe, train.digest,
                                     config.sweep.workers_per_trial)
    lines = describe(begun, config.sweep.most_trials, config.sweep.hours, slots, seconds)
    lines += [f"warning: {text}" for text in warnings(begun.space, begun.recipe, config.sweep.most_trials)]
    return lines


def _has_more(folder: Path, config: TuneConfig) -> bool:
    """Whether a finished sweep continues, because more trials or hours are requested than it has had."""
    lines, record = read_ledger(folder / LEDGER_FILE), read_record(folder)
    spent = record.seconds if isinstance(record, SweepRecord) else 0.0
    is_short = not config.sweep.hours or spent < 0.95 * 3600 * config.sweep.hours
    return is_short and len(read_trials(lines)) < config.sweep.most_trials


def _rungs(space: TuneSpace, recipe: Recipe) -> tuple[int, ...]:
    """The epochs at which trials pause, and those of a whole training."""
    ladder = space.search.scheduler
    if not isinstance(ladder, Ladder):
        return (recipe.epochs,)
    if not ladder.first_epochs:
        return rungs_of(recipe.epochs)
    return tuple(sorted({min(ladder.first_epochs, recipe.epochs), recipe.epochs}))


def _processes(config: TuneConfig, slots: int) -> int:
    """The number of trials that train on `slots` slots or start up meanwhile."""
    return slots if config.sweep.max_concurrent != "auto" else slots + trials_ahead(slots)


def _checked(config: TuneConfig) -> tuple[TuneConfig, TuneSpace, AnnotationIndex, AnnotationIndex]:
    """Check everything that needs no cluster.

    Returns:
        The configuration, the space with warm starts, training and validation labels. The configuration has each
        trial's workers in its placement, and at most as many trials as a grid has points.

    Raises:
        InputError: for a configuration that cannot be searched or trained.
    """
    loaded, settings = load_space(config.sweep.space, config.recipe), config.sweep
    space = loaded.space
    trials = min(settings.most_trials, grid_size(space.genes)) if space.algorithm == "grid" else settings.trials
    config = config.model_copy(update={
        "sweep": settings.model_copy(update={"trials": trials}),
        "placement": config.placement.model_copy(update={"num_workers": settings.workers_per_trial})})
    loaded.search.check(config.recipe)
    check_early(RunConfig(recipe=config.recipe, placement=config.placement))
    _check_genes(config, space)
    description, train, val = read_dataset(config.recipe)
    decided = fine_tuned(config.recipe, len(train), len(train.names))
    around = surroundings(config.recipe, description, train, val)
    loaded = load_space(settings.space, decided, around)  # its first start has the learning rate that the default has
    space = loaded.space
    for name, reason in loaded.left_out.items():
        _log.warning("--space %s: the gene %s is left out: %s", settings.space, name, reason)
    given = given_settings(config.recipe) - {canonical(gene.name) for gene in space.genes}
    for line in describe_unused(given, unused_under(space.genes, config.recipe, around)):
        _log.warning("%s", line)
    _check_weights(config, space, train)
    warm = read_warm_start(settings.warm_start, space, loaded.search, decided) if settings.warm_start else []
    return config, loaded._replace(space=replace(space, starts=(*space.starts, *warm))), train, val


def _check_genes(config: TuneConfig, space: Space) -> None:
    """Refuse genes that cannot be trained: batches that workers cannot share, invalid models, weights."""
    for genes in combinations(space.genes):
        resolve(overlay(config.recipe, genes), config.placement.max_workers, gpu=False)
    for name, value in [(gene.name, str(value)) for gene in space.genes if gene.name in ("model", "weights")
                        for value in gene.values]:
        check_model(overlay(config.recipe, {name: value}))
        if Path(value).is_file() and not Path(value).is_absolute():
            raise ConfigError(f"{name}: {value}: give an absolute path; each trial has its own working folder")


def _check_weights(config: TuneConfig, space: Space, train: AnnotationIndex) -> None:
    """Refuse initial weights whose classes are not those of the data set, for the base recipe and all genes."""
    compare_initial_weights(config.recipe, train.names)
    choices = {gene.name: gene.values for gene in space.genes if gene.name in ("model", "weights")}
    for values in itertools.product(*choices.values()):
        genes = dict(zip(choices, values, strict=True))
        compare_initial_weights(overlay(config.recipe, genes), train.names)


def _uri(config: TuneConfig) -> str | None:
    return tracking_uri(config.placement.mlflow_uri, storage_folder(config.placement))


class _Execution:
    """One command's part of a sweep."""

    def __init__(self, config: TuneConfig, ledger: Ledger, run: Run, slots: int, gpus: float, stream: TextIO) -> None:
        self.config, self.ledger, self.run, self.slots, self.gpus = config, ledger, run, slots, gpus
        self.folder, self.sweep, self.search = run.folder, config.sweep, ledger.begun.search
        self.trials = self.folder / "trials"
        self.trials.mkdir(exist_ok=True)  # there may be none to train
        record = run.record
        spent = record.seconds if isinstance(record, SweepRecord) else 0.0
        epoch_seconds = recorded_epoch_seconds(self.folder.parent, ledger.recipe, ledger.begun.identity[DATA],
                                               self.sweep.workers_per_trial)
        self.budget = Budget(ledger.begun, self.sweep.most_trials, self.sweep.hours, spent, epoch_seconds,
                             self.slots_now)
        self.display = SweepDisplay(stream, ledger.trials, self.budget.seconds_left)
        self.record_process = RecordProcess(
            "ray_yolo.tune.records", self.folder, _uri(config), lambda text: self.display.say(f"WARNING: {text}"),
            own_session=cluster.is_shared(),
        )
        self._noted = time.monotonic()
        self._room = -math.inf, slots

    def slots_now(self) -> int:
        """The number of trials that currently fit on the cluster; the value is at most one second old."""
        now = time.monotonic()
        if now - self._room[0] > 1.0:
            self._room = now, max(1, room_for_trials(self.config, self.gpus))
        return self._room[1]

    def run_to_end(self) -> SearchResult:
        """Run the sweep until it has ended."""
        ledger, say = self.ledger, self.display.say
        say(f"{location(self.folder)}: {len(ledger.trials)} trials so far")
        say(f"each trial, except for its genes: {settings_line(ledger.recipe)}")
        for line in describe(
                ledger.begun, self.sweep.most_trials, self.sweep.hours, self.slots, self.budget.epoch_seconds):
            say(line)
        limit = self.search.limit
        for network, time_per_image in sorted(ledger.begun.latencies.items(), key=lambda each: each[1]):
            is_slow = limit and time_per_image > limit.latency_ms
            say(f"{network}: {time_per_image:.3g} ms an image" + ", over the limit: it is not trained" * bool(is_slow))
        for warning in warnings(ledger.begun.space, ledger.recipe, self.sweep.most_trials):
            say(f"warning: {warning}")
        write_options(self.folder, self.config)
        wait_seconds = min(waiting_limit(), PROMPT_SECONDS)
        try:
            with contextlib.closing(self.display):
                self.run_trials()
            result = self.finish()
            wait_seconds = waiting_limit()
            return result
        except (KeyboardInterrupt, SystemExit):
            say("interrupted; the same command continues")
            raise
        finally:
            self.ledger.close()
            self.note_time()
            self.finish_records(wait_seconds)

    def finish_records(self, limit: float) -> None:
        """Wait for the record process for at most so many seconds, and say what it has not completed."""
        with contextlib.suppress(KeyboardInterrupt):  # the user does not want to wait
            self.record_process.finish(limit)
        rest = self.record_process.describe_rest()
        if rest:
            self.display.say(rest)

    def note_time(self) -> None:
        """Note in the sweep's record how long it has run."""
        self.run.note_seconds(self.budget.seconds, self.display.say)

    def each_step(self) -> None:
        """Every few seconds, note the time, and see after the record process."""
        now = time.monotonic()
        if now - self._noted > NOTE_SECONDS:
            self._noted = now
            self.note_time()
            self.record_process.keep_running()

    def note_workers(self, text: str) -> None:
        """Print and log what happened to the pool's workers. Called in a thread of the pool."""
        self.display.say(text)
        log_pool(self.folder, text)

    def run_trials(self) -> None:
        """Run the unfinished and the newly proposed trials with Ray Tune until the sweep has ended.

        One worker pool trains all trials. While its workers are busy, `trials_ahead` more trials start up, unless
        --max-concurrent limits them.
        """
        config, ledger = self.config, self.ledger
        payload = _payload(config, ledger, self.folder)
        workers = config.placement.model_copy(update={"num_workers": pool_range(config.sweep, self.slots)})
        grows = config.sweep.max_concurrent == "auto"
        with standing_pool(workers, self.gpus, self.note_workers, grows=grows) as queue:
            self.run_ladder(payload, queue)

    def run_ladder(self, payload: Mapping[str, Any], queue: Any) -> None:
        """Train the tasks of the schedule."""
        ledger, budget = self.ledger, self.budget
        known = {key: outcome for key, _, outcome in self._elsewhere()}

        def look_up(task: Task) -> Outcome | None:
            if reason := ledger.begun.exceeds_limit(task.genes):
                return Outcome(reason=reason)
            return known.get((address(ledger.recipe, task.genes, task.seed), task.until)) if known else None

        budget.schedule = schedule = ledger.begun.schedule(write=ledger.append)
        schedule.restore(ledger.lines)
        dispatcher = Dispatcher(schedule, ledger.recipe.seed, budget.explores, look_up,
                                lambda: _processes(self.config, self.slots_now()), budget.finishing)
        scheduler = LadderScheduler(
            dispatcher, budget.measure, ledger.begun.cost, _processes(self.config, self.slots),
            lambda name: not is_held(self.trials / name))
        callback = SweepCallback(ledger, self.display, drops=not self.sweep.keep_weights, stop=scheduler.close,
                                 fail=lambda name, reason: dispatcher.finish(name, Outcome(reason=reason)),
                                 each_step=self.each_step)
        dispatcher.advance()
        if dispatcher.over is None:
            trainable = ray.tune.with_parameters(train_task, payload=payload, queue=queue)
            run_trials(trainable, callback, self.folder, self.config.placement.max_failures,
                       on_this_node=ledger.stored is not None,  # the folder of the sweep is on this node
                       search_alg=TaskSearcher(dispatcher, scheduler), num_samples=-1, scheduler=scheduler)

    def finish(self) -> SearchResult:
        """Write every file of the sweep, mark it as finished, and print where its results are."""
        config, ledger, folder = self.config, self.ledger, self.folder
        trials, claim = ledger.trials, ledger.claim
        ledger.close()
        for path in sorted(self.trials.iterdir()):
            finalize_abandoned_run(path)
        best = trials[claim.winner] if claim else best_trial(trials)
        if best is None or best.fitness is None:
            reasons = sorted({trial.reason for trial in trials if trial.reason})
            raise TrainingError(f"{folder}: all {len(trials)} trials failed: {'; '.join(reasons[:3])}")
        write_sweep_files(folder, ledger.recipe, trials, claim)
        front = pareto(trials, ledger.recipe, ledger.begun.latencies, ledger.begun.rungs[-1])
        if front:
            atomic_write(folder / "pareto.csv", format_pareto(front), durable=False)
        if not keep_best(folder, [self.trials / best.folder_name, *self._runs_elsewhere(best)]):
            self.display.say("warning: weights/best.pt: the sweep that trained it has dropped its weights; the command "
                             "below trains them again")
        if not config.sweep.keep_weights:
            kept = {trial.folder_name for trial in trials if trial is best or trial.state == "paused"}
            others = [path for path in self.trials.iterdir() if path.name not in kept]
            with ThreadPoolExecutor() as pool:  # a store needs a moment for each
                list(pool.map(drop_weights, others))
        draw_plots(folder, trials, best, rung_results(read_ledger(folder / LEDGER_FILE)))
        atomic_write(folder / "report.html", sweep_page(folder), durable=False)
        self.note_time()
        self.run.finish()
        self.display.say(closing_message(folder, ledger.recipe, best, claim))
        for row in front:
            self.display.say(f"{row.milliseconds:.3g} ms an image: fitness {row.fitness:.5g} (trial {row.trial}, "
                             f"{row.network})")
        return SearchResult(folder, trials, best, claim.claim if claim else None)

    def _runs_elsewhere(self, trial: Trial) -> list[Path]:
        """The runs of a trial in other sweeps."""
        recipe = self.ledger.recipe
        wanted = address(recipe, trial.genes, recipe.seed), trial.epochs
        return [folder for key, folder, _ in self._elsewhere() if key == wanted]

    def _elsewhere(self) -> Iterator[tuple[tuple[str, int], Path, Outcome]]:
        return results_elsewhere(self.folder.parent, self.ledger.begun.identity, self.ledger.path)


def _payload(config: TuneConfig, ledger: Ledger, folder: Path) -> dict[str, Any]:
    """The settings that all trials share, as plain JSON; see `task_config`."""
    placement = {**config.placement.model_dump(mode="json"), "resume": "", "mlflow_uri": _uri(config) or "off",
                 "registered_name": "", "cpus_per_worker": config.placement.cpus}
    placement |= ({"project": str(Path(config.placement.project) / folder.name / "trials")} if ledger.stored else
                  {"project": str(folder / "trials"), "storage_path": ""})
    file, colon, name = config.placement.callbacks.partition(":")
    placement["callbacks"] = f"{_absolute(file)}{colon}{name}"
    return {"recipe": {**ledger.recipe.model_dump(mode="json"), "data": _absolute(config.recipe.data),
                       "model": _absolute(ledger.recipe.model)},
            "placement": placement,
            "cache": str(cache_folder().absolute()) if ledger.stored else ""}


def _absolute(name: str) -> str:
    """The name of a data set, model or file of callbacks, valid in the working folder of any trial."""
    path = Path(name)
    is_path = path.suffix in (".yaml", ".yml", ".py") or (path / "data.yaml").is_file()
    return str(path.absolute()) if is_path and path.exists() else name
