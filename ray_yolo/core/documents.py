"""What the commands answer with `--json`: one document each. docs/json.md describes them for users.

Fields may be added. `version` grows by 1 when a field is removed, renamed, or gets another meaning. JSON has no NaN: a
number that is not finite is null.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from ray_yolo.core.events import ClassResult, Frozen, Number, Numbers, SplitCounts

RESULTS_FILE = "results.json"
"""What a validation or a prediction has found, in its folder."""


class Document(Frozen):
    """The answer of a command."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    version: Literal[1] = 1


class TrainDocument(Document):
    """Of `train`: the result of a training."""

    state: Literal["finished", "paused"]
    """`paused`: the same command continues it."""
    run: str
    """Its folder or address."""
    best: str
    """Weights of the best epoch."""
    last: str
    """Weights of the last epoch."""
    epochs: int
    """Trained in all."""
    best_epoch: int
    """Counted from 1; 0 without a validation."""
    fitness: Number
    """Of the best epoch."""
    metrics: Numbers
    """Of the best epoch: precision, recall, mAP50, mAP50-95."""


class ValDocument(Document):
    """Of `val`: what a validation measured."""

    folder: str
    weights: str
    data: str
    split: str
    metrics: Numbers
    """precision, recall, mAP50, mAP50-95."""
    losses: Numbers
    """By term."""
    per_class: tuple[ClassResult, ...]
    coco: Numbers
    """The twelve numbers of the COCO protocol, with `--coco`."""
    speed: Numbers
    """Mean milliseconds per image: preprocess (reading included), inference, postprocess."""


class PredictDocument(Document):
    """Of `predict`: a summary of the detections."""

    folder: str
    weights: str
    source: str
    pictures: int
    """Pictures and frames that were read."""
    detections: int
    per_class: dict[str, int]
    """Detections by class; classes without one are left out."""
    left_out: dict[str, str]
    """Files that could not be read, with the reason."""


class RunSummary(Document):
    """One run, sweep or comparison, or the results of a validation or prediction."""

    name: str
    kind: Literal["training", "sweep", "comparison", "validation", "prediction", "unknown"]
    """`unknown`: it cannot be read, and `state` says why."""
    state: str
    """`training`, `searching`, `comparing`, `finished`, `stopped`, `failed`, `interrupted`, `created`, ..."""
    done: int | None = None
    """Epochs of a training, trials of a sweep, pairs of a comparison, pictures of a prediction."""
    epochs: int | None = None
    """Of a training: how many it is to have."""
    best: Number = None
    """mAP50-95 of a training's best epoch, or of a validation; fitness of a sweep's best trial."""
    better: Literal["A", "B", ""] | None = None
    """Of a comparison: the better side; '' if no difference is shown."""
    started: float | None = None
    """Seconds since 1970."""
    changed: float | None = None
    """Time of the newest event."""


class ListDocument(Document):
    """Of `list`: the runs of a project, the last changed first."""

    project: str
    runs: tuple[RunSummary, ...]


class StatusDocument(RunSummary):
    """Of `status RUN`: as in `list`, and the lines that the command prints without `--json`."""

    lines: tuple[str, ...]


class ClusterDocument(Document):
    """Of `status` without a run: whether a cluster's nodes can train."""

    can_train: bool
    lines: tuple[str, ...]
    """As printed without `--json`."""


class CheckedPart(Frozen):
    """The result for one file, step or ledger."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    what: str
    problem: str | None
    """null: it is as it should be."""


class VerifyDocument(Document):
    """Of `verify`: the checks of a run or sweep, and its comparison with another one."""

    run: str
    other: str | None
    checks: tuple[CheckedPart, ...]
    comparisons: tuple[CheckedPart, ...]
    """Empty without another run."""
    equal: bool | None
    """Whether all that both have saved is equal; null without another run, and where `unclear` says why it is open."""
    unclear: str
    """Why equal parts do not show that both are equal: one has saved a later step."""


class ComparedNumber(Frozen):
    """A number of both sides."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    name: str
    """`fitness`, a metric, or a class, whose number is its mAP50-95."""
    a: Number
    """Mean of A over the pairs."""
    b: Number
    difference: Number
    """B less A."""
    error: Number
    """Standard error of the difference; null with a single pair."""
    pairs: int
    """In which both sides have a value."""


class CompareDocument(Document):
    """Of `compare`: which side is better."""

    folder: str
    better: Literal["A", "B", ""]
    """'': no difference is shown."""
    claim: str
    """In a sentence."""
    pairs: int
    difference: Number
    """Mean fitness of B less that of A."""
    margin: Number
    """Half the width of its interval; null if these pairs have none."""
    metrics: tuple[ComparedNumber, ...]
    classes: tuple[ComparedNumber, ...]


class ChecksDocument(Document):
    """Of `checks`: versions, devices, cluster and storage, or a data set."""

    problems: tuple[str, ...]
    """What would keep a training from starting; empty: nothing."""
    splits: dict[str, SplitCounts] | None
    """Of the data set, with `--data` and without `--against`."""
    names: tuple[str, ...] | None
    """Of its classes."""
    lines: tuple[str, ...]
    """As printed without `--json`."""


DOCUMENTS: dict[str, tuple[type[Document], ...]] = {
    "train": (TrainDocument,), "val": (ValDocument,), "predict": (PredictDocument,), "list": (ListDocument,),
    "status": (StatusDocument, ClusterDocument), "verify": (VerifyDocument,), "compare": (CompareDocument,),
    "checks": (ChecksDocument,),
}
"""Command -> what it may answer."""

