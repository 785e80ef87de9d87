"""What is made of the rows of a label file, the same in every format.

A row that cannot be used is left out and told; the file's other rows stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from ray_yolo.data.labels import NO_LABELS, Labels, is_empty
from ray_yolo.structures import Finding

Item = TypeVar("Item")
NO_OUTLINE = np.zeros((0, 2), np.float32)


class UnreadableLabelsError(Exception):
    """A row, or a whole file, cannot be used; carries the finding that says where and why."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.finding = Finding(where, what, dropped=True)


class Row(NamedTuple):
    """One box of a label file."""

    place: str  # for messages
    key: tuple[float, ...]  # rows with equal keys are one label
    kind: int
    box: tuple[float, float, float, float]  # xyxy in pixels, inside of the image
    outline: np.ndarray = NO_OUTLINE  # (k, 2) pixels; k = 0 where there is only a box
    area: float = 0.0  # square pixels, where a file gives it


class ImageLabels(NamedTuple):
    """What is known of one image."""

    labels: Labels
    findings: Sequence[Finding] = ()
    areas: np.ndarray | None = None  # (n,) float64 square pixels, where a file gives them
    crowds: np.ndarray = np.zeros((0, 6))  # rows [class, x1, y1, x2, y2, area] of regions that are no single object


def read_rows(items: Iterable[Item], read: Callable[[Item], Row]) -> tuple[list[Row], list[Finding]]:
    """The rows that are to be used, and what there was to say about the others.

    Left out is a row that `read` refuses with UnreadableLabelsError and one whose box has no area; rows with equal
    keys count once.
    """
    kept: dict[tuple[float, ...], Row] = {}
    findings = []
    for item in items:
        try:
            row = read(item)
        except UnreadableLabelsError as error:
            findings.append(error.finding)
            continue
        if row.key in kept:
            findings.append(Finding(row.place, "repeats an earlier row; counted once", dropped=False))
        elif is_empty(row.box):
            findings.append(Finding(row.place, "the box is empty; the row is left out", dropped=True))
        else:
            kept[row.key] = row
    return list(kept.values()), findings


def labels_of(rows: Sequence[Row]) -> Labels:
    """The labels that rows describe, in order."""
    if not rows:
        return NO_LABELS
    outlines = tuple(row.outline.astype(np.float32) for row in rows)
    return Labels(np.array([row.kind for row in rows], np.int64), np.array([row.box for row in rows], np.float32),
                  outlines if any(len(outline) for outline in outlines) else ())
