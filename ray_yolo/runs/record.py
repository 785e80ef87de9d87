"""run.json: what a run was asked for and what its first start decided, frozen and versioned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import Frozen
from ray_yolo.core.files import atomic_write
from ray_yolo.runs.event_log import EVENTS_FILE

FORMAT = 1
RECORD_FILE = "run.json"
LEDGER_FILE = "ledger.jsonl"
"""The log of a sweep, in its folder."""


class SweepRecord(Frozen):
    """The record of a sweep."""

    format: int = FORMAT
    digest: str
    """Of the base recipe as it was asked for."""
    space: str
    trials: int


class RunRecord(Frozen):
    """The record of a training."""

    format: int = FORMAT
    digest: str
    """Of the recipe as it was asked for: what finds the run again."""
    asked: Recipe
    recipe: Recipe
    """The same with all that the user left open decided."""
    architecture: dict[str, Any] | None
    """Contents of a model YAML file; None for a model known by name."""
    anchors: Any
    """Pixels, where autoanchor has replaced the model's own; else None."""
    num_parameters: int
    names: tuple[str, ...]
    labels: str
    """Digest of the training labels."""
    command: str
    provenance: dict[str, Any]
    num_workers: int | tuple[int, int] | None = None
    """Of the first start: a start that leaves them open has them, too. None: of a run that did not record them."""
    origin: dict[str, Any] | None = None
    """Of a trial that goes on from another one's checkpoint: which one, and by which genes."""
    genes: dict[str, Any] | None = None


Record = RunRecord | SweepRecord


def read_record(folder: Path) -> Record | None:
    """The record of a run folder; None if there is none yet.

    Raises:
        InputError: if it is damaged, or a later version's.
    """
    file = folder / RECORD_FILE
    try:
        tree = json.loads(file.read_bytes())
        if tree.get("format", FORMAT) <= FORMAT:
            return (SweepRecord if "space" in tree else RunRecord).model_validate(tree)
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError, TypeError):  # pydantic's is a ValueError
        raise InputError(f"{file}: is damaged; put it back from a copy, or move its folder away") from None
    raise InputError(f"{file}: written by a later ray_yolo; continue with that one, or move its folder away")


def log_file(folder: Path) -> Path:
    """The log of a run folder, by its record: a sweep's ledger, or the events of a training."""
    return folder / (LEDGER_FILE if isinstance(read_record(folder), SweepRecord) else EVENTS_FILE)


def write_record(folder: Path, record: Record) -> None:
    """Put a record into a run folder: it is there whole, or not at all."""
    atomic_write(folder / RECORD_FILE, json.dumps(record.model_dump(mode="json"), indent=1))
