"""A comparison of two sides: pairs of trainings on fresh seeds, until one side is shown to be better.

    <project>/<name>/ledger.jsonl        both recipes, the result of each training, and the claim
    <project>/<name>/trials/pairN-a/     the run folder of each training, as of any training
    <project>/<name>/report.html, *.png, classes.csv    computed from ledger and logs

If the driver is killed, the same command continues: trainings with a result are kept, others resume from their
checkpoints, and the claim is that of an uninterrupted comparison. With more --pairs or --hours, a finished comparison
with this --name continues.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import ray.tune

from ray_yolo.config.effects import (
    Surroundings,
    describe_unused,
    effective_settings,
    given_settings,
    without_effect,
)
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.core import deadline
from ray_yolo.core.errors import ConfigError, DatasetError, LostWorkersError, TrainingError
from ray_yolo.core.files import atomic_write
from ray_yolo.core.formatting import format_count
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.synthetic import BUILT_IN
from ray_yolo.engine.devices import local_device
from ray_yolo.runs.folders import is_held, project_folder, storage_folder
from ray_yolo.runs.location import location
from ray_yolo.runs.run_dir import Run, begin_run, find_run
from ray_yolo.runs.run_record import LEDGER_FILE, SweepRecord, read_record
from ray_yolo.runtime import cluster
from ray_yolo.runtime.preflight import (
    check_cluster,
    check_early,
    compare_initial_weights,
    planned_recipe,
    read_dataset,
    resolve_recipe,
    surroundings,
)
from ray_yolo.runtime.trainer import fit
from ray_yolo.runtime.workers.pool_jobs import standing_pool
from ray_yolo.sinks.mlflow_client import tracking_uri
from ray_yolo.sinks.record_process import PROMPT_SECONDS, RecordProcess, waiting_limit
from ray_yolo.sinks.report import settings_line
from ray_yolo.sinks.run_logger import finalize_abandoned_run
from ray_yolo.storage.store import is_address
from ray_yolo.tune.claim import PairsClaim
from ray_yolo.tune.compare_ledger import (
    ClaimEvent,
    CompareLedger,
    ComparisonEvent,
    TrainedEvent,
    read_comparison,
    results_of,
)
from ray_yolo.tune.compare_page import write_page
from ray_yolo.tune.compare_settings import CompareConfig
from ray_yolo.tune.compare_status import comparison_table, result_text
from ray_yolo.tune.evolution import Space
from ray_yolo.tune.identity import identity_of
from ray_yolo.tune.pairs import (
    PairDispatcher,
    PairSchedule,
    claim_from,
    class_precision,
    compared_classes,
)
from ray_yolo.tune.ray_adapter import LadderScheduler, TaskSearcher, TrialCallback, run_trials
from ray_yolo.tune.records import write_options
from ray_yolo.tune.schedule import Outcome
from ray_yolo.tune.sides import Recipes
from ray_yolo.tune.task import read_outcome, task_config
from ray_yolo.tune.trainable import train_task
from ray_yolo.tune.trials import train_command

NOTE_SECONDS = 5.0  # between two notes of the time
_log = logging.getLogger(__name__)

_REFUSED = {
    "resume": "the same command continues a comparison; leave it out",
    "stop_after": "every training is compared at its end; leave it out",
    "registered_name": "a comparison registers no model; train the better side, or register one of its trainings",
}


@dataclass(frozen=True)
class ComparisonResult:
    """The result of a comparison."""

    folder: Path
    claim: PairsClaim


class _CheckedComparison(NamedTuple):
    """A comparison after all checks that need no cluster."""

    config: CompareConfig  # the placement has the workers of each training
    asked: Recipes
    train: tuple[AnnotationIndex, AnnotationIndex]  # of A and B
    val: AnnotationIndex


def compare(config: CompareConfig, sides: Recipes, *, quiet: bool = False) -> ComparisonResult:
    """Run a comparison, or continue the one that the same configuration started.

    Args:
        sides: of `read_sides`.

    Raises:
        InputError: for bad input, before any cluster work.
        TrainingError: if a training fails for another reason than that its loss has diverged.
    """
    checked = _check(config, sides)
    config, digest = checked.config, _digest(checked)
    run = find_run(sides.a, config.placement, lambda folder: _has_more(folder, config), digest=digest)
    try:
        gpus, slots = _connect(checked, run)
        recipes = _resolve_sides(checked, gpus)
        run = run or begin_run(config.placement, SweepRecord(
            digest=digest, space="", trials=2 * config.comparison.pairs, is_comparison=True))
        begun = ComparisonEvent(identity=_identity(checked), a=recipes.a, b=recipes.b)
        ledger = CompareLedger(run.folder / LEDGER_FILE, begun)
        stream = io.StringIO() if quiet else sys.stdout
        return _ComparisonExecution(config, ledger, run, recipes, slots, gpus, stream).run_to_end()
    finally:
        deadline.end(run.release if run else None)


def dry_run(config: CompareConfig, sides: Recipes) -> list[str]:
    """What a comparison would train, line by line, after all checks. It starts and writes nothing.

    Raises:
        InputError: as `compare` does.
    """
    checked = _check(config, sides)
    placement = checked.config.placement
    gpus = cluster.planned_gpus(placement) if placement.num_workers else 0.0
    planned = Recipes(*(planned_recipe(recipe, placement, train, gpus)
                        for recipe, train in zip(sides, checked.train, strict=True)))
    return [f"both sides, except for the differences: {settings_line(planned.a)}", *planned.differences,
            f"at most {format_count(config.comparison.pairs, 'pair')}"]


def _check(config: CompareConfig, sides: Recipes) -> _CheckedComparison:
    """Check everything that needs no cluster.

    Raises:
        InputError: for sides that cannot be trained, or whose fitness cannot be compared.
    """
    placement = config.placement.model_copy(update={"num_workers": config.comparison.workers_per_training})
    config = config.model_copy(update={"placement": placement})
    for name, reason in _REFUSED.items():
        if getattr(placement, name):
            raise ConfigError(f"{name}: {reason}")
    if is_address(placement.storage_path) or is_address(placement.project):
        raise ConfigError("storage_path: a comparison is kept in a folder; give one that all nodes mount")
    train, val, around = [], [], []
    for recipe in sides:
        check_early(RunConfig(recipe=recipe, placement=placement))
        description, train_labels, val_labels = read_dataset(recipe)
        compare_initial_weights(recipe, train_labels.names)
        train.append(train_labels)
        val.append(val_labels)
        around.append(surroundings(recipe, description, train_labels, val_labels))
    if val[0].digest != val[1].digest:
        described = [f"{side} ({recipe.data}: {format_count(len(labels), 'image')}, "
                     f"{format_count(len(labels.classes), 'label')})"
                     for side, recipe, labels in zip("AB", sides, val, strict=True)]
        raise DatasetError(f"data: the validation sets of {' and '.join(described)} differ in images, labels or class "
                           "names, so their fitness cannot be compared; give the data set of B the `val` of A")
    checked = _CheckedComparison(config, sides, (train[0], train[1]), val[0])
    _check_effects(checked, around)
    return checked


def _check_effects(checked: _CheckedComparison, around: Sequence[Surroundings]) -> None:
    """Warn of given settings without effect, and refuse sides that would train the same weights.

    Raises:
        ConfigError: naming the settings that differ without effect.
    """
    planned = Recipes(*(planned_recipe(recipe, checked.config.placement, train, None)
                        for recipe, train in zip(checked.asked, checked.train, strict=True)))
    lines = []
    for side, asked, recipe, about in zip("AB", checked.asked, planned, around, strict=True):
        for line in describe_unused(given_settings(asked), without_effect(recipe, about)):
            lines.append(f"{side}: {line}")
    a, b = (effective_settings(recipe, about) for recipe, about in zip(planned, around, strict=True))
    if a == b:
        reasons = "; ".join([*planned.differences, *lines]) if planned.differences else "their settings are equal"
        raise ConfigError(f"A and B train the same weights, so no difference can be shown: {reasons}; give sides that "
                          "differ in a setting that has an effect")
    for line in lines:
        _log.warning("%s", line)


def _digest(checked: _CheckedComparison) -> str:
    """The identity of a comparison: of both recipes, as requested."""
    parts = [recipe_digest(recipe) for recipe in checked.asked]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _identity(checked: _CheckedComparison) -> dict[str, str]:
    """Digests of everything that the settings of both sides only name."""
    identity = {}
    for side, recipe, train in zip("AB", checked.asked, checked.train, strict=True):
        for part, digest in identity_of(recipe, Space((), ()), train, checked.val).items():
            identity[f"{part} of {side}"] = digest
    return identity


def _connect(checked: _CheckedComparison, run: Run | None) -> tuple[float, int]:
    """The GPUs of each worker, and the number of trainings that run at once."""
    placement = checked.config.placement
    workers = checked.config.comparison.workers_per_training
    if not workers:
        return float(local_device(placement.gpus_per_worker).type == "cuda"), 1
    gpus = cluster.connect(placement)
    slots = cluster.parallel_trainings(placement, workers, gpus)
    if not slots:
        total = ray.cluster_resources()
        raise ConfigError(f"workers_per_training: {workers} workers need {placement.cpus * workers:g} CPU and "
                          f"{gpus * workers:g} GPU, the cluster has {total.get('CPU', 0):g} and "
                          f"{total.get('GPU', 0):g}; use fewer")
    for warning in check_cluster(placement, run, *checked.train):
        print(f"warning: {warning}", file=sys.stderr)
    return gpus, slots


def _resolve_sides(checked: _CheckedComparison, gpus: float) -> Recipes:
    """The recipes of both sides with all settings decided."""
    placement = checked.config.placement
    resolved = []
    for recipe, train in zip(checked.asked, checked.train, strict=True):
        resolved.append(resolve_recipe(_with_absolute_paths(recipe), placement, train, gpus))
    return Recipes(*resolved)


def _with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe with names that are valid in the working folder of any training."""
    data = recipe.data if recipe.data in BUILT_IN else _absolute(recipe.data)
    return recipe.model_copy(update={"data": data, "model": _absolute_file(recipe.model)})


def _absolute(name: str) -> str:
    """The absolute path of a file or folder; another name, such as an address, stays."""
    path = Path(name).expanduser()
    return str(path.absolute()) if name and path.exists() else name


def _absolute_file(name: str) -> str:
    """The absolute path of a model file or of a file with callbacks; another name stays."""
    return _absolute(name) if name.endswith((".yaml", ".yml", ".py")) else name


def _has_more(folder: Path, config: CompareConfig) -> bool:
    """Whether a finished comparison continues, because more pairs or hours are requested than it has had."""
    claim = claim_from(results_of(read_comparison(folder / LEDGER_FILE)))
    record, hours = read_record(folder), config.comparison.hours
    spent = record.seconds if isinstance(record, SweepRecord) else 0.0
    return not claim.better and claim.pairs < config.comparison.pairs and (not hours or spent < 3600 * hours)


class _ComparisonExecution:
    """One command's part of a comparison.

    Args:
        recipes: of both sides, resolved by this command; those of the ledger count, except for their paths.
        slots: trainings at once.
    """

    def __init__(self, config: CompareConfig, ledger: CompareLedger, run: Run, recipes: Recipes, slots: int,
                 gpus: float, stream: TextIO) -> None:
        self.config, self.ledger, self.run, self.slots, self.gpus = config, ledger, run, slots, gpus
        self.folder, self.stream = run.folder, stream
        self.trials = self.folder / "trials"
        self.trials.mkdir(exist_ok=True)
        self.recipes = Recipes(*(_with_paths_of(there, here)
                                 for there, here in zip(ledger.begun.recipes, recipes, strict=True)))
        record = run.record
        self._spent = record.seconds if isinstance(record, SweepRecord) else 0.0
        self._begun = self._noted = time.monotonic()
        self.uri = tracking_uri(config.placement.mlflow_uri, storage_folder(config.placement))
        self.record_process = RecordProcess(
            "ray_yolo.tune.records", self.folder, self.uri, lambda text: self.say(f"WARNING: {text}"),
            own_session=cluster.is_shared(),
        )
        self.schedule = PairSchedule(
            self.recipes, config.comparison.pairs, self.write, results_of(ledger.lines),
            lambda name: class_precision(self.trials / name), lambda: self.slots)
        self.dispatcher = PairDispatcher(
            self.schedule, self.recipes.a.seed, self.may_start_pair, lambda task: None, lambda: self.slots)

    @property
    def seconds(self) -> float:
        """For which all commands have run."""
        return self._spent + time.monotonic() - self._begun

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=self.stream, flush=True)

    def write(self, result: TrainedEvent) -> None:
        """Write a result to the ledger, and print it."""
        self.ledger.append(result)
        self.say(result_text(result))

    def may_start_pair(self) -> bool:
        """Whether there is time for a new pair."""
        hours = self.config.comparison.hours
        return not hours or self.seconds < 3600 * hours

    def run_to_end(self) -> ComparisonResult:
        """Run the comparison until it has ended."""
        self.say(f"{location(self.folder)}: {format_count(len(self.schedule.results), 'training')} so far")
        self.say(f"both sides, except for the differences: {settings_line(self.recipes.a)}")
        for line in self.recipes.differences:
            self.say(line)
        write_options(self.folder, self.config)
        wait_seconds = min(waiting_limit(), PROMPT_SECONDS)
        try:
            self.dispatcher.advance()
            if self.dispatcher.over is None:
                if self.config.placement.num_workers:
                    self.train_on_pool()
                else:
                    self.train_here()
            result = self.finish()
            wait_seconds = waiting_limit()
            return result
        except (KeyboardInterrupt, SystemExit):
            self.say("interrupted; the same command continues")
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
            self.say(rest)

    def note_time(self) -> None:
        """Note in the record how long the comparison has run."""
        self.run.note_seconds(self.seconds, self.say)

    def each_step(self) -> None:
        """Every few seconds, note the time, and see after the record process."""
        now = time.monotonic()
        if now - self._noted > NOTE_SECONDS:
            self._noted = now
            self.note_time()
            self.record_process.keep_running()

    def train_here(self) -> None:
        """Train one after the other in this process, without Ray."""
        payload = self.payload()
        while task := self.dispatcher.take(lambda name: True):
            config = self.dispatcher.config(task)
            outcome = _train_here(task_config(payload, config), config["until"])
            self.dispatcher.finish(config["trial"], outcome)
            self.each_step()

    def train_on_pool(self) -> None:
        """Train as many at once as fit on the cluster, on one worker pool."""
        workers = self.config.comparison.workers_per_training
        pool = self.config.placement.model_copy(update={"num_workers": (1, self.slots * workers)})
        with standing_pool(pool, self.gpus, self.say, grows=False) as queue:
            scheduler = LadderScheduler(
                self.dispatcher, lambda work, seconds: None, lambda settings: 1.0, self.slots,
                lambda name: not is_held(self.trials / name))
            callback = TrialCallback(
                self.say, lambda name, reason: self.dispatcher.finish(name, Outcome(reason=reason)),
                stop=scheduler.close, each_step=self.each_step)
            trainable = ray.tune.with_parameters(train_task, payload=self.payload(), queue=queue)
            run_trials(trainable, callback, self.folder, self.config.placement.max_failures,
                       search_alg=TaskSearcher(self.dispatcher, scheduler), num_samples=-1, scheduler=scheduler)

    def payload(self) -> dict[str, Any]:
        """The settings that all trainings share, as plain JSON; see `task_config`."""
        placement = self.config.placement
        file, colon, name = placement.callbacks.partition(":")
        cpus = placement.cpus_per_worker if not placement.num_workers else placement.cpus
        return {
            "recipe": self.recipes.a.model_dump(mode="json"),
            "placement": {
                **placement.model_dump(mode="json"), "project": str(self.trials.absolute()), "storage_path": "",
                "mlflow_uri": self.uri or "off", "cpus_per_worker": cpus,
                "callbacks": f"{_absolute_file(file)}{colon}{name}"},
            "cache": ""}

    def finish(self) -> ComparisonResult:
        """Write the claim and every file, mark the comparison as finished, and print the result."""
        claim = self.dispatcher.over
        if self.schedule.error:
            raise TrainingError(f"{self.schedule.error}; the same command continues")
        assert isinstance(claim, PairsClaim)
        self.ledger.append(ClaimEvent(claim=claim))
        self.ledger.close()
        for path in sorted(self.trials.iterdir()):
            finalize_abandoned_run(path)
        results = self.schedule.results
        atomic_write(self.folder / "classes.csv", _classes_csv(results, claim.pairs), durable=False)
        write_page(self.folder)
        self.note_time()
        self.run.finish()
        for line in comparison_table(results, claim):
            self.say(line)
        self.say(str(claim))
        self.say(f"page: {location(self.folder)}/report.html")
        return ComparisonResult(self.folder, claim)


def _with_paths_of(recorded: Recipe, now: Recipe) -> Recipe:
    """The recipe of the ledger, with the data set, model file and weights where this command has found them."""
    return recorded.model_copy(update={"data": now.data, "model": now.model, "weights": now.weights})


def _train_here(config: RunConfig, until: int) -> Outcome:
    """Train in this process, unless an earlier command has left the outcome in the run folder."""
    folder = project_folder(config.placement) / config.placement.name
    known = read_outcome(folder, until)
    if known:
        return known
    try:
        fit(config, quiet=True, command=train_command(config.recipe), has_own_records=False)
    except LostWorkersError:
        raise
    except TrainingError as error:
        return Outcome(reason=f"{type(error).__name__}: {error}".splitlines()[0])
    return read_outcome(folder, until) or Outcome(reason="it ended without a validation")


def _classes_csv(results: Mapping[Any, TrainedEvent], pairs: int) -> str:
    """The AP of each class: means of both sides, their difference and its standard error."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["class", "A", "B", "difference", "standard error", "pairs"])
    for row in compared_classes(dict(results), pairs):
        table.writerow([row.name, row.a, row.b, row.difference, "" if row.error is None else row.error, row.pairs])
    return text.getvalue()
