"""Verify the files of a run against their manifests, and compare the weights of two runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ray_yolo.checkpoints.layout import checkpoint_folder, manifest_of
from ray_yolo.checkpoints.local import newest_first, weights_files
from ray_yolo.checkpoints.state_file import read_state, tensors, verify_manifest
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import CheckpointEvent
from ray_yolo.runs.event_log import EVENTS_FILE, check_log, read_events
from ray_yolo.runs.run_record import LEDGER_FILE, RECORD_FILE, DamagedRecordError, RunRecord, read_record
from ray_yolo.runs.trained_recipe import contradicting_settings

_NO_RUN = "has neither checkpoints nor weights; give the folder of a run, such as runs/train/exp, or a .pt file in it"


class CheckResult(NamedTuple):
    """The result for one file or one step."""

    what: str
    problem: str | None


def check_files(run_dir: Path) -> list[CheckResult]:
    """Verify every checkpoint and weights file of a run, or one .pt file, against its manifest; of a run, verify also
    run.json and the log against their checksums, and the recipe of run.json against that of each state. A file that is
    missing has a result, too.

    Raises:
        InputError: if there is no such file.
    """
    if run_dir.is_file() and run_dir.suffix == ".pt":
        return [CheckResult(run_dir.name, verify_manifest(run_dir, manifest_of(run_dir)))]
    if not run_dir.exists():
        raise InputError(f"{run_dir}: no such file or folder; give the folder of a run, such as runs/train/exp")
    if not run_dir.is_dir():
        raise InputError(f"{run_dir}: {_NO_RUN}")
    files = [folder / "state.pt" for folder in newest_first(run_dir)]
    described = {manifest.with_suffix(".pt") for manifest in (run_dir / "weights").glob("[!.]*.json")}
    files += sorted(described.union(weights_files(run_dir)))
    if not files:
        raise InputError(f"{run_dir}: {_NO_RUN}")
    results, recipe = _check_records(run_dir)
    for file in files:
        problem = verify_manifest(file, manifest_of(file))
        if problem is None and (other := contradicting_settings(file, recipe)):
            problem = f"was trained with {other[1]}, and {RECORD_FILE} says {other[0]}"
        results.append(CheckResult(str(file.relative_to(run_dir)), problem))
    return results


def _check_records(run_dir: Path) -> tuple[list[CheckResult], Mapping[str, Any]]:
    """Verify run.json and the log of a run against their checksums. Weights alone, as a copy may be, have neither.

    Also returns the recipe of run.json: empty for a sweep, and for weights without one.

    Raises:
        InputError: if a later version has written run.json.
    """
    results: list[CheckResult] = []
    recipe: Mapping[str, Any] = {}
    try:
        record = read_record(run_dir)
    except DamagedRecordError as error:
        recipe = error.recipe
        results.append(CheckResult(RECORD_FILE, error.reason))
    else:
        if record is not None:
            results.append(CheckResult(RECORD_FILE, None))
        if isinstance(record, RunRecord):
            recipe = record.recipe.model_dump(mode="json")
    if (run_dir / EVENTS_FILE).is_file():
        results.append(CheckResult(EVENTS_FILE, check_log(run_dir / EVENTS_FILE)))
    found = {result.what for result in results}
    is_run = not (run_dir / LEDGER_FILE).is_file() and (found or any(newest_first(run_dir)))
    if is_run:  # else a sweep, whose log is its ledger, or a copy of weights
        results += [CheckResult(name, "is missing") for name in (RECORD_FILE, EVENTS_FILE) if name not in found]
    return results, recipe


def compare_runs(one: Path, other: Path) -> list[CheckResult]:
    """Compare the checkpoints of two runs at every step that both have saved, up to the first difference.

    The comparison uses the digests in the logs, so it includes checkpoints that were removed. If both files still
    exist, it names the first tensor that differs.

    Raises:
        InputError: if the runs have no step in common.
    """
    for folder in (one, other):
        if not folder.is_dir():
            raise InputError(f"{folder}: is not a run folder; give the folders of two runs")
    first, second = _digests(one), _digests(other)
    common = sorted(first.keys() & second.keys())
    if not common:
        raise InputError(f"{one} and {other} have saved no step in common ({_steps(first)}; {_steps(second)}); train "
                         "them with the same --save-steps")
    results = []
    for step in common:
        if first[step] != second[step]:
            results.append(CheckResult(f"step {step}", _difference(one, other, step)))
            break  # later checkpoints differ as a consequence
        results.append(CheckResult(f"step {step}", None))
    return results


def unequal_end(one: Path, other: Path) -> str:
    """Why equal steps do not show that two trainings are equal: one of them has saved a later step. '' otherwise."""
    ends = [max(_digests(folder), default=-1) for folder in (one, other)]
    if ends[0] == ends[1]:
        return ""
    return f"{one} has saved steps up to {ends[0]}, and {other} up to {ends[1]}"


def _digests(run_dir: Path) -> dict[int, str]:
    """The digest of the tensors by step; if a step was saved twice, the later one."""
    events = read_events(run_dir / EVENTS_FILE)
    return {event.step: event.digest for event in events if isinstance(event, CheckpointEvent) and event.digest}


def _difference(one: Path, other: Path, step: int) -> str:
    """The first tensor that differs, if both files still exist."""
    states = [checkpoint_folder(folder, step) / "state.pt" for folder in (one, other)]
    if not all(state.exists() for state in states):
        return "different tensors (the files are gone: --keep-checkpoints keeps more of them)"
    first, second = (dict(tensors(read_state(state))) for state in states)
    for name in sorted(first.keys() | second.keys()):
        if name not in first or name not in second:
            return f"{name} is in one of them only"
        difference = _unequal(first[name], second[name])
        if difference:
            return f"{name} {difference}"
    return "different tensors by the logs, but equal ones in the files"


def _unequal(one: torch.Tensor, other: torch.Tensor) -> str:
    """How two tensors differ, in words; '' if they are equal."""
    if one.shape != other.shape:
        return f"has shapes {tuple(one.shape)} and {tuple(other.shape)}"
    if torch.equal(one, other):
        return ""
    count = int((one != other).sum())
    return f"differs in {count} of {one.numel()} numbers"


def _steps(digests: dict[int, str]) -> str:
    """The first steps of a run in words."""
    if not digests:
        return "no checkpoint yet"
    first = ", ".join(str(step) for step in sorted(digests)[:5])
    return f"steps {first}, ..." if len(digests) > 5 else f"steps {first}"
