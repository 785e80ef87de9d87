"""The MLflow run of a comparison: the parent of its trainings' runs, computed from the ledger."""

from __future__ import annotations

import time
from pathlib import Path

from ray_yolo.core.formatting import format_cell
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.runs.working_copy import FINISHED
from ray_yolo.sinks.mlflow_client import build_client, read_run_file
from ray_yolo.sinks.mlflow_errors import explained
from ray_yolo.sinks.mlflow_plan import Point, RunPlan, flat_params, requested_tracking, source_tags
from ray_yolo.sinks.mlflow_run import Delivery
from ray_yolo.tune.compare_ledger import begun_of, claim_of, read_comparison, results_of
from ray_yolo.tune.ledger_events import LedgerEvent
from ray_yolo.tune.mlflow import CLAIM_TAG, NOTE_TAG, Status
from ray_yolo.tune.pairs import claim_from, compared_classes, compared_metrics, training_folder

_ARTIFACTS = ("*.png", "*.jsonl", "report.html")
_LISTED = 40  # classes in the description, those that differ most: MLflow cuts off tags after 8,000 characters


class CompareMlflow:
    """The MLflow run of the comparison in a folder, on one server.

    Args:
        command: that runs the comparison.
    """

    def __init__(self, folder: Path, uri: str, command: str = "") -> None:
        self._folder, self._uri, self._command = folder, uri, command
        self._delivery = Delivery(folder, uri)

    def show(self, status: Status) -> None:
        """Make the run as the ledger has it; the first call creates it and records its id in the folder.

        Raises:
            RecordError: if the server cannot be reached or refuses; the next call asks it again what it has.
        """
        with explained(self._uri):
            self._delivery.deliver(plan_comparison(self._folder, status, self._command))
            if status != "RUNNING":
                self._end_children(status)

    def last_status(self) -> Status:
        """How the comparison has ended, according to its folder."""
        return "FINISHED" if (self._folder / FINISHED).exists() else "KILLED"

    def _end_children(self, status: Status) -> None:
        """Give the trainings without a result the status of the comparison; resuming makes them RUNNING."""
        ended = {training_folder(pair, side) for pair, side in results_of(_lines_of(self._folder))}
        for training in sorted((self._folder / "trials").glob("*")):
            about = read_run_file(training)
            if about and training.name not in ended:
                build_client(self._uri).set_terminated(about["run_id"], status)


def plan_comparison(folder: Path, status: Status, command: str = "") -> RunPlan:
    """The content of the run. The step of a point is the number of its pair, that of the claim its number of pairs."""
    now = round(time.time() * 1000)
    lines = _lines_of(folder)
    recipes, results = begun_of(lines).recipes, results_of(lines)
    points = [Point(f"{side}/fitness", result.fitness or 0.0, now, pair) for (pair, side), result in results.items()]
    tags = source_tags(command)
    claim = claim_of(lines)
    if claim:
        points.append(Point("claim/difference", claim.difference, now, claim.pairs))
        if claim.margin is not None:
            points.append(Point("claim/margin", claim.margin, now, claim.pairs))
        tags |= {CLAIM_TAG: str(claim)}
    tags |= {NOTE_TAG: "\n\n".join([*([str(claim)] if claim else []), _markdown(folder), *recipes.differences])}
    place, tracking = folder.resolve(), requested_tracking()
    return RunPlan(
        place.name, tracking.get("experiment") or place.parent.name, now,
        flat_params({"A": recipes.a.model_dump(), "B": recipes.b.model_dump()}), tags, points=points, status=status,
        end_ms=None if status == "RUNNING" else now, artifacts=_ARTIFACTS if status == "FINISHED" else (),
        experiment_id=tracking.get("experiment_id", ""))


def _markdown(folder: Path) -> str:
    """The table of both sides, in Markdown."""
    results = results_of(_lines_of(folder))
    claim = claim_from(results)
    classes = sorted(compared_classes(results, claim.pairs), key=lambda row: -abs(row.difference))
    rows = [*compared_metrics(results, claim.pairs), *classes[:_LISTED]]
    lines = ["| mean | A | B | B - A |", "| --- | --- | --- | --- |"]
    lines += [f"| {row.name} | {format_cell(row.a)} | {format_cell(row.b)} | {row.difference:+.4f} |" for row in rows]
    return "\n".join(lines)


def _lines_of(folder: Path) -> list[LedgerEvent]:
    return read_comparison(folder / LEDGER_FILE)
