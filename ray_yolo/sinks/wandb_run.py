"""The Weights & Biases run of a training, as a tracker (`--trackers wandb`, extra `[wandb]`).

The id of the run is that of the training, so a resumed training continues its run. Online, W&B says which step it has,
and gets the later ones as they come. Offline there is nothing to ask: the end writes the whole run into `wandb/` of the
run folder, in place of an earlier one, and `wandb sync wandb/offline-run-*` uploads it.

W&B reads its own environment variables: WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, WANDB_API_KEY, WANDB_BASE_URL.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import wandb

from ray_yolo.config.settings import leaves
from ray_yolo.core.errors import TrackingError
from ray_yolo.core.events import EndEvent, EpochEvent, Event, RunEvent, StartEvent
from ray_yolo.core.redact import reason_of, redact
from ray_yolo.runs.event_log import best_row, durable, epoch_rows, last_of
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.sinks.metric_names import measured_metrics, metrics, terms_of
from ray_yolo.sinks.retry import RecordError

FOLDER = "wandb"
FILES = ("hyp.yaml", "opt.yaml", "results.csv", "report.html", "*.png", "*.jpg")


class WandbRun:
    """The W&B run of the training in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: Any = None
        self._scratch = ExitStack()  # holds the folder of W&B's files while it is online
        self._next_step = 0

    def update(self, events: Sequence[Event], ended: bool) -> None:
        """Log the durable epochs that the run lacks, counted from 1; at the end also files and weights.

        Raises:
            TrackingError: if the user must log in first.
            RecordError: if W&B cannot be reached or refuses.
        """
        runs = [event for event in events if isinstance(event, RunEvent)]
        mode = wandb.setup().settings.mode
        is_offline = mode == "offline"
        if not runs or mode == "disabled" or (is_offline and not ended):
            return
        with _explained():
            if self._run is None:
                self._run = self._open(runs[0].model_copy(update={"command": runs[-1].command}), is_offline)
            rows = epoch_rows(durable(events))
            self._log(rows)
            if ended:
                self._finish(runs[0], rows, events)

    def _open(self, run: RunEvent, is_offline: bool) -> Any:
        """Start the W&B run, or continue it online."""
        with ExitStack() as unless_open:
            if is_offline:
                folder = str(self._folder.resolve())
                shutil.rmtree(self._folder / FOLDER, ignore_errors=True)
            else:  # the run folder may be moved while W&B writes
                folder = unless_open.enter_context(tempfile.TemporaryDirectory(prefix="ray_yolo-wandb-"))
            opened = wandb.init(
                id=run.run_id, name=run.name, group=self._sweep, dir=folder, resume="allow", reinit="create_new",
                project=os.environ.get("WANDB_PROJECT") or Path(run.placement["project"]).name or "ray_yolo",
                config=_config(run), allow_val_change=True,
                settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True))
            self._scratch = unless_open.pop_all()
        opened.define_metric("*", step_metric="epoch")
        self._next_step = opened.starting_step
        return opened

    def _log(self, rows: Sequence[EpochEvent]) -> None:
        columns = metrics(terms_of(rows))
        for row in rows:
            step = row.epoch + 1
            if step < self._next_step:
                continue
            numbers = {metric.name: metric.of(row) for metric in columns}
            self._run.log({"epoch": step, **_known(numbers)}, step=step, commit=True)
            self._next_step = step + 1

    def _finish(self, run: RunEvent, rows: Sequence[EpochEvent], events: Sequence[Event]) -> None:
        """Add the best epoch's numbers, files and weights. W&B stores no file twice: it knows them by content."""
        best = best_row(rows)
        if best:
            self._run.summary.update(_known({metric.name: metric.of(best) for metric in measured_metrics()}))
        results = wandb.Artifact(f"run-{run.run_id}-results", "results")
        for pattern in FILES:
            for path in sorted(self._folder.glob(pattern)):
                results.add_file(str(path))
        self._run.log_artifact(results)
        weights = self._folder / "weights" / "best.pt"
        if weights.exists() and not self._sweep:  # the best of a sweep's many are in the sweep's folder
            model = wandb.Artifact(f"run-{run.run_id}-model", "model")
            model.add_file(str(weights))
            self._run.log_artifact(model, aliases=["best"])
        last = last_of(events, StartEvent, EndEvent)
        self._run.finish(exit_code=0 if isinstance(last, EndEvent) and last.status == "done" else 1)
        self._run = None
        self._scratch.close()

    @property
    def _sweep(self) -> str | None:
        """The name of the sweep of a trial, which groups its trials; None for any other training."""
        sweep = self._folder.resolve().parent.parent
        return sweep.name if (sweep / LEDGER_FILE).is_file() else None


def _config(run: RunEvent) -> dict[str, Any]:
    """Recipe, placement, command and provenance, without secrets."""
    tree = {**run.recipe, "placement": run.placement, "command": run.command, "provenance": run.provenance}
    return {".".join(keys): redact(value) if isinstance(value, str) else value for keys, value in leaves(tree)}


def _known(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if number is not None}


@contextmanager
def _explained() -> Iterator[None]:
    """Context in which errors of W&B become errors for the user."""
    try:
        yield
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        raise TrackingError(f"Weights & Biases: {redact(str(error))}; log in with `wandb login`, or set "
                            "WANDB_MODE=offline, and run python -m ray_yolo.sync") from error
    except wandb.errors.Error as error:
        raise RecordError(f"Weights & Biases: {reason_of(error)}") from error
