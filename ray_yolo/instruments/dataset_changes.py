"""The page about two versions of a data set: what has changed, and the average precision of each class on both."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import DatasetError, InputError
from ray_yolo.core.files import atomic_write
from ray_yolo.core.formatting import format_cell
from ray_yolo.core.redact import printable
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.instruments.dataset_check import read_readable_splits
from ray_yolo.labels import versions
from ray_yolo.runs.event_log import EVENTS_FILE, best_row, epoch_rows, read_events, surviving
from ray_yolo.runs.folders import output_folder
from ray_yolo.runs.location import location, publish

_CLASS_COLUMNS = ("class", "boxes_before", "boxes_after", "images_changed", "AP_before", "AP_after", "AP_change")
_WIDTH = 22


def compare_datasets(data: str, against: str, runs: Sequence[Path], placement: Placement) -> list[str]:
    """Compare a data set with an older version. Writes changes.csv and classes.csv into a new folder.

    Args:
        data: the new version.
        against: the old version.
        runs: of the new and of the old version; the mAP50-95 of each class at their best epochs is compared. () for
            none.

    Returns:
        The page's lines.

    Raises:
        DatasetError: if a version cannot be read.
        InputError: if a run has no validation with results of classes.
    """
    precisions = [class_precisions(run) for run in runs]
    new, old = _read(data), _read(against)
    changes = versions.compare_versions(old, new)
    classes = _class_rows(old, new, changes, precisions)
    folder = output_folder(placement, [image.file for image in (*old, *new)])
    change_rows = []
    for change in changes:
        *fields, classes_of_image = change
        change_rows.append([*fields, " ".join(classes_of_image)])
    atomic_write(folder / "changes.csv", _as_csv(versions.ImageChange._fields, change_rows), durable=False)
    atomic_write(folder / "classes.csv", _as_csv(_CLASS_COLUMNS, classes), durable=False)
    publish(folder)
    lines = [f"{data} against {against}: {len(old)} images before, {len(new)} after",
             *_split_table(old, new, changes), *_class_table(classes, with_precisions=bool(precisions)),
             f"every change: {location(folder)}/changes.csv", f"every class: {location(folder)}/classes.csv"]
    return [printable(line) for line in lines]


def class_precisions(run: Path) -> dict[str, float | None]:
    """mAP50-95 of each class by name, at the best epoch of a run.

    Raises:
        InputError: if its log has no such epoch.
    """
    best = best_row(epoch_rows(surviving(read_events(run / EVENTS_FILE))))
    if best is None or not best.per_class:
        raise InputError(f"runs: {run}: its log has no validation with results of classes; give the folder of a run, "
                         "such as runs/train/exp")
    return {row.name: row.map50_95 for row in best.per_class}


def _read(data: str) -> list[versions.Image]:
    description = read_description(data)
    indices, problems = read_readable_splits(description)
    if problems:  # a missing split would be read as removed images
        raise DatasetError("; ".join(problems))
    return versions.images_of(indices, description.root)


def _split_table(old: Sequence[versions.Image], new: Sequence[versions.Image],
                 changes: Sequence[versions.ImageChange]) -> list[str]:
    """A row for each split; a moved image counts where it is now, a removed one where it was."""
    before, after = Counter(image.split for image in old), Counter(image.split for image in new)
    of_split = Counter((change.split or change.old_split, change.kind) for change in changes)
    lines = ["".join(f"{word:>11}" for word in ("Split", "before", "after", *versions.KINDS))]
    for split in [name for name in ("train", "val", "test") if name in before or name in after]:
        cells = [split, before[split], after[split], *(of_split[split, kind] for kind in versions.KINDS)]
        lines.append("".join(f"{cell:>11}" for cell in cells))
    return lines


def _class_rows(old: Sequence[versions.Image], new: Sequence[versions.Image], changes: Sequence[versions.ImageChange],
                precisions: Sequence[Mapping[str, float | None]]) -> list[list[object]]:
    """A row for each class of either version, in the columns of `_CLASS_COLUMNS`; None where there is no number."""
    before, after = versions.count_boxes(old), versions.count_boxes(new)
    changed_images = {name: set[tuple[str, str]]() for name in sorted(before.keys() | after.keys())}
    for change in changes:
        image = (change.split or change.old_split, change.path or change.old_path)
        for name in change.classes:
            changed_images[name].add(image)  # once, although an image may be moved and relabelled
    new_precisions, old_precisions = precisions or ({}, {})
    rows: list[list[object]] = []
    for name, changed in changed_images.items():
        one, other = old_precisions.get(name), new_precisions.get(name)
        difference = None if one is None or other is None else other - one
        rows.append([name, before[name], after[name], len(changed), one, other, difference])
    return rows


def _class_table(rows: Sequence[Sequence[object]], *, with_precisions: bool) -> list[str]:
    titles = ["before", "after", "changed"]
    if with_precisions:
        titles += ["AP before", "AP after", "AP change"]
    lines = [f"{'boxes of':>{_WIDTH}}" + "".join(f"{title:>11}" for title in titles)]
    for name, before, after, changed, *precisions in rows:
        cells = [str(before), str(after), str(changed)]
        if with_precisions:
            cells += [format_cell(value if isinstance(value, float) else None) for value in precisions]
        lines.append(f"{name!s:>{_WIDTH}}" + "".join(f"{cell:>11}" for cell in cells))
    return lines


def _as_csv(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
