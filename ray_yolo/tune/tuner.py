"""A sweep over the whole cluster: many parallel trials, each a distributed training. `tune.runner` runs it.

    <project>/<name>/evolve.csv, hyp_evolve.yaml, *.png    computed from the ledger

With more --trials or --hours, a finished sweep with this --name continues.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ray_yolo.config.effects import describe_unused, given_settings
from ray_yolo.config.fine_tuning import fine_tuned
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe, recipe_digest, resolve
from ray_yolo.config.settings import canonical
from ray_yolo.core import deadline
from ray_yolo.core.errors import ConfigError, TrainingError
from ray_yolo.core.files import atomic_write
from ray_yolo.core.formatting import format_count, format_size
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.runs.folders import is_held, project_folder
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
from ray_yolo.sinks.report import settings_line
from ray_yolo.tune.budget import Budget, describe, recorded_epoch_seconds
from ray_yolo.tune.claim import Claim
from ray_yolo.tune.console import SweepDisplay, closing_message
from ray_yolo.tune.dispatch import Dispatcher
from ray_yolo.tune.evolution import Space, grid_size, num_combinations
from ray_yolo.tune.files import (
    WEIGHTS_FOLDERS,
    drop_weights,
    keep_best,
    read_warm_start,
    used_bytes,
    write_sweep_files,
)
from ray_yolo.tune.identity import DATA, identity_of, versions
from ray_yolo.tune.latency import format_pareto, measure, networks, pareto
from ray_yolo.tune.ledger import Ledger, begun_of, read_ledger, read_trials, results_elsewhere, rung_results
from ray_yolo.tune.ledger_events import ClaimedEvent
from ray_yolo.tune.page import write_page
from ray_yolo.tune.plots import draw_plots
from ray_yolo.tune.runner import Study, seconds_spent
from ray_yolo.tune.schedule import Outcome, Task, address, genes_key, rungs_of
from ray_yolo.tune.search import Ladder, SweepConfig, TuneConfig, check_placement
from ray_yolo.tune.space import TuneSpace, combinations, load_space, unused_under, warnings
from ray_yolo.tune.study import SweepEvent
from ray_yolo.tune.trials import Trial, overlay

_log = logging.getLogger(__name__)


def concurrent_trials(config: TuneConfig, gpus: float) -> int:
    """The number of trials that fit on the cluster in parallel.

    Tune does not track the resources of a trial's workers. Without this limit, each trial could hold some of its
    workers while all trials wait for each other (a deadlock).

    Raises:
        ConfigError: if not even one trial fits.
    """
    slots = room_for_trials(config, gpus)
    if not slots:
        raise cluster.no_room("workers_per_trial", config.placement, config.sweep.workers_per_trial, gpus)
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
    claim: Claim  #: what may be said of the best trial


def search(config: TuneConfig, *, quiet: bool = False) -> SearchResult:
    """Run a sweep, or continue the one that the same configuration started.

    Raises:
        InputError: for bad input, before any cluster work.
        TrainingError: if every trial failed.
    """
    config, space, train, val = _checked(config)
    run = find_run(config.recipe, config.placement, lambda folder: _has_more(folder, config))
    try:
        if run:
            _check_virtual_slots(run.folder / LEDGER_FILE, config.sweep.virtual_slots)
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
        identity = {**versions(), **identity_of(config.recipe, space.space, train, val)}
        begun = _begun(config, space, resolved, slots, latencies, identity)
        ledger = Ledger(run.folder / LEDGER_FILE, begun, run.remote)
        return Sweep(config, ledger, run, slots, gpus, io.StringIO() if quiet else sys.stdout).run_to_end()
    finally:
        deadline.end(run.release if run else None)


def _begun(config: TuneConfig, space: TuneSpace, recipe: Recipe, slots: int, latencies: Mapping[str, float],
           identity: dict[str, str]) -> SweepEvent:
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
    begun = _begun(config, space, config.recipe, slots, {}, {})
    seconds = recorded_epoch_seconds(project_folder(config.placement), config.recipe, train.digest,
                                     config.sweep.workers_per_trial)
    lines = describe(begun, config.sweep.most_trials, config.sweep.hours, slots, seconds)
    lines += [f"warning: {text}" for text in warnings(begun.space, begun.recipe, config.sweep.most_trials)]
    return lines


def _has_more(folder: Path, config: TuneConfig) -> bool:
    """Whether a finished sweep continues, because more trials or hours are requested than it has had.

    A finite space has no more once each combination was proposed.
    """
    lines, spent = read_ledger(folder / LEDGER_FILE), seconds_spent(read_record(folder))
    if not lines or not isinstance(begun_of(lines), SweepEvent):
        return True  # this is no sweep, and another check says so
    is_short = not config.sweep.hours or spent < 0.95 * 3600 * config.sweep.hours  # it ends a little before its time
    trials = read_trials(lines).values()
    proposed = {genes_key(trial.genes) for trial in trials}
    return (is_short and len(trials) < config.sweep.most_trials
            and len(proposed) < num_combinations(begun_of(lines).space.genes))


def _check_virtual_slots(ledger: Path, asked: int) -> None:
    """Refuse another number of virtual slots than that of an existing sweep; 0: any."""
    lines = read_ledger(ledger)
    if asked and lines and (ours := begun_of(lines).virtual_slots) != asked:
        raise ConfigError(f"virtual_slots: {ledger}: this sweep has {format_count(ours, 'virtual slot')}, not {asked}; "
                          "leave --virtual-slots out to continue it, or give another --name to start a new one")


def _rungs(space: TuneSpace, recipe: Recipe) -> tuple[int, ...]:
    """The epochs at which trials pause, and those of a whole training."""
    ladder = space.search.scheduler
    if not isinstance(ladder, Ladder):
        return (recipe.epochs,)
    if not ladder.first_epochs:
        return rungs_of(recipe.epochs)
    return ladder.first_epochs, recipe.epochs


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
    settings = config.sweep
    check_placement(config.placement, "sweep", "workers_per_trial", settings.workers_per_trial)
    loaded = load_space(settings.space, config.recipe)
    space = loaded.space
    trials = min(settings.most_trials, grid_size(space.genes)) if space.algorithm == "grid" else settings.trials
    config = config.model_copy(update={
        "sweep": settings.model_copy(update={"trials": trials}),
        "placement": config.placement.model_copy(update={"num_workers": settings.workers_per_trial})})
    loaded.search.check(config.recipe)
    if settings.warm_start and space.algorithm == "grid":
        raise ConfigError("warm_start: a grid tries its combinations in their order and starts from no old results; "
                          "leave --warm-start out, or search by another algorithm")
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


class Sweep(Study[SearchResult]):
    """One command's part of a sweep."""

    config: TuneConfig

    def __init__(self, config: TuneConfig, ledger: Ledger, run: Run, slots: int, gpus: float, stream: TextIO) -> None:
        self.begun: SweepEvent = ledger.begun
        epoch_seconds = recorded_epoch_seconds(run.folder.parent, self.begun.recipe, self.begun.identity[DATA],
                                               config.sweep.workers_per_trial)
        self.budget = Budget(self.begun, config.sweep.most_trials, config.sweep.hours, seconds_spent(run.record),
                             epoch_seconds, self.slots_now)
        self.display = SweepDisplay(stream, ledger.trials, self.budget.seconds_left)
        self.grows = config.sweep.max_concurrent == "auto"
        self._room = -math.inf, slots
        """When the slots were counted, and how many there were."""
        self._dropped: set[int] = set()
        """Trials whose weights were removed."""
        self._remover = ThreadPoolExecutor(1)
        super().__init__(config, ledger, run, slots, gpus)

    def make_dispatcher(self) -> Dispatcher:
        """The schedule on its virtual clock; what another sweep of the project has trained is not trained again."""
        begun, budget = self.begun, self.budget
        elsewhere = {key: outcome for key, _, outcome in self._elsewhere()}

        def known(task: Task) -> Outcome | None:
            if reason := begun.exceeds_limit(task.genes):
                return Outcome(reason=reason)
            return elsewhere.get((address(begun.recipe, task.genes, task.seed), task.until)) if elsewhere else None

        budget.schedule = schedule = begun.schedule(write=self.ledger.append)
        schedule.restore(self.ledger.lines)
        return Dispatcher(schedule, begun.folder_of, budget.explores, known,
                          lambda: self.most_at_once(self.slots_now()), budget.ending)

    def pool_range(self) -> tuple[int, int]:
        """As many workers as the slots have, of which `min_slots` stay."""
        return pool_range(self.config.sweep, self.slots)

    def slots_now(self) -> int:
        """The number of trials that currently fit on the cluster; the value is at most one second old."""
        now = time.monotonic()
        if now - self._room[0] > 1.0:
            self._room = now, max(1, room_for_trials(self.config, self.gpus))
        return self._room[1]

    def most_at_once(self, slots: int) -> int:
        """The trials that train, and those that start up meanwhile."""
        return _processes(self.config, slots)

    def say(self, text: str) -> None:
        """Print a line, above the table if there is one."""
        self.display.say(text)

    def describe(self) -> list[str]:
        """The sweep, its trainings and their time, and what its space does not search."""
        begun, sweep = self.begun, self.config.sweep
        lines = [f"{location(self.folder)}: {len(self.ledger.trials)} trials so far",
                 f"each trial, except for its genes: {settings_line(begun.recipe)}",
                 *describe(begun, sweep.most_trials, sweep.hours, self.slots, self.budget.epoch_seconds)]
        limit = begun.search.limit
        for network, time_per_image in sorted(begun.latencies.items(), key=lambda each: each[1]):
            is_slow = limit and time_per_image > limit.latency_ms
            lines.append(f"{network}: {time_per_image:.3g} ms an image" + ", over the limit: it is not trained"
                         * bool(is_slow))
        paused = [trial for trial in self.ledger.trials if trial.state == "paused"]
        lost = [trial for trial in paused if not used_bytes(self.trials / trial.folder_name / "checkpoints")]
        if lost and not self.run.remote:  # a store has those of a working copy
            lines.append(f"paused without weights: {format_count(len(lost), 'trial')}; one that goes on trains again "
                         "from its first epoch")
        return lines + [f"warning: {text}" for text in warnings(begun.space, begun.recipe, sweep.most_trials)]

    def started(self, name: str, until: int) -> None:
        """Show a start."""
        self.display.started(name, until)

    def ended(self, name: str, config: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Show an end, and note how long the task took."""
        if result.get("epochs"):
            self.budget.measure(config["genes"], result["epochs"], result["seconds"])
        self.display.ended(name)

    def show(self) -> None:
        """Write the tables, update the display, and remove the weights of trials that cannot win."""
        trials = self.ledger.trials
        try:
            write_sweep_files(self.folder, self.begun.recipe, trials, self.ledger.claim)
        except OSError as error:  # the end of the sweep writes them again
            self.say(f"warning: {self.folder}: its tables cannot be written: {error}")
        self.display.update(trials)
        if not self.config.sweep.keep_weights:
            self._drop_weights(trials)

    def _drop_weights(self, trials: Sequence[Trial]) -> None:
        """Remove the weights of trials that have ended and cannot win."""
        assert self.budget.schedule is not None
        kept = self.budget.schedule.may_win()
        for trial in trials:
            folder = self.trials / trial.folder_name
            if trial.has_ended and trial.number not in kept | self._dropped and not is_held(folder):
                self._dropped.add(trial.number)
                self._remover.submit(drop_weights, folder)

    def close(self) -> None:
        """Leave the table as it is, and wait for weights that are being removed."""
        self.display.close()
        self._remover.shutdown()

    def finish(self, claim: ClaimedEvent) -> tuple[SearchResult, list[str]]:
        """Write every file of the sweep."""
        begun, folder, trials = self.begun, self.folder, self.ledger.trials
        best = trials[claim.winner]
        if best.fitness is None:
            reasons = "; ".join(sorted({trial.reason for trial in trials if trial.reason})[:3])
            if any(trial.fitness is not None for trial in trials):
                raise TrainingError(f"{folder}: the default failed, and no other trial was trained to its end in time "
                                    f"({reasons}); give more --hours or --trials to the same command")
            raise TrainingError(f"{folder}: all {len(trials)} trials failed: {reasons}")
        write_sweep_files(folder, begun.recipe, trials, claim)
        front = pareto(trials, begun.recipe, begun.latencies, begun.rungs[-1])
        if front:
            atomic_write(folder / "pareto.csv", format_pareto(front), durable=False)
        if not keep_best(folder, [self.trials / best.folder_name, *self._runs_elsewhere(best)]):
            self.say("warning: weights/best.pt: the sweep that trained it has dropped its weights; the command below "
                     "trains them again")
        if not self.config.sweep.keep_weights:
            kept = {best.folder_name}
            if not self.config.sweep.drop_paused_weights:
                kept |= {trial.folder_name for trial in trials if trial.state == "paused"}
            names = {path.name for path in self.trials.iterdir()}
            names |= {trial.folder_name for trial in trials}  # also those that another machine has trained
            others = [self.trials / name for name in sorted(names - kept)]
            with ThreadPoolExecutor() as pool:  # a store needs a moment for each
                list(pool.map(drop_weights, others))
        draw_plots(folder, trials, best, rung_results(self.ledger.lines))
        write_page(folder)
        lines = [self._describe_disk(trials), closing_message(folder, begun.recipe, best, claim)]
        lines += [f"{row.milliseconds:.3g} ms an image: fitness {row.fitness:.5g} (trial {row.trial}, {row.network})"
                  for row in front]
        assert isinstance(claim.claim, Claim)
        return SearchResult(folder, trials, best, claim.claim), lines

    def _describe_disk(self, trials: Sequence[Trial]) -> str:
        """The disk that the trials hold at the end, and the flag that frees most of it."""
        line = f"disk: {self.trials} holds {format_size(used_bytes(self.trials))}"
        paused = [self.trials / trial.folder_name for trial in trials if trial.state == "paused"]
        weights = used_bytes(*(folder / name for folder in paused for name in WEIGHTS_FOLDERS))
        if weights and not self.config.sweep.keep_weights:
            line += (f", {format_size(weights)} of it in weights of {format_count(len(paused), 'paused trial')}, from "
                     "which more --trials or --hours go on; --drop-paused-weights removes them at the end")
        return line

    def _runs_elsewhere(self, trial: Trial) -> list[Path]:
        """The runs of a trial in other sweeps."""
        recipe = self.begun.recipe
        wanted = address(recipe, trial.genes, recipe.seed), trial.epochs
        return [folder for key, folder, _ in self._elsewhere() if key == wanted]

    def _elsewhere(self) -> Iterator[tuple[tuple[str, int], Path, Outcome]]:
        return results_elsewhere(self.run.folder.parent, self.begun.identity, self.ledger.path)
