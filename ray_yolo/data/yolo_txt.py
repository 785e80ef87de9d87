"""YOLO label files: rows `class x y width height` or `class x1 y1 x2 y2 x3 y3 ...`, shares of the image.

Ambiguous or invalid rows are left out and reported with their line.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ray_yolo.core.structures import Finding
from ray_yolo.data.labels import LabelRow, Labels, UnreadableLabelsError, labels_of, read_rows

_SLACK = 1e-4  # shares this far outside 0..1 are rounding errors of exporters and are clipped


def label_path(image_path: str) -> str:
    """The label file of an image: the last `/images/` becomes `/labels/`, the suffix `.txt`."""
    head, found, tail = image_path.rpartition("/images/")
    changed = f"{head}/labels/{tail}" if found else image_path
    return str(Path(changed).with_suffix(".txt"))


def shares_of(boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(n, 4) float64 centre x, centre y, width, height of boxes (n, 4) xyxy, as shares of an image of `size`."""
    low, high = boxes[:, :2], boxes[:, 2:]
    return np.concatenate([(low + high) / 2, high - low], axis=1) / np.array([*size[::-1], *size[::-1]])


def parse_labels(content: bytes, size: tuple[int, int], names: Sequence[str],
                 where: str) -> tuple[Labels, list[Finding]]:
    """The labels in the bytes of a file, and the findings about its rows. The text is UTF-8 with or without BOM, or
    UTF-16 with BOM, with any line ends. `size` is (height, width) of the upright image, `where` the file's path for
    messages.

    Raises:
        UnreadableLabelsError: for a file that is not text.
    """
    lines = [(number, line) for number, line in enumerate(_text(content, where).splitlines(), 1) if line.strip()]
    rows, findings = read_rows(lines, lambda line: _row(line[1], size, len(names), f"{where}:{line[0]}"))
    return labels_of(rows), findings


def _text(content: bytes, where: str) -> str:
    marked = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return content.decode("utf-16" if marked else "utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableLabelsError(where, "is not a text file") from None


def _row(line: str, size: tuple[int, int], num_classes: int, place: str) -> LabelRow:
    kind, *shares = _numbers(line, num_classes, place)
    if len(shares) > 4:
        outline = np.array(shares).reshape(-1, 2) * (size[1], size[0])
        (left, above), (right, below) = outline.min(axis=0).tolist(), outline.max(axis=0).tolist()
        return LabelRow(place, (kind, *shares), int(kind), (left, above, right, below), outline)
    x, y, width, height = shares  # plain floats: arrays would take half of the time
    box = (_share(x - width / 2) * size[1], _share(y - height / 2) * size[0],
           _share(x + width / 2) * size[1], _share(y + height / 2) * size[0])
    return LabelRow(place, (kind, *shares), int(kind), box)


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _numbers(line: str, num_classes: int, place: str) -> list[float]:
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
        raise UnreadableLabelsError(place, f"has the class {words[0][:20]}, which is not a whole number")
    if not 0 <= kind < num_classes:
        raise UnreadableLabelsError(place, f"has the class {words[0][:20]}, but the data set names {num_classes} "
                                           f"classes (0-{num_classes - 1}); correct it or add the name")
    return [kind, *map(_share, shares)]
