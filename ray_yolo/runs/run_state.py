"""What a training's log says of it, as one value.

All that is shown of a run is made from it: the lines of `status`, the row of `list`, the closing message, the page, and
the metrics of Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from ray_yolo.core.events import (
    BalanceEvent,
    DatasetEvent,
    EndEvent,
    EpochEvent,
    Event,
    RunEvent,
    ShardEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
    WorkerEvent,
)
from ray_yolo.runs.event_log import EVENTS_FILE, Goodput, GoodputMeter, best_row, each_event
from ray_yolo.runs.location import is_active
from ray_yolo.runs.usage import Usage, UsageMeter
from ray_yolo.runs.working_copy import FINISHED as FINISHED_FILE

StatusWord = Literal["created", "starting", "training", "ending", "finished", "stopped", "failed", "interrupted",
                     "searching", "comparing"]


class FolderStatus(NamedTuple):
    """Whether a run or study is active, and how it has ended; `str()` says it in a line."""

    word: StatusWord
    detail: str = ""
    """Of a start: what it does. Of an end: its reason."""

    @property
    def is_active(self) -> bool:
        """Whether a process trains it."""
        return self.word in ("starting", "training", "ending", "searching", "comparing")

    def __str__(self) -> str:
        if self.word == "starting" and self.detail:
            return f"{self.word}: {self.detail}"
        text = f"{self.word} ({self.detail})" if self.detail else self.word
        continues = self.word in ("stopped", "failed", "interrupted")
        return f"{text}; the same command continues it" if continues else text


@dataclass(frozen=True)
class RunState:
    """A training up to the last event of its log. What the log does not have is None, or empty."""

    run: RunEvent | None
    dataset: DatasetEvent | None
    start: StartEvent | None
    """The last start of training."""
    end: EndEvent | None
    """The end of what began with `start`; None: it trains, or was interrupted."""
    latest: RunEvent | StartEvent | EndEvent | None
    """The newest of these."""
    rows: Sequence[EpochEvent]
    """Each epoch once, in order, without those that a restart has voided. Only epochs that were the best so far have
    their results of each class."""
    step: StepEvent | None
    """The newest one that was logged."""
    progress: StepEvent | EpochEvent | None
    """The newest one."""
    balance: BalanceEvent | None
    """The shards of the present group of workers; None until it has any."""
    workers: Mapping[int, WorkerEvent]
    """The newest process of each worker."""
    nodes: Sequence[str]
    """The nodes on which workers have run, the first one first."""
    shards: Sequence[ShardEvent]
    warnings: Sequence[WarningEvent]
    commands: Sequence[float]
    """Seconds of each command, up to its last event."""
    goodput: Goodput
    usage: Usage
    began: float | None
    """Unix seconds of the first event."""
    changed: float | None
    """Unix seconds of the last event."""

    @property
    def best(self) -> EpochEvent | None:
        """The best epoch."""
        return best_row(self.rows)

    @property
    def last_shards(self) -> list[ShardEvent]:
        """The shards of the last epoch that has any in the log."""
        return [shard for shard in self.shards if shard.epoch == self.shards[-1].epoch]


def state_of(events: Iterable[Event]) -> RunState:
    """The state that a log shows. The events are read once, and steps are not kept."""
    run = dataset = start = end = step = balance = None
    latest: RunEvent | StartEvent | EndEvent | None = None
    progress: StepEvent | EpochEvent | None = None
    rows: dict[int, EpochEvent] = {}
    workers, nodes = dict[int, WorkerEvent](), dict[str, None]()
    shards, warnings = list[ShardEvent](), list[WarningEvent]()
    commands: list[tuple[float, float]] = []  # the times of the first and the last event of each
    goodput, usage = GoodputMeter(), UsageMeter()
    began = changed = None
    for event in events:
        goodput.add(event)
        usage.add(event)
        began, changed = event.time if began is None else began, event.time
        if isinstance(event, DatasetEvent):  # the first event of a command
            commands.append((event.time, event.time))
        if commands:
            commands[-1] = commands[-1][0], event.time
        match event:
            case RunEvent():
                run = latest = event
            case DatasetEvent():
                dataset = event
            case StartEvent():
                start = latest = event
                end = balance = None
                # A restart from an earlier step voids the later epochs.
                rows = {number: row for number, row in rows.items() if row.step <= event.step}
            case EndEvent():
                end = latest = event
            case StepEvent():
                step = progress = event
            case EpochEvent():
                progress = event
                # If an epoch was reported twice, the first report counts, as for all records.
                rows.setdefault(event.epoch, event if event.best else event.model_copy(update={"per_class": ()}))
            case BalanceEvent():
                balance = event
            case WorkerEvent():
                workers[event.worker], nodes[event.node] = event, None
            case ShardEvent():
                shards.append(event)
            case WarningEvent():
                warnings.append(event)
    return RunState(
        run, dataset, start, end, latest, [rows[number] for number in sorted(rows)], step, progress, balance, workers,
        list(nodes), shards, warnings, [last - first for first, last in commands], goodput.goodput(), usage.usage(),
        began, changed)


def read_state(folder: Path) -> RunState:
    """The state of the run in a folder. A log that does not exist is an empty one.

    Raises:
        OSError: if the log cannot be read for another reason.
    """
    with suppress(FileNotFoundError):
        return state_of(each_event(folder / EVENTS_FILE))
    return state_of(())


def status_of(folder: Path, state: RunState) -> FolderStatus:
    """Whether a run is active, from its lock, and how it has ended, from its log."""
    if state.began is None:
        return FolderStatus("created")
    if is_active(folder):
        if isinstance(state.latest, StartEvent):
            return FolderStatus("training")
        return FolderStatus("ending" if isinstance(state.latest, EndEvent) else "starting")
    if (folder / FINISHED_FILE).exists():
        return FolderStatus("finished")
    if isinstance(state.latest, EndEvent) and state.latest.status != "done":
        return FolderStatus(state.latest.status, state.latest.reason)
    return FolderStatus("interrupted", "no process trains it")
