"""The files of a run folder in YOLOv5's formats: results.csv, hyp.yaml and opt.yaml."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import yaml

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import GENES, leaves
from ray_yolo.core.events import EpochEvent, Event, StartEvent
from ray_yolo.core.files import atomic_write
from ray_yolo.runs.event_log import epoch_rows, plain, surviving
from ray_yolo.runs.working_copy import read_or_empty
from ray_yolo.sinks.metric_names import metrics, terms_of


class ResultsCsv:
    """results.csv, made again from the event log after each epoch."""

    name, uses_time = "results.csv", False

    def __init__(self, folder: Path) -> None:
        self._path = folder / "results.csv"

    def update(self, events: Sequence[Event], ended: bool) -> None:
        """Replace the file atomically if it differs from the log."""
        text = format_results(events)
        is_due = any(isinstance(event, (StartEvent, EpochEvent)) for event in events)
        if is_due and read_or_empty(self._path) != text.encode():
            atomic_write(self._path, text, durable=False)


def format_results(events: Sequence[Event]) -> str:
    """The text of results.csv: YOLOv5's header and a row for each surviving epoch, counted from 0 as YOLOv5 does.

    Cells are right-aligned, 20 wide, five digits, with commas between; `nan` for missing values.
    """
    rows = epoch_rows(surviving(events))
    shown = [metric for metric in metrics(terms_of(rows)) if metric.column]
    names = ["epoch", *(metric.column for metric in shown)]
    lines = [",".join(f"{name:>20}" for name in names)]
    for row in rows:
        cells: list[float] = [row.epoch]
        for metric in shown:
            number = metric.of(row)
            cells.append(math.nan if number is None else number)
        lines.append(",".join(f"{cell:20.5g}" for cell in cells))
    return "\n".join(lines) + "\n"


def edited_options(recipe: Recipe, folder: str | os.PathLike[str]) -> list[str]:
    """The settings that someone has changed in a run's hyp.yaml and opt.yaml, such as `optimizer.lr0: 0.2`.

    A run keeps its recipe, and the files are only written. In YOLOv5, a resumed training reads them.
    """
    ours = {".".join(keys): value for keys, value in leaves(plain(recipe.model_dump(mode="json")))}
    edited = []
    for name in ("hyp.yaml", "opt.yaml"):
        try:
            content = yaml.safe_load((Path(folder) / name).read_bytes())
        except (OSError, ValueError, yaml.YAMLError):  # ValueError: a date that does not exist
            continue  # the first start, or a damaged file
        stated = content
        if name == "opt.yaml" and isinstance(content, dict):
            stated = content.get("recipe")
        if not isinstance(stated, dict):
            continue
        for keys, value in leaves(stated):
            path = GENES.get(keys[0], ".".join(map(str, keys)))
            text = f"{path}: {value}"
            if path in ours and path != "data" and value != ours[path] and text not in edited:
                edited.append(text)
    return edited


def write_options(recipe: Recipe, placement: Placement, folder: str | os.PathLike[str]) -> None:
    """Write hyp.yaml (YOLOv5's flat gene names) and opt.yaml (all of `recipe` and `placement`, without secrets)."""
    genes = {gene: attrgetter(path)(recipe) for gene, path in GENES.items()}
    options = {"recipe": plain(recipe.model_dump(mode="json")), "placement": plain(placement.model_dump(mode="json"))}
    for name, content in (("hyp.yaml", genes), ("opt.yaml", options)):
        atomic_write(Path(folder) / name, yaml.safe_dump(content, sort_keys=False), durable=False)
