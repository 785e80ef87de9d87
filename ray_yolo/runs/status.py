"""The status of a training, from its event log and the worker states that its driver last wrote."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from ray_yolo.core.errors import InputError
from ray_yolo.core.events import (
    BalanceEvent,
    EndEvent,
    EpochEvent,
    Event,
    Frozen,
    RunEvent,
    ShardEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
    WorkerEvent,
)
from ray_yolo.core.files import atomic_write
from ray_yolo.core.formatting import format_number
from ray_yolo.core.structures import WorkerStatus
from ray_yolo.runs.event_log import EVENTS_FILE, best_row, epoch_rows, last_of, measure_goodput, read_events
from ray_yolo.runs.location import is_active, location
from ray_yolo.runs.usage import measure_usage

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
        InputError: if the folder is not one of a training.
    """
    events = read_events(run_dir / EVENTS_FILE) if (run_dir / EVENTS_FILE).is_file() else []
    if not events:
        raise InputError(f"{run_dir}: has no {EVENTS_FILE}; give the folder of a run, such as runs/train/exp")
    now, active = time.time(), is_active(run_dir)
    startup = read_startup(run_dir) if active else None
    lines = [f"{location(run_dir)}: {describe_state(run_dir, events, active, startup)}"]
    if startup and startup.waits_for:
        lines.append(startup.waits_for)
    if last_of(events, StepEvent, EpochEvent):
        lines.append(_progress(events, now))
    if not active and (run_dir / "finished").exists():
        lines += _results(run_dir, events)
    balance = last_of(events, StartEvent, BalanceEvent)
    if isinstance(balance, BalanceEvent):  # else the present group of workers has none yet
        lines.append(balance.line)
    if shares := _shares(events):
        lines.append(shares)
    cost = measure_goodput(events)
    if cost.restarts or cost.regroupings:
        lines.append(cost.line)
    if usage := measure_usage(events).line:
        lines.append(usage)
    if active and not startup:
        lines += _members(run_dir, events)
    warnings = [event for event in events if isinstance(event, WarningEvent)]
    for warning in warnings[-_WARNINGS_SHOWN:]:
        moment = time.strftime("%m-%d %H:%M:%S", time.localtime(warning.time))
        worker = "" if warning.worker is None else f"worker {warning.worker}: "
        lines.append(f"{moment}  {worker}{warning.message}")
    return lines


def describe_state(run_dir: Path, events: Sequence[Event], active: bool, startup: Startup | None) -> str:
    """The state of a run in words; a few words before a colon or bracket name it."""
    if startup:
        return f"starting: {startup.phase}, {startup.seconds:.0f} s"
    last = last_of(events, StartEvent, EndEvent, RunEvent)
    if active and isinstance(last, StartEvent):
        return "training"
    if active:
        return "ending" if isinstance(last, EndEvent) else "starting"
    if (run_dir / "finished").exists():
        return "finished"
    if isinstance(last, EndEvent) and last.status != "done":
        return f"{last.status} ({last.reason}); the same command continues it"
    return "interrupted: no process trains it; the same command continues it"


def _progress(events: Sequence[Event], now: float) -> str:
    """A line on the newest step."""
    start = last_of(events, StartEvent)
    epochs = start.epochs if start else 0
    last = last_of(events, StepEvent, EpochEvent)
    assert isinstance(last, (StepEvent, EpochEvent)), "the caller has seen one"
    rate = f", {last.images_per_second:.4g} images/s" if last.images_per_second else ""
    return f"epoch {last.epoch + 1} of {epochs}, step {last.step}{rate}, {_ago(now - last.time)}"


def _results(run_dir: Path, events: Sequence[Event]) -> list[str]:
    """The best epoch of a finished run, and its files that are there."""
    lines = []
    best = best_row(epoch_rows(events))
    if best and best.metrics:
        numbers = ", ".join(f"{name} {format_number(best.metrics.get(name))}" for name in ("mAP50", "mAP50-95"))
        lines.append(f"best epoch {best.epoch + 1}: {numbers}")
    files = [run_dir / "weights" / "best.pt", run_dir / "report.html"]
    return [*lines, *(str(file) for file in files if file.is_file())]


def _shares(events: Sequence[Event]) -> str:
    """The share of the images that each worker computed in the last epoch that is logged; '' with one worker."""
    shards = [event for event in events if isinstance(event, ShardEvent)]
    images = {shard.worker: shard.images for shard in shards if shard.epoch == shards[-1].epoch}
    if len(images) < 2 or not any(images.values()):
        return ""
    shares = [f"{100 * images[worker] / sum(images.values()):.0f}" for worker in sorted(images)]
    return f"images of epoch {shards[-1].epoch + 1} by worker: {', '.join(shares)} %"


def _members(run_dir: Path, events: Sequence[Event]) -> list[str]:
    """A row per worker: its last state, or at least the node where it runs."""
    members = read_members(run_dir)
    if members is None:
        started = {event.worker: event for event in events if isinstance(event, WorkerEvent)}
        return [f"worker {number} on {event.node}, process {event.pid}" for number, event in sorted(started.items())]
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
