"""The status of a training in lines, from its state and the worker states that its driver last wrote."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from ray_yolo.core.errors import InputError
from ray_yolo.core.events import EpochEvent, Frozen, ShardEvent, StartEvent, StepEvent, WorkerEvent
from ray_yolo.core.files import atomic_write
from ray_yolo.core.formatting import format_number
from ray_yolo.core.structures import WorkerStatus
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.location import location
from ray_yolo.runs.run_state import FolderStatus, read_state, status_of

MEMBERS_FILE, STARTUP_FILE = ".members.json", ".startup.json"
_FRESH_SECONDS = 10.0
_WARNINGS_SHOWN = 5
_CLOCK_SECONDS = 5.0  # The clocks of machines may differ by so much.


class Members(Frozen):
    """All workers of a training at one moment."""

    time: float
    members: tuple[WorkerStatus, ...]


def write_members(run_dir: Path, members: Sequence[WorkerStatus]) -> None:
    """Write the states of the workers next to the log. Errors are ignored."""
    content = Members(time=time.time(), members=tuple(members)).model_dump_json()
    with suppress(OSError):
        atomic_write(run_dir / MEMBERS_FILE, content, durable=False)


def read_members(run_dir: Path) -> tuple[WorkerStatus, ...] | None:
    """The last states of the living workers; None if they are outdated."""
    try:
        states = Members.model_validate_json((run_dir / MEMBERS_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
    return states.members if time.time() - states.time < _FRESH_SECONDS else None


class Startup(Frozen):
    """The phase of a start at one moment."""

    time: float
    phase: str
    seconds: float
    """Time in this phase."""
    waits_for: str = ""
    """Resources, and the jobs that hold them."""


def write_startup(run_dir: Path, phase: str, seconds: float, waits_for: str) -> None:
    """Write the phase of a start next to the log. Errors are ignored."""
    content = Startup(time=time.time(), phase=phase, seconds=seconds, waits_for=waits_for).model_dump_json()
    with suppress(OSError):
        atomic_write(run_dir / STARTUP_FILE, content, durable=False)


def read_startup(run_dir: Path) -> Startup | None:
    """The phase of a start; None if none is under way."""
    try:
        startup = Startup.model_validate_json((run_dir / STARTUP_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
    return startup if time.time() - startup.time < _FRESH_SECONDS else None


def describe_run(run_dir: Path) -> list[str]:
    """The status of a training, line by line.

    Raises:
        InputError: if the folder is not one of a training, or its log cannot be read.
    """
    try:
        state = read_state(run_dir)
    except OSError as error:
        raise InputError(f"{run_dir}: {EVENTS_FILE} cannot be read: {error.strerror}") from None
    if state.began is None:
        raise InputError(f"{run_dir}: has no {EVENTS_FILE}; give the folder of a run, such as runs/train/exp")
    status = status_of(run_dir, state)
    startup = read_startup(run_dir) if status.is_active else None
    if startup:
        status = FolderStatus("starting", f"{startup.phase}, {startup.seconds:.0f} s")
    lines = [f"{location(run_dir)}: {status}"]
    if startup and startup.waits_for:
        lines.append(startup.waits_for)
    if state.progress:
        lines.append(_progress(state.progress, state.start))
    if status.word == "finished":
        lines += _results(run_dir, state.best)
    balance = state.balance.line if state.balance else ""
    lines += filter(None, (balance, _shares(state.last_shards), state.goodput.line, state.usage.line))
    if status.is_active and not startup:
        lines += _members(run_dir, state.workers)
    for warning in state.warnings[-_WARNINGS_SHOWN:]:
        moment = time.strftime("%m-%d %H:%M:%S", time.localtime(warning.time))
        worker = "" if warning.worker is None else f"worker {warning.worker}: "
        lines.append(f"{moment}  {worker}{warning.message}")
    return lines


def _progress(last: StepEvent | EpochEvent, start: StartEvent | None) -> str:
    """A line on the newest step."""
    rate = f", {last.images_per_second:.4g} images/s" if last.images_per_second else ""
    ago = _ago(time.time() - last.time)
    return f"epoch {last.epoch + 1} of {start.epochs if start else 0}, step {last.step}{rate}, {ago}"


def _results(run_dir: Path, best: EpochEvent | None) -> list[str]:
    """The best epoch of a finished run, and its files that are there."""
    lines = []
    if best and best.metrics:
        numbers = ", ".join(f"{name} {format_number(best.metrics.get(name))}" for name in ("mAP50", "mAP50-95"))
        lines.append(f"best epoch {best.epoch + 1}: {numbers}")
    files = [run_dir / "weights" / "best.pt", run_dir / "report.html"]
    return [*lines, *(str(file) for file in files if file.is_file())]


def _shares(shards: Sequence[ShardEvent]) -> str:
    """The share of an epoch's images that each worker has computed; '' with one worker."""
    images = {shard.worker: shard.images for shard in shards}
    if len(images) < 2 or not any(images.values()):
        return ""
    shares = [f"{100 * images[worker] / sum(images.values()):.0f}" for worker in sorted(images)]
    return f"images of epoch {shards[-1].epoch + 1} by worker: {', '.join(shares)} %"


def _members(run_dir: Path, workers: Mapping[int, WorkerEvent]) -> list[str]:
    """A row per worker: its last state, or at least the node where it runs."""
    members = read_members(run_dir)
    if members is None:
        return [f"worker {number} on {event.node}, process {event.pid}" for number, event in sorted(workers.items())]
    if not members:
        return ["no worker trains now"]
    width = max(len(member.node) for member in members)
    num_waiting = sum(member.waits for member in members)
    lines = [f"worker  {'node':<{width}}  process  phase       step  for"]
    for member in members:
        line = (f"{member.worker:>6}  {member.node:<{width}}  {member.pid:>7}  {member.phase:<10} {member.step:>5}  "
                f"{member.seconds:.0f} s")
        holds_up_others = num_waiting and not member.waits and member.seconds > _FRESH_SECONDS
        if holds_up_others:
            line += f"  ({num_waiting} wait for it)"
        lines.append(line)
    return lines


def _ago(seconds: float) -> str:
    if seconds < -_CLOCK_SECONDS:
        return f"{-seconds:.0f} s ahead of this machine's clock"
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes ago"
    return f"{seconds / 3600:.0f} hours ago"
