"""The events of a run's log, frozen and versioned.

Newer versions of the program read older logs. A new field therefore has a default with the meaning of older logs;
unknown event types and fields are skipped. JSON has no NaN: a number that is not finite is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

FORMAT = 2
"""Version of the logs that this release writes."""

METRICS = ("precision", "recall", "mAP50", "mAP50-95")
"""Metrics of a validation, over all classes and for each class."""
ANCHOR_TERMS = ("box", "obj", "cls")
"""Loss terms of the anchor-based models."""

Number = float | None
Numbers = dict[str, Number]


class Frozen(BaseModel):
    """An immutable value that ignores the fields of other versions."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Event(Frozen):
    """One event; `type` names its kind. The writer sets `seq` and `time`."""

    seq: int = -1
    """Position in the log: 0, 1, 2, ..."""
    time: float = 0.0
    """Unix seconds by the writer's clock, for display only; `seq` gives the order."""
    type: str

    @property
    def fields(self) -> dict[str, Any]:
        """The fields without those that the writer sets."""
        return self.model_dump(exclude={"seq", "time", "type"})


Emit = Callable[[Event], None]
"""Sends an event to the run's log without waiting."""


class RowEvent(Event):
    """A report on training up to `step`; void if training restarts from an earlier step."""

    epoch: int
    step: int


class ForkOrigin(Frozen):
    """The run whose weights another run starts from."""

    run: str
    """Its folder."""
    run_id: str
    epoch: int | None
    """The epoch that ends with these weights, counted from 0; None within an epoch."""
    step: int
    weights: str
    """SHA-256 of the checkpoint's tensors, as in its `checkpoint` event; '' if the log has none."""


class RunEvent(Event):
    """A new run, or a later command that resumes it with another command line."""

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
    tracking: dict[str, str] = {}
    """The experiment and parent run that MLflow's environment variables named at the start; see `mlflow_plan`."""
    notes: tuple[str, ...] = ()
    """For the user at the start: what follows the placement, and what comes from the initial weights."""
    forked_from: ForkOrigin | None = None
    """The run that the initial weights come from; None in older logs."""
    weights_licence: str = ""
    """That the file of the initial weights states."""


class SplitCounts(Frozen):
    """Contents of a data split."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    images: int
    boxes: int
    per_class: tuple[int, ...]
    empty_file: int
    """Images with an empty label file."""
    no_file: int
    images_left_out: int
    rows_left_out: int
    looked_for: tuple[str, ...]
    """Label paths that were searched."""
    digest: str = ""
    """`AnnotationIndex.digest` of the labels; '' in older logs."""
    clipped: int = 0
    """Boxes that reached out of their image; 0 in older logs."""
    specks: int = 0
    """Boxes with a side under one pixel; 0 in older logs."""
    orphans: int = 0
    """Label files without an image."""
    unread: int = 0
    """Pictures in formats that are not read."""
    twins: int = 0
    """Images that have the same content as a training image."""
    pictures: str = ""
    """Fingerprint of the sizes and times of the image files; '' in older logs, and for a data set in a store."""
    notes: tuple[str, ...] = ()
    """One line each about these files, and about how the values of images are read."""


def changed_pictures(before: Mapping[str, SplitCounts], now: Mapping[str, SplitCounts]) -> list[str]:
    """The splits whose image files have other sizes or times than before. A missing fingerprint states nothing."""
    return [name for name in before.keys() & now.keys()
            if before[name].pictures and now[name].pictures and before[name].pictures != now[name].pictures]


class DatasetEvent(Event):
    """The dataset, at every start of the driver."""

    type: Literal["dataset"] = "dataset"
    names: tuple[str, ...]
    splits: dict[str, SplitCounts]


class PlacementEvent(Event):
    """The driver has requested placement group `group` from Ray. If it replaces a group on a lost node, or one that was
    given away, `instead_of` is the id of that group."""

    type: Literal["placement"] = "placement"
    group: str
    instead_of: str = ""


class ResourcesEvent(Event):
    """Resources of each worker, with the reasons, at every start of the driver."""

    type: Literal["resources"] = "resources"
    cpus: float
    threads: int
    loader_processes: int
    cache: str
    reasons: tuple[str, ...]
    """Of the values that the user left open."""


class WorkerEvent(Event):
    """A worker process has started."""

    type: Literal["worker"] = "worker"
    worker: int
    node: str
    pid: int
    market_type: str = ""
    """Of its node, by Ray's label: `spot` or `on-demand`; '' if the node has no label, and in older logs."""


class StartEvent(Event):
    """Training starts or continues at `step`."""

    type: Literal["start"] = "start"
    step: int
    epoch: int
    images_in_epoch: int
    num_workers: int
    epochs: int
    terms: tuple[str, ...]
    """Names of the loss terms."""
    regrouped: bool = False
    """State comes from the memory of the remaining workers, not from a checkpoint."""
    device: str = ""
    """Name of the recording worker's GPU, or of its processor; '' in older logs."""
    threads: int = 0
    """Arithmetic threads of the recording worker; 0 in older logs."""
    members: tuple[int, ...] = ()
    """The numbers of the workers, as in their `worker` events; () in older logs."""
    gpus: float | None = None
    """GPUs of each worker; None in older logs."""


class StepEvent(RowEvent):
    """An optimiser step; only steps at regular intervals are logged."""

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


class BalanceEvent(Event):
    """The workers' shards change, because their measured speeds differ from those before."""

    type: Literal["balance"] = "balance"
    step: int
    """The last step before this decision."""
    from_step: int
    """The first step with the new shards."""
    microbatches: tuple[int, ...]
    """Of each worker in a full step."""
    seconds: tuple[float, ...]
    """Of each worker for one microbatch: loading, forward and backward."""

    @property
    def line(self) -> str:
        """One line for users."""
        counts, times = ", ".join(map(str, self.microbatches)), ", ".join(f"{each:.3g}" for each in self.seconds)
        return f"from step {self.from_step} on, workers compute {counts} microbatches per step (seconds each: {times})"


class ShardEvent(RowEvent):
    """One worker's shard of an epoch."""

    type: Literal["share"] = "share"
    worker: int
    images: int
    wait_seconds: float
    seconds: float
    node: str
    pid: int


class ClassResult(Frozen):
    """Validation results of one class, or of all."""

    model_config = ConfigDict(serialize_by_alias=True, use_attribute_docstrings=True)

    name: str
    images: int | None = None
    labels: int
    precision: Number
    recall: Number
    map50: Number = Field(alias="mAP50")
    map50_95: Number = Field(alias="mAP50-95")


class EpochEvent(RowEvent):
    """An epoch has ended. Without validation `val`, `metrics` and `fitness` are None."""

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
    """A checkpoint is on storage: training never restarts from an earlier step."""

    type: Literal["checkpoint"] = "checkpoint"
    step: int
    epoch: int
    path: str
    kinds: tuple[str, ...]
    digest: str = ""
    """SHA-256 of its tensors."""


class WarningEvent(Event):
    """A warning for the user, from a worker or (None) from the driver."""

    type: Literal["warning"] = "warning"
    message: str
    worker: int | None = None


class FailureEvent(Event):
    """The full traceback that ended a worker's training; the console prints its last line only."""

    type: Literal["failure"] = "failure"
    worker: int
    traceback: str


class StacksEvent(Event):
    """Stack dump of all threads of a worker, taken when a worker blocked the others."""

    type: Literal["stacks"] = "stacks"
    worker: int
    stacks: str


class EndEvent(Event):
    """Training has ended: completed (`done`), or to be resumed later."""

    type: Literal["end"] = "end"
    status: Literal["done", "failed", "stopped"]
    reason: str = ""
    step: int
    epoch: int
    best_epoch: int | None = None
    best_fitness: float | None = None
    stopped_early: bool = False


class Summary(Frozen):
    """Result of a session, equal on all its workers."""

    step: int
    epoch: int
    """The last complete epoch, counted from 0."""
    best_epoch: int
    best_fitness: float
    stopped_early: bool
    """Fitness did not improve for `patience` epochs, or a function of the user has ended the training."""
    stopped: bool
    """A stop was requested."""
    last_epoch: EpochEvent | None
    paused: bool = False
    """It pauses after `stop_after` epochs, or because its time is over."""


AnyEvent = Annotated[
    RunEvent | DatasetEvent | ResourcesEvent | PlacementEvent | WorkerEvent | StartEvent | StepEvent | BalanceEvent
    | ShardEvent | EpochEvent | CheckpointEvent | WarningEvent | FailureEvent | StacksEvent | EndEvent,
    Field(discriminator="type")]
_ANY: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent)


def parse_event(line: bytes) -> Event | None:
    """The event of one line of a log; None if the line is incomplete or its type is unknown."""
    try:
        return _ANY.validate_json(line)
    except ValidationError:
        return None
