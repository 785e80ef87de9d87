"""The MLflow run of a study: the parent of its trainings' runs, computed from the ledger.

The content, a `SweepRun` or a `ComparisonRun`, follows from the ledger only. The record process of the study delivers
it (`records`). A trial that is trained further has another fitness: its point is corrected.
"""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ray_yolo.core.events import METRICS
from ray_yolo.core.formatting import format_cell
from ray_yolo.runs.working_copy import FINISHED, address_of
from ray_yolo.sinks.base import Tell, ignore
from ray_yolo.sinks.mlflow_client import RUN_FILE, build_client, read_run_file
from ray_yolo.sinks.mlflow_errors import explained
from ray_yolo.sinks.mlflow_plan import (
    NOTE_TAG,
    OWN_FILES,
    PAGE_LINK,
    Point,
    RunPlan,
    flat_params,
    requested_tracking,
    source_tags,
)
from ray_yolo.sinks.mlflow_run import Delivery, files_address
from ray_yolo.sinks.registry import log_model
from ray_yolo.storage.store import open_store
from ray_yolo.tune.claim import Claim, PairsClaim
from ray_yolo.tune.compared import compared_classes, compared_metrics
from ray_yolo.tune.ledger_events import ClaimedEvent
from ray_yolo.tune.pairs import PairResults
from ray_yolo.tune.search import TuneConfig
from ray_yolo.tune.study_state import ComparisonState, read_study_state
from ray_yolo.tune.trials import Trial, best_trial, best_trials, short_name, short_value

if TYPE_CHECKING:
    from mlflow import MlflowClient

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

LISTED = 20  # best trials in the description: MLflow cuts off tags after 8,000 characters
CURVE = f"metrics/{METRICS[-1]}"
BEST_TAG, BEST_TRIAL_TAG, CLAIM_TAG = "ray_yolo.best", "ray_yolo.best_trial", "ray_yolo.claim"
ARTIFACTS = ("*.csv", "*.yaml", "report.html", "*.png", "*.jsonl", "weights/best.pt")
_ARTIFACTS_OF_PAIRS = ("*.png", "*.jsonl", "report.html")
LISTED_CLASSES = 40  # a comparison's description lists the classes that differ most

@dataclass(frozen=True)
class SweepRun:
    """A sweep, as shown by its MLflow run and by the states of its trials' runs."""

    config: TuneConfig
    trials: Sequence[Trial]  # all rows, by number
    status: Status
    claim: ClaimedEvent | None = None
    command: str = ""  # it runs the study

    @property
    def best(self) -> Trial | None:
        """The best trial of a finished sweep: its run is marked, and the files are final."""
        if self.status != "FINISHED":
            return None
        return self.trials[self.claim.winner] if self.claim else best_trial(self.trials)

    @property
    def stopped(self) -> list[Trial]:
        """The trials whose runs end with the sweep's status; resuming makes them RUNNING."""
        return [trial for trial in self.trials if trial.state in ("running", "paused") and self.status != "RUNNING"]

    def stopped_folders(self, folder: Path) -> list[str]:
        """Their run folders."""
        return [trial.folder_name for trial in self.stopped]

    @property
    def listed(self) -> list[Trial]:
        """The best trials, for the description."""
        return best_trials(self.trials, LISTED)

    def plan(self, folder: Path) -> RunPlan:
        """The content in the form in which all runs are delivered. The step of a trial's metric is its number."""
        now, best = round(time.time() * 1000), self.best
        measured = [trial for trial in self.trials if trial.fitness is not None]
        leaders = accumulate(measured, _better)
        points = [Point("fitness", trial.fitness or 0.0, now, trial.number) for trial in measured]
        points += [Point("best_fitness", leader.fitness or 0.0, now, trial.number)
                   for trial, leader in zip(measured, leaders, strict=True)]
        if self.claim and isinstance(self.claim.claim, Claim):
            points.append(Point("claim/gain", self.claim.claim.gain, now, 0))
        if best:
            points.append(Point("best/fitness", best.fitness or 0.0, now, best.number))
        params = flat_params({"sweep": self.config.sweep.model_dump(), **self.config.recipe.model_dump()})
        place, tracking = folder.resolve(), requested_tracking()
        return RunPlan(place.name, tracking.get("experiment") or place.parent.name, now, params,
                       source_tags(self.command),
                       points=points, status=self.status, end_ms=None if self.status == "RUNNING" else now,
                       artifacts=ARTIFACTS if best else (), experiment_id=tracking.get("experiment_id", ""))

    def complete(self, client: MlflowClient, folder: Path, uri: str, run_id: str, tell: Tell) -> None:
        """Describe the sweep by its best trials, mark the best one's run, and register its model if that is asked."""
        _mark_trials(client, folder, run_id, self)
        name = self.config.placement.registered_name
        best = _child(folder, self.best.folder_name) if name and self.best else None
        if best:
            tell(log_model(folder, uri, best, name).line)


def _better(one: Trial, other: Trial) -> Trial:
    return best_trial((one, other)) or one


def table(trials: Sequence[Trial]) -> str:
    """Trials with fitness and genes, in Markdown."""
    names = sorted({name for trial in trials for name in trial.genes})
    rows = [["trial", "epochs", "fitness", *map(short_name, names)], ["---"] * (3 + len(names))]
    for trial in trials:
        genes = [short_value(trial.genes.get(name, "")) for name in names]
        rows.append([trial.folder_name, str(trial.epochs), f"{trial.fitness:.5g}", *genes])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@dataclass(frozen=True)
class ComparisonRun:
    """A comparison, as shown by its MLflow run and by the states of its trainings' runs."""

    state: ComparisonState
    status: Status
    command: str = ""  # it runs the study

    def plan(self, folder: Path) -> RunPlan:
        """The content. The step of a point is the number of its pair, that of the claim its number of pairs."""
        now = round(time.time() * 1000)
        recipes, results, claim = self.state.recipes, self.state.results, self.state.claim
        points = [Point(f"{side}/fitness", result.fitness or 0.0, now, pair)
                  for (pair, side), result in results.items()]
        tags = source_tags(self.command)
        if self.state.is_claimed:
            points.append(Point("claim/difference", claim.difference, now, claim.pairs))
            if claim.margin is not None:
                points.append(Point("claim/margin", claim.margin, now, claim.pairs))
            tags |= {CLAIM_TAG: str(claim)}
        page = [PAGE_LINK] if self.status == "FINISHED" else []
        note = [*([str(claim)] if self.state.is_claimed else []), *page, sides_table(results, claim),
                *recipes.differences]
        place, tracking = folder.resolve(), requested_tracking()
        return RunPlan(
            place.name, tracking.get("experiment") or place.parent.name, now,
            flat_params({"A": recipes.a.model_dump(), "B": recipes.b.model_dump()}),
            tags | {NOTE_TAG: "\n\n".join(note)}, points=points, status=self.status,
            end_ms=None if self.status == "RUNNING" else now,
            artifacts=_ARTIFACTS_OF_PAIRS if self.status == "FINISHED" else (),
            experiment_id=tracking.get("experiment_id", ""))

    def stopped_folders(self, folder: Path) -> list[str]:
        """The run folders of trainings without a result, whose runs end with the comparison's status."""
        return self.state.open_folders(folder) if self.status != "RUNNING" else []

    def complete(self, client: MlflowClient, folder: Path, uri: str, run_id: str, tell: Tell) -> None:
        """Nothing is marked: both sides are in the description."""


class StudyMlflow:
    """The MLflow run of the study in a folder, on one server.

    Args:
        config: the settings of a sweep.
        command: that runs the study.
        tell: receives a line on the registered model.
    """

    def __init__(self, folder: Path, uri: str, config: TuneConfig | None, command: str = "",
                 tell: Tell = ignore) -> None:
        self._folder, self._uri, self._config, self._command, self._tell = folder, uri, config, command, tell
        self._delivery = Delivery(folder, uri)

    def content(self, status: Status) -> SweepRun | ComparisonRun:
        """What the run should have with this status, from the ledger."""
        state = read_study_state(self._folder)
        if isinstance(state, ComparisonState):
            return ComparisonRun(state, status, self._command)
        assert self._config is not None
        return SweepRun(self._config, state.trials, status, state.claim, self._command)

    def show(self, status: Status) -> None:
        """Make the run as the ledger has it, with this status; the first call creates it.

        Raises:
            RecordError: as `update` does.
        """
        self.update(self.content(status))

    def last_status(self) -> Status:
        """How the study has ended, according to its folder."""
        if (self._folder / FINISHED).exists():
            return "FINISHED"
        content = self.content("KILLED")
        trials = content.trials if isinstance(content, SweepRun) else ()
        return "FAILED" if trials and all(trial.state == "failed" for trial in trials) else "KILLED"

    def update(self, content: SweepRun | ComparisonRun) -> str:
        """Make the run so; the first call creates it and records its id in the folder. Returns the id.

        Raises:
            RecordError: if the server cannot be reached or refuses; the next call asks it again what it has.
        """
        with explained(self._uri):
            run_id = self._delivery.deliver(content.plan(self._folder))
            client = build_client(self._uri)
            for name in content.stopped_folders(self._folder):
                if child := _child(self._folder, name):
                    client.set_terminated(child, content.status)
            content.complete(client, self._folder, self._uri, run_id, self._tell)
            return run_id


def sides_table(results: PairResults, claim: PairsClaim) -> str:
    """The means of both sides over the pairs of a claim, in Markdown."""
    classes = sorted(compared_classes(results, claim.pairs), key=lambda row: -abs(row.difference))
    rows = [*compared_metrics(results, claim.pairs), *classes[:LISTED_CLASSES]]
    lines = ["| mean | A | B | B - A |", "| --- | --- | --- | --- |"]
    lines += [f"| {row.name} | {format_cell(row.a)} | {format_cell(row.b)} | {row.difference:+.4f} |" for row in rows]
    return "\n".join(lines)


def _mark_trials(client: MlflowClient, folder: Path, run_id: str, sweep: SweepRun) -> None:
    """Describe the sweep by its best trials, and mark the best one's run only."""
    run, claim = client.get_run(run_id), str(sweep.claim or "")
    links = comparison(str(run.info.experiment_id), _children(folder, sweep.listed))
    page = PAGE_LINK.replace(OWN_FILES, files_address(run)) if sweep.best else ""
    client.set_tag(run_id, NOTE_TAG, "\n\n".join(filter(None, (claim, page, links, table(sweep.listed)))))
    client.set_tag(run_id, CLAIM_TAG, claim)
    if not sweep.best:
        return
    best = sweep.best.number
    client.set_tag(run_id, BEST_TRIAL_TAG, best)
    for number in {int(run.data.tags.get(BEST_TRIAL_TAG, best)), best}:
        if child := _child(folder, sweep.trials[number].folder_name):
            client.set_tag(child, BEST_TAG, str(number == best).lower())


def comparison(experiment_id: str, runs: Sequence[str]) -> str:
    """Links to MLflow's pages that compare runs: parameters against metrics, and curves over epochs."""
    which = {"runs": json.dumps(runs), "experiments": json.dumps([experiment_id])}
    curves = {**which, "metric": json.dumps(CURVE), "plot_metric_keys": json.dumps([CURVE]), "x_axis": "step"}
    pages = {"Compare the trials": ("compare-runs", which), "their curves": ("metric", curves)}
    return ", ".join(f"[{text}](#/{page}?{urllib.parse.urlencode(query, quote_via=urllib.parse.quote)})"
                     for text, (page, query) in pages.items())


def _children(folder: Path, trials: Sequence[Trial]) -> list[str]:
    return list(filter(None, (_child(folder, trial.folder_name) for trial in trials)))


def _child(folder: Path, name: str) -> str | None:
    """The id of a training's MLflow run, if it has one."""
    run = folder / "trials" / name
    run_file = read_run_file(run)
    if run_file is None and (address := address_of(run)):  # another machine has trained it
        with suppress(FileNotFoundError):
            run_file = json.loads(open_store(address).get(RUN_FILE).data)
    return (run_file or {}).get("run_id")
