"""Formats the events of a training as lines of text. Nothing is printed here."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import (
    AUTO_BATCH,
    LEAST_MICROBATCH,
    QUAD,
    Recipe,
    accumulate_batches,
    default_microbatch,
    divisors,
    resolved_batch,
)
from ray_yolo.config.sections import OptimizerConfig
from ray_yolo.core.events import (
    ANCHOR_TERMS,
    METRICS,
    BalanceEvent,
    ClassResult,
    DatasetEvent,
    EndEvent,
    EpochEvent,
    Event,
    Number,
    ResourcesEvent,
    RunEvent,
    SplitCounts,
    StartEvent,
    StepEvent,
    WarningEvent,
)
from ray_yolo.core.formatting import format_cell, format_count, format_duration, format_number
from ray_yolo.core.redact import printable, redact
from ray_yolo.data.index import first_paths
from ray_yolo.engine.plan import Plan
from ray_yolo.runs.location import location
from ray_yolo.runs.run_record import TransferRecord
from ray_yolo.runs.run_state import state_of
from ray_yolo.sinks.mlflow_client import read_run_file
from ray_yolo.sinks.tensorboard import is_installed

_METRICS = ("P", "R", "mAP50", "mAP50-95")
CLASS_HEADER = ("%22s" + "%11s" * 6) % ("Class", "Images", "Instances", *_METRICS)
_DATA_COLUMNS = {"images": "images", "boxes": "boxes", "empty file": "empty_file", "no file": "no_file",
                 "images out": "images_left_out", "rows out": "rows_left_out", "orphans": "orphans",
                 "not read": "unread", "twins": "twins", "clipped": "clipped", "specks": "specks"}
_RARE = ("orphans", "not read", "twins", "clipped", "specks")  # columns that are shown only if a split has any

_LAYERS_SHOWN = 3  # this many of the layers that initial weights do not cover are listed
_CLASSES_SHOWN = 20  # the console shows this many; the event log has all
_ROWS_PER_HEADER = 30
_LARGE_BATCH = 4  # a batch that follows the workers is reported from this many nominal batches on
_IDLE_SHARE = 0.1  # a start reports workers that idle longer in the first epoch
_SMOOTHING = 0.9  # each step event changes the shown images per second by the rest


class TrainingReport:
    """Formats events as lines.

    Args:
        live: format for a terminal: two rows per epoch, each under its header, as in YOLOv5; else one row per epoch.
    """

    def __init__(self, *, live: bool) -> None:
        self._live = live
        self._num_val_images = 0
        self._batch_size, self._batches = 1, 1  # batches per epoch
        self._epochs = 1
        self._terms: Sequence[str] = ANCHOR_TERMS
        self._epoch = 0
        self._batch: int | None = None  # batches done over all epochs; None before the first step after a start
        self._losses: list[Sequence[float]] = []  # this epoch's step events hold them
        self._images_per_second: float | None = None
        self._memory_gb: float | None = None
        self._rows_to_header = 0  # this many rows follow before the header is repeated, if there is no terminal
        self._worker_warnings: set[str] = set()  # workers often repeat the same warning

    def observe(self, event: Event) -> list[str]:
        """The lines for an event."""
        match event:
            case RunEvent():
                return self._on_run(event)
            case DatasetEvent():
                return dataset_table(event.splits, event.names)
            case ResourcesEvent():
                return [resources_line(event)]
            case StartEvent():
                return self._on_start(event)
            case StepEvent():
                self._on_step(event)
            case EpochEvent():
                return self._on_epoch(event)
            case BalanceEvent():
                return [event.line]
            case WarningEvent():
                return self._on_warning(event)
            case EndEvent():
                self._batch = None
        return []

    def progress(self) -> str:
        """One line with the progress and the remaining time; empty while they are unknown."""
        if self._batch is None or not self._images_per_second or self._epoch >= self._epochs:
            return ""
        columns = zip(*self._losses, strict=True)  # one per loss term
        means = [math.fsum(column) / len(column) for column in columns]
        batches_of_epoch = self._batch - self._epoch * self._batches
        percent = 100 * batches_of_epoch // self._batches
        batches_left = self._epochs * self._batches - self._batch
        left = ""
        if batches_left > 0:
            left = format_duration(batches_left * self._batch_size / self._images_per_second)
        losses: Sequence[float | None] = means or (None,) * len(self._terms)
        if self._live:
            # After the last step only the validation is left, which takes as long as it takes.
            return self._train_row(f" {percent}%", losses, self._images_per_second, f"-{left}" if left else "val")
        rest = f"{left} left" if left else "validating"
        return (f"epoch {self._epoch + 1}/{self._epochs}  {percent} %  {rest}{_named(self._terms, losses)}  "
                f"{format_number(self._images_per_second)} images/s")

    def _on_run(self, event: RunEvent) -> list[str]:
        recipe = Recipe.model_validate(event.recipe)
        self._num_val_images = event.num_val_images
        self._batch_size, _ = resolved_batch(recipe)
        self._batches = max(math.ceil(event.num_images / self._batch_size), 1)
        return [f"{event.name}: {recipe.model} ({event.num_parameters:,} parameters) on {recipe.data} "
                f"({event.num_images} images, {event.num_val_images} for validation, {len(event.names)} classes)",
                settings_line(recipe), *map(printable, event.notes)]

    def _on_start(self, event: StartEvent) -> list[str]:
        self._epochs, self._terms = event.epochs, event.terms
        self._begin_epoch(event.epoch)
        self._batch, self._rows_to_header = None, 0
        workers = format_count(event.num_workers, "worker")
        line = f"training on {workers}"
        if event.step > 0:
            line = f"continuing with {workers} from step {event.step}, epoch {event.epoch + 1}"
        return [line, "", train_header(self._terms)] if self._live else [line]

    def _on_step(self, event: StepEvent) -> None:
        if event.epoch != self._epoch:
            self._begin_epoch(event.epoch)
        self._batch = event.batch + 1
        if rate := event.images_per_second:
            old = self._images_per_second or rate
            self._images_per_second = _SMOOTHING * old + (1 - _SMOOTHING) * rate
        losses = [loss for loss in event.loss if loss is not None]
        if len(losses) == len(event.loss):
            self._losses.append(losses)

    def _on_epoch(self, event: EpochEvent) -> list[str]:
        if event.epoch < self._epoch:
            return []  # a restart reports the last epoch again, in case it was lost
        self._epoch, self._memory_gb = event.epoch, event.memory_gb
        lines = self._live_rows(event) if self._live else self._epoch_row(event)
        self._begin_epoch(event.epoch + 1)
        self._batch = self._epoch * self._batches
        return lines

    def _on_warning(self, event: WarningEvent) -> list[str]:
        if event.worker is None:
            return [f"WARNING: {event.message}"]
        if event.message in self._worker_warnings:
            return []
        self._worker_warnings.add(event.message)
        return [f"WARNING: worker {event.worker}: {event.message}"]

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._losses = []

    def _live_rows(self, event: EpochEvent) -> list[str]:
        lines = [self._train_row("", [*event.train.values()], event.images_per_second, format_duration(event.seconds))]
        if event.metrics:
            lines += class_table(event.metrics, event.per_class, self._num_val_images)[:2]
            lines += ["", train_header(self._terms)] if event.epoch + 1 < self._epochs else []
        return lines

    def _epoch_row(self, event: EpochEvent) -> list[str]:
        """One row with all numbers of an epoch, now and then below a header."""
        header = [] if self._rows_to_header else [epoch_header(self._terms)]
        self._rows_to_header = (self._rows_to_header or _ROWS_PER_HEADER) - 1
        losses = [format_cell(event.train.get(term)) for term in self._terms]
        metrics = [format_cell((event.metrics or {}).get(name)) for name in METRICS]
        row = _cells(f"{event.epoch + 1}/{self._epochs}", self._memory, *losses, *metrics,
                     format_cell(event.images_per_second, 1), format_duration(event.seconds))
        return [*header, f"{row}  best" if event.best else row]

    @property
    def _memory(self) -> str:
        return f"{self._memory_gb:.3g}G" if self._memory_gb else "-"

    def _train_row(self, percent: str, losses: Sequence[float | None], images_per_second: float | None,
                   duration: str) -> str:
        """One row under `train_header`: 77 columns for three loss terms, to fit a terminal of 80."""
        return _cells(f"{self._epoch + 1}/{self._epochs}{percent}", self._memory, *map(format_cell, losses),
                      format_cell(images_per_second, 1), duration)


def dataset_table(splits: Mapping[str, SplitCounts], names: Sequence[str]) -> list[str]:
    """The splits of a data set: counts, boxes of each class, the label paths that were searched, and notes.

    If there are many classes, only the most frequent ones and those without boxes are listed.
    """
    lines = [*_counts_by_split(splits), *_boxes_by_class(splits, names)]
    for name, split in splits.items():
        missing = [names[number] for number, boxes in enumerate(split.per_class) if not boxes]
        if missing:
            first = ", ".join(missing[:_CLASSES_SHOWN])
            lines.append(f"no box in {name}: {len(missing)} of {len(names)} classes ({first})")
        lines.append(printable(f"labels of {name}: looked for in {first_paths(split.looked_for)}"))
        lines += [printable(f"{name}: {note}") for note in split.notes]
    return lines


def _counts_by_split(splits: Mapping[str, SplitCounts]) -> list[str]:
    """A header, and one row per split."""
    columns: dict[str, list[object]] = {"Data": list(splits)}
    for title, field in _DATA_COLUMNS.items():
        counts = [getattr(split, field) for split in splits.values()]
        if any(counts) or title not in _RARE:
            columns[title] = counts
    rows = [columns.keys(), *zip(*columns.values(), strict=True)]
    return ["".join(f"{cell:>11}" for cell in row) for row in rows]


def _boxes_by_class(splits: Mapping[str, SplitCounts], names: Sequence[str]) -> list[str]:
    """A header, and one row for each of the most frequent classes, in the order of the data set."""
    boxes_of = {}
    for number in range(len(names)):
        boxes_of[number] = [split.per_class[number] for split in splits.values()]
    most_first = sorted(boxes_of, key=lambda number: -sum(boxes_of[number]))
    shown = sorted(most_first[:_CLASSES_SHOWN])
    form = "%22s" + "%11s" * len(splits)
    lines = [form % ("boxes of", *splits)]
    lines += [form % (names[number], *boxes_of[number]) for number in shown]
    if len(names) > len(shown):
        lines.append(f"{len(names) - len(shown):>15} more classes")
    return lines


def train_header(terms: Sequence[str]) -> str:
    """The header of the live table."""
    return _cells("Epoch", "GPU_mem", *(f"{term}_loss" for term in terms), "images/s", "time")


def epoch_header(terms: Sequence[str]) -> str:
    """The header of the table with one row per epoch."""
    return _cells("Epoch", "GPU_mem", *(f"{term}_loss" for term in terms), *_METRICS, "images/s", "time")


def _cells(*words: str) -> str:
    return "".join(f"{word:>11}" for word in words)


def closing_message(run_dir: str | Path, events: Iterable[Event], *, plots: bool = False, uri: str | None = None
                    ) -> str:
    """The closing lines: per-class table of the best epoch, outcome, and the results with the commands that open them.

    Args:
        plots: whether pictures are drawn, possibly later than this.
        uri: the MLflow server that has the run, possibly later than this.
    """
    state = state_of(events)
    rows, best = state.rows, state.best
    lines = [_outcome(state.end, rows)]
    if state.goodput.line:
        lines.append(f"interrupted  {state.goodput.line}")
    if best:
        images = state.dataset.splits["val"].images if state.dataset else None
        table = class_table(best.metrics, best.per_class, images) if best.metrics else [CLASS_HEADER]
        lines = [*table, "", *lines, f"best epoch   {best.epoch + 1}{_measured(best)}",
                 f"             (epoch {best.epoch} in results.csv, which counts from 0 as YOLOv5 does)"]
    return "\n".join([*lines, *_result_lines(Path(run_dir), plots and bool(rows), uri)])


def settings_line(recipe: Recipe) -> str:
    """The settings of a step in one line; an open setting is shown with the source that resolves it."""
    rate = f"learning rate {recipe.optimizer.lr0:g} ({recipe.optimizer.name})"
    precision = f"precision {recipe.precision}" + " (bf16 where it is fast, else fp32)" * (recipe.precision == "auto")
    if recipe.microbatch is None:
        return f"batch as large as the GPUs' memory holds, {precision}, {rate}"
    batch, micro = resolved_batch(recipe)
    batches = accumulate_batches(recipe)
    return f"batch {batch}, microbatch {micro}, accumulation {batches} ({batch * batches} images per step), " + (
        f"{precision}, {rate}")


def workers_line(placement: Placement, gpus: float | None) -> str:
    """The workers of a training on Ray in one line, as far as they are known without the cluster.

    Args:
        gpus: of each worker; None: 1 if the cluster has any.
    """
    low, high, cpus = placement.min_workers, placement.max_workers, placement.cpus_per_worker
    number = f"{low} to {high}" if low < high else str(low)
    kind = "of an elastic pool" if placement.is_elastic else "of Ray Train"
    each = ["its share of a node's CPUs" if cpus == "auto" else f"{cpus:g} CPU",
            "1 GPU if the cluster has any" if gpus is None else f"{gpus:g} GPU"]
    if placement.accelerator_type:
        each.append(placement.accelerator_type)
    return f"Ray: {number} workers {kind}, placed by {placement.placement_strategy}; each has {', '.join(each)}"


def placement_line(asked: Recipe, decided: Recipe) -> str:
    """How to train the same weights on another number of workers; '' if the command as given already does so.

    Args:
        asked: the recipe as requested.
        decided: the same with all open settings resolved, as far as they are known.
    """
    if decided.batch_size in (None, AUTO_BATCH) or decided.microbatch is None:
        return ("batch_size and microbatch follow the workers; give --batch-size and --microbatch to train the same "
                "weights on any number of workers")
    batch, micro = resolved_batch(decided)
    usual = default_microbatch(batch, 1, asked.optimizer.nominal_batch, QUAD if asked.quad else 1)
    if asked.batch_size in (None, AUTO_BATCH):
        what = "batch_size follows the workers"
        nominal = decided.optimizer.nominal_batch
        if batch > _LARGE_BATCH * nominal:
            what += (f" and is {batch}, {batch / nominal:.0f} times the nominal batch of {nominal} that the learning "
                     "rate is for (--batch-size sets it)")
    elif asked.microbatch is None and not asked.sync_bn and micro != usual:
        what = f"microbatch is {micro} instead of {usual}, because each worker needs one"
    else:
        return ""
    flags = f"--batch-size {batch}" + ("" if asked.sync_bn else f" --microbatch {micro}")
    return f"{what}; the same weights on another number of workers: add {flags}"


def idle_line(plan: Plan, num_workers: int) -> str:
    """How many workers have no work at the start, until when, and the flag that mends it; '' up to 10 % of the time of
    the first epoch.

    YOLOv5's warm-up accumulates 1, 2, ... batches a step, so its first steps have the fewest microbatches. After the
    warm-up, the idle share of an epoch stays what it is.
    """
    idle = plan.idle_share(0, num_workers)
    if idle <= _IDLE_SHARE:
        return ""
    settled = min(math.ceil(plan.warmup / plan.batches), plan.recipe.epochs - 1)
    busy = next((epoch for epoch in range(1, settled + 1) if plan.idle_share(epoch, num_workers) <= _IDLE_SHARE), None)
    until = f"until epoch {busy + 1}" if busy else "in every epoch"
    batch, micro = resolved_batch(plan.recipe)
    parts = plan.microbatches(plan.steps(0)[0])
    line = (f"{num_workers} workers are idle for {100 * idle:.0f} % of their time in the first epoch: its first step "
            f"has {format_count(parts, 'microbatch')} of {micro} images")
    if parts < num_workers:
        line += f", so {format_count(num_workers - parts, 'worker')} without work"
    line += f", {until}"
    smaller = {}
    for size in divisors(batch):
        if min(LEAST_MICROBATCH, batch) <= size < micro and not (plan.recipe.quad and size % QUAD):
            mended = Plan(plan.recipe.model_copy(update={"microbatch": size}), plan.num_images)
            smaller[size] = mended.idle_share(0, num_workers)
    if not smaller or min(smaller.values()) >= idle:
        return line
    # The largest one that suffices: BatchNorm averages over a microbatch, and a smaller one costs launches.
    best = max((size for size, share in smaller.items() if share <= _IDLE_SHARE),
               default=min(smaller, key=lambda size: (smaller[size], -size)))
    return f"{line}; with --microbatch {best}, a new training with other weights, {100 * smaller[best]:.0f} %"


def tf32_line(decided: Recipe, gpus: float | None) -> str:
    """What fp32 means on a GPU; '' if nothing is rounded, or there is no GPU."""
    if not gpus or decided.precision != "fp32" or decided.no_tf32:
        return ""
    return ("precision fp32 on GPUs: convolutions round their inputs to TF32 (10 bits), as torch does by default; "
            "--no-tf32 keeps all bits and is slower")


def fine_tuning_line(asked: Recipe, decided: Recipe) -> str:
    """The optimiser of a short training from weights and how to have the other one; '' if it is as requested."""
    if asked.optimizer == decided.optimizer:
        return ""
    optimizer, defaults = decided.optimizer, OptimizerConfig()
    return (f"few steps from trained weights: {optimizer.name}, learning rate {optimizer.lr0:g}, no bias warm-up; for "
            f"{defaults.name} with {defaults.lr0:g}, add --recipe scratch-low")


def dry_placement_line(asked: Recipe, decided: Recipe) -> str:
    """The settings of a recipe that follow the placement, in one line; '' if there are none."""
    if asked.batch_size in (None, AUTO_BATCH):
        batch, micro = "batch_size (workers)", asked.batch_size == AUTO_BATCH and asked.microbatch is None
    else:
        batch, micro = "", bool(placement_line(asked, decided))
    follows = {
        batch: bool(batch),
        "microbatch (workers)": micro,
        "precision (processors)": asked.precision == "auto",
        "threads (CPUs of a worker)": not asked.threads and not asked.exact,
    }
    names = [name for name, does_follow in follows.items() if does_follow]
    return f"settings that follow the placement: {', '.join(names)}" if names else ""


def transfer_line(transfer: TransferRecord, weights: str) -> str:
    """How much of a model comes from its initial weights, and what is special about their classes, in one line."""
    line = f"weights: {transfer.matched} of {transfer.total} tensors come from {weights}"
    if transfer.left_out:
        layers = dict.fromkeys(".".join(name.split(".")[:2]) for name in transfer.left_out)
        shown = ", ".join(list(layers)[:_LAYERS_SHOWN]) + (", ..." if len(layers) > _LAYERS_SHOWN else "")
        line += f"; {len(transfer.left_out)} start with new values (in {shown}; --dry-run lists them)"
    if transfer.is_sparse:
        line += "; the file seems to be of another model: give its own name with --model"
    return line


def licence_line(licence: str, weights: str) -> str:
    """The licence that a file of initial weights states, in one line; '' if it states none."""
    if not licence:
        return ""
    return (f"licence: {weights} states '{licence}'; its owner may hold that this covers what is trained from it "
            "(docs/running.md, Initial weights)")


def resources_line(event: ResourcesEvent) -> str:
    """The resources of each worker and the reasons, in one line."""
    cpus = format_count(event.cpus, "CPU")
    threads = format_count(event.threads, "thread")
    loaders = format_count(event.loader_processes, "loader process")
    why = "as asked"
    if event.reasons:
        why = "; ".join((*event.reasons, "flags: --cpus-per-worker --workers --cache"))
    return f"each worker: {cpus}, {threads}, {loaders}, cache {event.cache} ({why})"


def class_table(metrics: Mapping[str, Number], per_class: Sequence[ClassResult], images: int | None) -> list[str]:
    """CLASS_HEADER, a row for all classes, and one per class: name, images, labels, four metrics."""
    total = {"name": "all", "images": images, "labels": sum(row.labels for row in per_class), **metrics}
    lines = [CLASS_HEADER]
    for row in (ClassResult.model_validate(total), *per_class):
        images_cell = "-" if row.images is None else row.images
        metric_cells = map(format_cell, (row.precision, row.recall, row.map50, row.map50_95))
        lines.append(("%22s" + "%11s" * 6) % (row.name, images_cell, row.labels, *metric_cells))
    return lines


def _outcome(end: EndEvent | None, rows: Sequence[EpochEvent]) -> str:
    done = f"{format_count(len(rows), 'epoch')} in {format_duration(sum(row.seconds for row in rows))}"
    if end is None:
        return f"interrupted after {done}; the same command continues"
    reason = f" ({end.reason})" if end.reason else ""
    return f"{end.status}: {done}{reason}" + ("" if end.status == "done" else "; the same command continues")


def _result_lines(run_dir: Path, plots: bool, uri: str | None) -> list[str]:
    """The results, and the command that opens each."""
    stored = location(run_dir)
    lines = []
    if stored != str(run_dir):  # in a bucket
        lines.append(f"stored       {stored}")
    lines.append(f"results      {run_dir}")
    weights = [name for name in ("best.pt", "last.pt") if (run_dir / "weights" / name).exists()]
    if weights:
        lines.append(f"weights      {run_dir / 'weights'} ({', '.join(weights)})")
    if plots or (run_dir / "results.png").exists():
        lines.append(f"plots        {run_dir} (results.png, val_batch*_pred.jpg, ...: open with any picture viewer)")
        lines.append(f"page         {run_dir / 'report.html'} (all of it in one file: open in a browser, or send it)")
    if is_installed():
        lines.append(f"tensorboard  tensorboard --logdir {shlex.quote(str(run_dir))}")
    else:
        lines.append("tensorboard  no files: pip install tensorboard")
    return [*lines, *_mlflow_lines(run_dir, uri)]


def _mlflow_lines(run_dir: Path, uri: str | None) -> list[str]:
    """How to look at the run in MLflow: at the run itself if it is there already."""
    about = read_run_file(run_dir)
    if about is None and uri is None:
        return []
    server, page = redact(uri or "").rstrip("/"), ""
    if about is not None and (uri is None or about["uri"] == redact(uri)):
        server = about["uri"].rstrip("/")
        page = f"/#/experiments/{about['experiment_id']}/runs/{about['run_id']}/model-metrics"  # metrics over epochs
        page += "?workflowType=machine_learning"  # a fresh browser would show MLflow's pages for language models
    if server.startswith("http"):
        return [f"mlflow       {server}{page}"]
    return [f"mlflow       mlflow ui --backend-store-uri {shlex.quote(server)}",
            f"             (and open http://127.0.0.1:5000{page})"]


def _measured(row: EpochEvent) -> str:
    """The metrics of an epoch by their short names."""
    return _named(_METRICS, [(row.metrics or {}).get(name) for name in METRICS])


def _named(names: Iterable[str], numbers: Sequence[float | None]) -> str:
    """'  name number' for each number that is not None."""
    pairs = zip(names, numbers, strict=True)
    return "".join(f"  {name} {format_number(number)}" for name, number in pairs if number is not None)
