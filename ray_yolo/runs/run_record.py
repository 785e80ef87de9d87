"""run.json: the requested recipe of a run and the one its first start resolved, frozen and versioned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import Field

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import ForkOrigin, Frozen
from ray_yolo.core.files import atomic_write
from ray_yolo.core.versioned import FORMAT, is_of_later_version, parse_versioned, with_checksum
from ray_yolo.runs.event_log import EVENTS_FILE

RECORD_FILE = "run.json"
LEDGER_FILE = "ledger.jsonl"
"""The log of a sweep or comparison, in its folder."""
NO_RUN = "resume: {} is neither a run folder nor inside one (a run folder holds run.json)"


class SweepRecord(Frozen):
    """The record of a sweep, or of a comparison."""

    format: int = FORMAT
    digest: str
    """Of the base recipe as requested."""
    space: str
    trials: int
    seconds: float = 0.0
    """For which its commands have run."""
    is_comparison: bool = False
    """Of two sides in pairs, not a search; `digest` is then that of both recipes, and `space` is empty."""


class TransferRecord(Frozen):
    """What a training takes from the file of its `weights`."""

    matched: int
    """Tensors of the model that come from the file."""
    total: int
    """Tensors of the model."""
    left_out: tuple[str, ...]
    """Names of the others, which start with new values."""
    classes: tuple[int | None, ...] | None = None
    """For each class of the data set, its number in the file, None for a new class; None in all: the same numbers, or
    a new class layer."""
    note: str = ""
    """On the classes; '' if both name the same."""
    licence: str = ""
    """That the file states; '' if it states none, and in records of older versions."""

    @property
    def is_sparse(self) -> bool:
        """Whether less than half of the model comes from the file."""
        return 2 * self.matched < self.total


class RunRecord(Frozen):
    """The record of a training."""

    format: int = FORMAT
    digest: str
    """Of the recipe as requested; it identifies the run."""
    asked: Recipe
    recipe: Recipe
    """The same with every open setting resolved."""
    architecture: dict[str, Any] | None
    """Content of a model YAML file; None for a built-in model."""
    anchors: Any
    """In pixels, if autoanchor has replaced the model's own; else None."""
    num_parameters: int
    names: tuple[str, ...]
    labels: str
    """Digest of the training labels."""
    command: str
    provenance: dict[str, Any]
    num_workers: int | tuple[int, int] | None = None
    """Of the first start; later starts use it unless they set their own. None in records of older versions."""
    transfer: TransferRecord | None = None
    """None without initial weights, and in records of older versions."""
    origins: dict[str, str] = Field(default_factory=dict)
    """Where each given setting of the recipe comes from (`--epochs`, `hyp.yaml:3`), by its path. Empty for trainings of
    sweeps and comparisons, and in records of older versions."""
    weights_licence: str = ""
    """That the file of the initial weights states. The weights of this run carry it on."""
    forked_from: ForkOrigin | None = None
    """The run that the initial weights come from; None in records of older versions."""


FolderRecord = RunRecord | SweepRecord


class DamagedRecordError(InputError):
    """A run.json that does not agree with itself."""

    reason = ""
    recipe: Mapping[str, Any] = MappingProxyType({})
    """What the file states, as far as it can be read."""


def read_record(folder: Path) -> FolderRecord | None:
    """The record of a run folder; None if it does not exist yet.

    Raises:
        DamagedRecordError: if it is damaged.
        InputError: if a later version wrote it.
    """
    file = folder / RECORD_FILE
    data = b""
    try:
        data = file.read_bytes()
        tree = parse_versioned(data)
        if not is_of_later_version(tree):
            kind = SweepRecord if "space" in tree else RunRecord
            return kind.model_validate(tree)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:  # pydantic's ValidationError is a ValueError
        reason = str(error).splitlines()[0]
        damage = DamagedRecordError(f"{file}: is damaged ({reason}); restore it from a copy, or move its folder away")
        damage.reason, damage.recipe = reason, _recipe_in(data)
        raise damage from None
    raise InputError(f"{file}: written by a later ray_yolo; continue with that one, or move its folder away")


def _recipe_in(data: bytes) -> dict[str, Any]:
    """The recipe that a damaged run.json states; empty if it cannot be read."""
    with suppress(ValueError, KeyError, TypeError):
        recipe = json.loads(data)["recipe"]
        return recipe if isinstance(recipe, dict) else {}
    return {}


def log_file(folder: Path) -> Path:
    """The log in a run folder: the ledger of a sweep, or the events of a training."""
    is_sweep = isinstance(read_record(folder), SweepRecord)
    return folder / (LEDGER_FILE if is_sweep else EVENTS_FILE)


def write_record(folder: Path, record: FolderRecord) -> None:
    """Write the record of a run folder, atomically."""
    atomic_write(folder / RECORD_FILE, json.dumps(with_checksum(record.model_dump(mode="json")), indent=1))
