"""What a training tells while it goes on: the events of its log, frozen and versioned.

A log outlives the program that wrote it. A field that is added has a default that says what older logs mean; a type
that is not known here is passed over, and so are fields. JSON has no NaN: a number that was not finite is None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

FORMAT = 2
"""Of the logs that are written now."""

METRICS = ("precision", "recall", "mAP50", "mAP50-95")
"""What validation measures, over all classes and of each."""
ANCHOR_TERMS = ("box", "obj", "cls")
"""Terms of the loss of the models with anchors."""

Number = float | None
Numbers = dict[str, Number]


class Frozen(BaseModel):
    """A value that cannot be changed, read from what may have been written by another version."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Event(Frozen):
    """One event; `type` names its kind. The writer numbers it."""

    seq: int = -1
    """0, 1, 2, ... in the order of the log."""
    time: float = 0.0
    """Unix seconds by the writer's clock: for people; nothing is ordered by it."""
    type: str

    @property
    def fields(self) -> dict[str, Any]:
        """What it says, beside what the writer adds."""
        return self.model_dump(exclude={"seq", "time", "type"})


Emit = Callable[[Event], None]
"""Sends an event to the log of the run, without waiting."""


class RowEvent(Event):
    """A report on training up to `step`: void if training goes back before it."""

    epoch: int
    step: int


class RunEvent(Event):
    """A run, or a later command that goes on with it by another command line."""

    type: Literal["run"] = "run"
    format: int = FORMAT
    run_id: str
    name: str
    recipe: dict[str, Any]
    placement: dict[str, Any]
    names: tuple[str, ...]
    num_images: int
    num_val_images: int
    num_parameters: int
    command: str
    provenance: dict[str, Any] = {}


class SplitCounts(Frozen):
    """What there is in a data split."""

    images: int
    boxes: int
    per_class: tuple[int, ...]
    empty_file: int
    """Images whose label file says that there is nothing."""
    no_file: int
    images_left_out: int
    rows_left_out: int
    looked_for: tuple[str, ...]
    """Where labels were looked for."""
    digest: str = ""
    """Identity of the labels, as `AnnotationIndex.digest` says; '': told by an older log."""


class DatasetEvent(Event):
    """The data set, at every start of the driver."""

    type: Literal["dataset"] = "dataset"
    names: tuple[str, ...]
    splits: dict[str, SplitCounts]


class PlacementEvent(Event):
    """Ray has been asked for the workers' places; `group` is the placement group's id. Where the node of some is gone,
    `instead_of` is the group that they were in."""

    type: Literal["placement"] = "placement"
    group: str
    instead_of: str = ""


class ResourcesEvent(Event):
    """What each worker is given of its node, and why, at every start of the driver."""

    type: Literal["resources"] = "resources"
    cpus: float
    threads: int
    loader_processes: int
    cache: str
    reasons: tuple[str, ...]
    """Of what the user left open."""


class WorkerEvent(Event):
    """A worker process has begun."""

    type: Literal["worker"] = "worker"
    worker: int
    node: str
    pid: int


class StartEvent(Event):
    """Training starts, or goes on: from `step` on."""

    type: Literal["start"] = "start"
    step: int
    epoch: int
    images_in_epoch: int
    num_workers: int
    epochs: int
    terms: tuple[str, ...]
    """Names of the loss's terms."""
    regrouped: bool = False
    """Out of the memory of workers that have gone on, not from a checkpoint."""


class StepEvent(RowEvent):
    """An optimiser step; one in so many is told."""

    type: Literal["step"] = "step"
    batch: int
    loss: tuple[Number, ...]
    lr: tuple[float, ...]
    images: int
    images_per_second: Number
    wait_seconds: float
    seconds: float
    gradient_norm: Number
    skipped: bool


class ShardEvent(RowEvent):
    """One worker's part of an epoch."""

    type: Literal["share"] = "share"
    worker: int
    images: int
    wait_seconds: float
    seconds: float
    node: str
    pid: int


class ClassResult(Frozen):
    """What validation has found of one class, or of all."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: str
    images: int | None = None
    labels: int
    precision: Number
    recall: Number
    map50: Number = Field(alias="mAP50")
    map50_95: Number = Field(alias="mAP50-95")


class EpochEvent(RowEvent):
    """An epoch has ended; of one that was not validated `val`, `metrics` and `fitness` are None."""

    type: Literal["epoch"] = "epoch"
    train: Numbers
    val: Numbers | None
    metrics: Numbers | None
    per_class: tuple[ClassResult, ...]
    lr: tuple[float, ...]
    images_per_second: Number
    wait_share: Number
    seconds: float
    fitness: Number
    best: bool
    memory_gb: float


class CheckpointEvent(Event):
    """A checkpoint is on storage: training never goes back before its step."""

    type: Literal["checkpoint"] = "checkpoint"
    step: int
    epoch: int
    path: str
    kinds: tuple[str, ...]
    digest: str = ""
    """SHA-256 of its tensors."""


class WarningEvent(Event):
    """Something that a user has to know, of a worker or (None) of the driver."""

    type: Literal["warning"] = "warning"
    message: str
    worker: int | None = None


class FailureEvent(Event):
    """What has ended a worker's training, whole; the driver tells its last line alone."""

    type: Literal["failure"] = "failure"
    worker: int
    traceback: str


class StacksEvent(Event):
    """Where every thread of a worker was when one of the workers held up the others."""

    type: Literal["stacks"] = "stacks"
    worker: int
    stacks: str


class EndEvent(Event):
    """Training has ended: for good (`done`), or to be gone on with."""

    type: Literal["end"] = "end"
    status: Literal["done", "failed", "stopped"]
    reason: str = ""
    step: int
    epoch: int
    best_epoch: int | None = None
    best_fitness: float | None = None
    stopped_early: bool = False


class Summary(Frozen):
    """How a session ended, equal on all its workers."""

    step: int
    epoch: int
    """The last one that was trained whole, counted from 0."""
    best_epoch: int
    best_fitness: float
    stopped_early: bool
    """For want of a better fitness."""
    stopped: bool
    """Because it was told to."""
    last_epoch: EpochEvent | None


AnyEvent = Annotated[
    RunEvent | DatasetEvent | ResourcesEvent | PlacementEvent | WorkerEvent | StartEvent | StepEvent | ShardEvent
    | EpochEvent | CheckpointEvent | WarningEvent | FailureEvent | StacksEvent | EndEvent, Field(discriminator="type")]
_ANY: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent)


def parse_event(line: bytes) -> Event | None:
    """The event of one line of a log; None for one that is torn or of a type that is not known here."""
    try:
        return _ANY.validate_json(line)
    except ValidationError:
        return None
