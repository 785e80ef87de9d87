"""Whether a run's files are what was written, and whether two runs trained the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ray_yolo.checkpoints.local import newest_first
from ray_yolo.checkpoints.state_file import MANIFEST, manifest_of, read_state, tensors, verify_manifest
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import CheckpointEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events

_NO_RUN = "has neither checkpoints nor weights; give the folder of a run, such as runs/train/exp, or a .pt file in it"


class CheckResult(NamedTuple):
    """One thing that was looked at."""

    what: str
    problem: str | None


def check_files(run_dir: Path) -> list[CheckResult]:
    """Every checkpoint and every weights file of a run, or one .pt file of it, against its manifest.

    Raises:
        InputError: if there is none.
    """
    if run_dir.is_file() and run_dir.suffix == ".pt":
        return [CheckResult(run_dir.name, verify_manifest(run_dir, manifest_of(run_dir)))]
    if not run_dir.is_dir():
        raise InputError(f"{run_dir}: {_NO_RUN}")
    pairs = [(folder / "state.pt", folder / MANIFEST) for folder in newest_first(run_dir)]
    pairs += [(path, path.with_suffix(".json")) for path in sorted((run_dir / "weights").glob("*.pt"))]
    if not pairs:
        raise InputError(f"{run_dir}: {_NO_RUN}")
    return [CheckResult(str(state.relative_to(run_dir)), verify_manifest(state, manifest)) for state, manifest in pairs]


def compare_runs(one: Path, other: Path) -> list[CheckResult]:
    """The checkpoints of two runs at every step that both have saved, in their order, up to the first difference.

    By the digests in their logs, so that checkpoints count that are gone by now; where both files are still there, the
    first tensor that differs is named.

    Raises:
        InputError: if they have no step in common.
    """
    for folder in (one, other):
        if not folder.is_dir():
            raise InputError(f"{folder}: is no folder of a run; two runs are compared by their folders")
    mine, theirs = _digests(one), _digests(other)
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        raise InputError(f"{one} and {other} have saved no step in common ({_steps(mine)}; {_steps(theirs)}); train "
                         "them with the same --save-steps")
    findings = []
    for step in common:
        same = mine[step] == theirs[step]
        findings.append(CheckResult(f"step {step}", None if same else _difference(one, other, step)))
        if not same:
            break
    return findings


def _digests(run_dir: Path) -> dict[int, str]:
    """Digest of the tensors by step; of a step that was saved twice the later one."""
    events = read_events(run_dir / EVENTS_FILE)
    return {event.step: event.digest for event in events if isinstance(event, CheckpointEvent) and event.digest}


def _difference(one: Path, other: Path, step: int) -> str:
    """Which tensor differs first, if that can still be told."""
    states = [folder / "checkpoints" / f"step-{step}" / "state.pt" for folder in (one, other)]
    if not all(state.exists() for state in states):
        return "other tensors (which, cannot be told: --keep-checkpoints keeps more of them)"
    first, second = (dict(tensors(read_state(state))) for state in states)
    return next(_unequal(first, second), "other tensors by the logs, but equal ones in the files")


def _unequal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> Iterator[str]:
    for name in sorted(first.keys() | second.keys()):
        if name not in first or name not in second:
            yield f"{name} is in one of them only"
        elif first[name].shape != second[name].shape:
            yield f"{name} has shapes {tuple(first[name].shape)} and {tuple(second[name].shape)}"
        elif not torch.equal(first[name], second[name]):
            count = int((first[name] != second[name]).sum())
            yield f"{name} differs in {count} of {first[name].numel()} numbers"


def _steps(digests: dict[int, str]) -> str:
    return f"steps {', '.join(map(str, sorted(digests)[:5]))}{', ...' if len(digests) > 5 else ''}" if digests else (
        "no checkpoint yet")
