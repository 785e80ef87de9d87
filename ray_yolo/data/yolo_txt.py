"""YOLO label files: rows `class x y width height` or `class x1 y1 x2 y2 x3 y3 ...`, shares of the image.

A row whose meaning is plain is read; otherwise the whole file is refused with its line, because a picture
with half of its labels teaches the network that the other half is background.
"""

from __future__ import annotations

import codecs
from pathlib import Path

import numpy as np

from ray_yolo.data.labels import NO_LABELS, Labels, is_empty
from ray_yolo.errors import DatasetError
from ray_yolo.structures import Finding

_SLACK = 1e-4  # shares this far outside 0..1 are rounding of the exporter and are clipped


class UnreadableLabelsError(Exception):
    """A label file cannot be understood; carries the finding that says where."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.finding = Finding(where, what, dropped=True)


def label_path(image_path: str) -> str:
    """The label file of an image: the last `/images/` becomes `/labels/`, the suffix `.txt`."""
    head, found, tail = image_path.rpartition("/images/")
    changed = f"{head}/labels/{tail}" if found else image_path
    return str(Path(changed).with_suffix(".txt"))


def parse_labels(content: bytes, size: tuple[int, int], num_classes: int, where: str) -> tuple[Labels, list[Finding]]:
    """The labels in a file's bytes and what there was to say about them.

    Duplicated rows are kept once. A row with an empty box (zero width or height, or wholly outside the image) labels
    no pixel and is left out.

    Args:
        content: the file. UTF-8 with or without mark, UTF-16 with mark; any line ends.
        size: (height, width) of the upright image.
        where: the file's path, for messages.

    Raises:
        UnreadableLabelsError: for a row without plain meaning.
        DatasetError: for a class that the data set does not name.
    """
    kept: dict[tuple[float, ...], np.ndarray] = {}
    findings = []
    scale = (size[1], size[0])
    for number, line in enumerate(_text(content, where).splitlines(), 1):
        if not line.strip():
            continue
        place = f"{where}:{number}"
        row = _row(line, num_classes, place)
        if row in kept:
            findings.append(Finding(place, "repeats an earlier row; counted once", dropped=False))
            continue
        outline = _outline(row) * scale
        if is_empty(_around(outline)):
            findings.append(Finding(place, "the box is empty; the row is left out", dropped=True))
        else:
            kept[row] = outline
    return _labels(kept), findings


def _text(content: bytes, where: str) -> str:
    marked = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if marked else "utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableLabelsError(where, "is not a text file") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _row(line: str, num_classes: int, place: str) -> tuple[float, ...]:
    """Class and shares of one row, checked and clipped to 0..1."""
    words = line.split()
    if len(words) != 5 and (len(words) < 7 or len(words) % 2 == 0):
        raise UnreadableLabelsError(place, f"has {len(words)} columns; a box has 5, an outline of k points 1 + 2k "
                                           "with k from 3 up")
    try:
        if "_" in line:
            raise ValueError
        kind, *shares = map(float, words)
    except ValueError:
        raise UnreadableLabelsError(place, "is not a row of numbers") from None
    if not all(-_SLACK <= share <= 1 + _SLACK for share in shares):  # false for NaN too
        raise UnreadableLabelsError(place, "has values outside 0 to 1; they must be shares of the image's width "
                                           "and height")
    if not kind.is_integer():
        raise UnreadableLabelsError(place, f"has the class {words[0]}, which is not a whole number")
    if not 0 <= kind < num_classes:
        raise DatasetError(f"{place}: class {words[0][:20]}, but the data set names {num_classes} classes "
                           f"(0-{num_classes - 1}). Fix the label or add the name.")
    return kind, *(min(max(share, 0.0), 1.0) for share in shares)


def _outline(row: tuple[float, ...]) -> np.ndarray:
    """Corners of a row's box or points of its polygon, (k, 2) shares, clipped to the image."""
    if len(row) > 5:
        return np.array(row[1:]).reshape(-1, 2)
    _, x, y, width, height = row
    return np.array([(x - width / 2, y - height / 2), (x + width / 2, y + height / 2)]).clip(0, 1)


def _around(outline: np.ndarray) -> np.ndarray:
    return np.concatenate([outline.min(axis=0), outline.max(axis=0)])


def _labels(rows: dict[tuple[float, ...], np.ndarray]) -> Labels:
    if not rows:
        return NO_LABELS
    polygons: tuple[np.ndarray, ...] = ()
    if any(len(row) > 5 for row in rows):
        polygons = tuple((outline if len(row) > 5 else np.zeros((0, 2))).astype(np.float32)
                         for row, outline in rows.items())
    return Labels(np.array([row[0] for row in rows]).astype(np.int64),
                  np.array([_around(outline) for outline in rows.values()]).astype(np.float32), polygons)
