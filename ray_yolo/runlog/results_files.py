"""The files of a run folder that are projections of its event log, in the forms that YOLOv5's users and tools know:
results.csv, TensorBoard's scalars, hyp.yaml and opt.yaml. Each can be deleted and made again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ray_yolo.config.fields import GENES
from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.runlog.events import Event, durable, epoch_rows, follow, plain, surviving

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

EVENTS_FILE = "events.jsonl"
RUN_FILE = "mlflow.json"

Places = dict[str, tuple[str | int, ...]]
"""Name of a number -> where an epoch event has it."""

TERMS = ("box", "obj", "cls")
"""Terms of the loss where a log does not say: those of the models with anchors."""


def terms_of(rows: Sequence[Event]) -> tuple[str, ...]:
    """Names of the loss's terms, as epoch events have them."""
    return tuple(rows[0]["train"]) if rows else TERMS


def loss_places(part: str, terms: Sequence[str]) -> Places:
    """The losses of `train` or `val` under YOLOv5's names."""
    return {f"{part}/{term}_loss": (part, term) for term in terms}


def columns(terms: Sequence[str]) -> Places:
    """The numbers of an epoch under YOLOv5's names. Results.csv puts `epoch` before them."""
    return {
        **loss_places("train", terms),
        "metrics/precision": ("metrics", "precision"),
        "metrics/recall": ("metrics", "recall"),
        "metrics/mAP_0.5": ("metrics", "mAP50"),
        "metrics/mAP_0.5:0.95": ("metrics", "mAP50-95"),
        **loss_places("val", terms),
        "x/lr0": ("lr", 0),
        "x/lr1": ("lr", 1),
        "x/lr2": ("lr", 2),
    }


def number_at(tree: Any, path: Sequence[str | int]) -> float | None:
    """The number at a path into nested dicts and lists; None where there is none (no validation, not finite)."""
    for key in path:
        if tree is None or (isinstance(tree, Mapping) and key not in tree):
            return None
        tree = tree[key]
    return None if tree is None else float(tree)


def format_results(events: Sequence[Event]) -> str:
    """The text of results.csv: YOLOv5's header and a row for each surviving epoch, counted from 0 as YOLOv5 does.

    Cells are right-aligned, 20 wide, five digits, with commas between; `nan` where nothing was measured.
    """
    rows = epoch_rows(surviving(events))
    places = columns(terms_of(rows))
    lines = [",".join(f"{name:>20}" for name in ("epoch", *places))]
    for row in rows:
        numbers = [number_at(row, path) for path in places.values()]
        cells = [row["epoch"], *(math.nan if number is None else number for number in numbers)]
        lines.append(",".join(f"{cell:20.5g}" for cell in cells))
    return "\n".join(lines) + "\n"


def write_results_csv(events: Sequence[Event], path: str | os.PathLike[str]) -> None:
    """Make results.csv anew; readers see the old file or the new one."""
    replace_text(path, format_results(events))


def write_options(recipe: Recipe, placement: Placement, folder: str | os.PathLike[str]) -> None:
    """Write hyp.yaml (YOLOv5's flat gene names) and opt.yaml (the whole `recipe` and `placement`, without secrets)."""
    tree = recipe.model_dump(mode="json")
    genes = {gene: _at(tree, path) for gene, path in GENES.items()}
    options = {"recipe": plain(tree), "placement": plain(placement.model_dump(mode="json"))}
    for name, content in (("hyp.yaml", genes), ("opt.yaml", options)):
        replace_text(Path(folder) / name, yaml.safe_dump(content, sort_keys=False))


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file so that no reader and no crash ever meets half of it (a power cut may lose it whole)."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


class TensorBoard:
    """TensorBoard's event files in a folder, fed with the durable epochs of a run.

    TensorBoard cannot take a point back, hence durable ones only. What the folder's files hold already is read from
    them, so that a restart, wherever it strikes, neither repeats a point nor leaves one out.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._writer: SummaryWriter | None = None
        self._written: set[tuple[str, int]] = set()

    def update(self, events: Sequence[Event]) -> None:
        """Add the points that are durable and not there yet.

        Raises:
            OSError: if the files cannot be written; the next call reads what they hold and goes on from there.
        """
        rows = epoch_rows(durable(events))
        if not rows:
            return
        writer = self._writer or self._open()
        self._writer = None  # until the points are on disk: a writer that failed once stays broken
        for row in rows:
            for tag, path in columns(terms_of(rows)).items():
                number = number_at(row, path)
                if number is not None and (tag, row["epoch"]) not in self._written:
                    writer.add_scalar(tag, number, row["epoch"], walltime=row["time"])
                    self._written.add((tag, row["epoch"]))
        writer.flush()
        self._writer = writer

    def close(self) -> None:
        """Release the file; a later update opens another one."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _open(self) -> SummaryWriter:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._written = _read_points(self._folder)
        return SummaryWriter(str(self._folder))


class Results:
    """Keeps results.csv and TensorBoard's files of a run folder in step with its event log."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._run_dir = Path(run_dir)
        self._log = follow(self._run_dir / EVENTS_FILE)
        self._events: list[Event] = []
        self._stale = True
        self._board = TensorBoard(self._run_dir)

    def update(self) -> None:
        """Bring the files up to date; cheap when nothing happened.

        Raises:
            OSError: if a file cannot be written; the next call tries again.
        """
        new = [event for event in next(self._log) if event["type"] not in ("step", "share")]
        self._events += new
        self._stale = self._stale or bool(new)
        if self._stale and self._events:
            write_results_csv(self._events, self._run_dir / "results.csv")
            self._board.update(self._events)
            self._stale = False

    def close(self) -> None:
        """Release TensorBoard's file."""
        self._board.close()


def _at(tree: Mapping[str, Any], path: str) -> Any:
    for key in path.split("."):
        tree = tree[key]
    return tree


def _read_points(folder: Path) -> set[tuple[str, int]]:
    """(tag, step) of every scalar in a folder's TensorBoard files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {(tag, point.step) for tag in files.Tags()["scalars"] for point in files.Scalars(tag)}
