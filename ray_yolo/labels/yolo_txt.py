"""YOLO label files: rows `class x y width height` or `class x1 y1 x2 y2 x3 y3 ...`, shares of the image. Where the data
set declares keypoints, a row is a box and its keypoints.

Ambiguous or invalid rows are left out and reported with their line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ray_yolo.labels.rows import (
    ImageLabels,
    LabelRow,
    LabelRules,
    UnreadableLabelsError,
    box_around,
    edge_remarks,
    labels_of,
    read_rows,
)
from ray_yolo.labels.rules import Code
from ray_yolo.labels.values import decode_text

_SLACK = 1e-4  # shares this far outside 0..1 are rounding errors of exporters and are clipped
_BOX_SLACK = 0.01  # a box may reach this far out of its image
_SAME = 0.005  # shares this close are equal: labelling tools round to three decimals
_DECIMAL_COMMA = re.compile(r"\d,\d")


def label_path(image_path: str) -> str:
    """The label file of an image: the last `/images/` becomes `/labels/`, the suffix `.txt`."""
    head, found, tail = image_path.rpartition("/images/")
    changed = f"{head}/labels/{tail}" if found else image_path
    return str(Path(changed).with_suffix(".txt"))


def shares_of(boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(n, 4) float64 centre x, centre y, width, height of boxes (n, 4) xyxy, as shares of an image of `size`."""
    low, high = boxes[:, :2], boxes[:, 2:]
    centres_and_sides = np.concatenate([(low + high) / 2, high - low], axis=1)
    return centres_and_sides / np.array([*size[::-1], *size[::-1]])  # width, height, width, height


def parse_labels(content: bytes, size: tuple[int, int], rules: LabelRules, where: str) -> ImageLabels:
    """The labels in the bytes of a file, and the findings about its rows. The text is UTF-8 with or without BOM, or
    UTF-16 with BOM, with any line ends. `size` is (height, width) of the upright image, `where` the file's path for
    messages.

    Raises:
        UnreadableLabelsError: for a file that is not text.
    """
    try:
        content_text = decode_text(content)
    except UnicodeDecodeError:
        raise UnreadableLabelsError(Code.NO_TEXT, where) from None
    lines = []
    for number, text in enumerate(content_text.splitlines(), 1):
        if text.strip():
            lines.append((text, f"{where}:{number}"))
    rows, findings = read_rows(lines, lambda line: _row(line[0], size, rules, place=line[1]))
    return labels_of(rows, findings, "YOLO")


def _row(line: str, size: tuple[int, int], rules: LabelRules, place: str) -> LabelRow:
    words = line.split()
    first, *shares = _numbers(line, words, place)
    if rules.keypoints or len(shares) <= 5:
        read_box = _box_of_keypoints if rules.keypoints else _plain_box
        box = read_box(shares, rules, place)
        kind = _class(words[0], first, rules, place)
        return _box_row(kind, box, size, place)
    _refuse_other_rows(words, shares, place)
    outline = _inside(_outline(shares, rules, place), place)
    kind = _class(words[0], first, rules, place)
    return _outline_row(kind, outline, size, place)


def _numbers(line: str, words: Sequence[str], place: str) -> list[float]:
    """The numbers of a row, five or more."""
    if "," in line or ";" in line:
        if ";" not in line and len(words) >= 5 and _DECIMAL_COMMA.search(line):
            raise UnreadableLabelsError(Code.DECIMAL_COMMAS, place)
        marks = "semicolons" if ";" in line else "commas"
        columns = len(line.split(";" if marks == "semicolons" else ","))
        raise UnreadableLabelsError(Code.SEPARATORS, place, columns, marks)
    if len(words) < 5:
        raise UnreadableLabelsError(Code.COLUMNS, place, len(words))
    try:
        if "_" in line:
            raise ValueError
        return [float(word) for word in words]
    except ValueError:
        raise _no_numbers(words, place) from None


def _no_numbers(words: Sequence[str], place: str) -> UnreadableLabelsError:
    try:
        float(words[0])
    except ValueError:
        return UnreadableLabelsError(Code.NAME_FOR_CLASS, place, words[0][:20])
    return UnreadableLabelsError(Code.NO_NUMBERS, place)


def _box_of_keypoints(shares: Sequence[float], rules: LabelRules, place: str) -> list[float]:
    """The box of a row with as many columns as `kpt_shape` says, or without keypoints. Keypoints are not used, so they
    may be outside the image."""
    assert rules.keypoints
    count, dimensions = rules.keypoints
    expected = 4 + count * dimensions
    lengths = [4, expected]
    if rules.options.with_confidence:
        lengths += [5, expected + 1]
    if len(shares) not in lengths:
        raise UnreadableLabelsError(Code.OTHER_KEYPOINTS, place, 1 + len(shares), count, dimensions, 1 + expected)
    return _inside(shares[:4], place)


def _plain_box(shares: Sequence[float], rules: LabelRules, place: str) -> list[float]:
    """The box of a row of five columns, or of six with a confidence."""
    if len(shares) == 4:
        return _inside(shares, place)
    last = shares[4]
    if rules.options.with_confidence and not _is_box(shares[:4]) and _is_box(shares[1:]):
        raise UnreadableLabelsError(Code.CONFIDENCE_SECOND, place)
    if rules.options.with_confidence and 0 <= last <= 1:
        return _inside(shares[:4], place)
    if rules.options.with_confidence:
        raise UnreadableLabelsError(Code.NO_CONFIDENCE, place, last)
    raise UnreadableLabelsError(Code.SIXTH_COLUMN, place)


def _refuse_other_rows(words: Sequence[str], shares: Sequence[float], place: str) -> None:
    """Refuse rows that have the length of an outline, but whose numbers say something else."""
    if not _is_box(shares):
        return
    groups = [shares[first:first + 4] for first in range(0, len(shares), 5)]  # between them are the classes
    if len(words) % 5 == 0 and all(word.isdecimal() for word in words[::5]) and all(map(_is_box, groups)):
        raise UnreadableLabelsError(Code.BOXES_IN_LINE, place, len(groups))
    extra = shares[4:]
    if len(extra) % 3 == 0 and all(share in (0, 1, 2) for share in extra[2::3]):
        raise UnreadableLabelsError(Code.VISIBLE_KEYPOINTS, place, len(extra) // 3)
    if len(extra) == 2 and 0 <= extra[0] <= 1 and words[-1].isdecimal():
        raise UnreadableLabelsError(Code.TRACK, place, words[-1][:20])
    if len(extra) >= 6 and len(extra) % 2 == 0 and _encloses_exactly(shares):
        raise UnreadableLabelsError(Code.BOX_AND_POINTS, place, len(extra) // 2)


def _is_box(shares: Sequence[float]) -> bool:
    """Whether the first four numbers are centre and size of a box in the image."""
    x, y, width, height = shares[:4]
    lowest = min(x - width / 2, y - height / 2)
    highest = max(x + width / 2, y + height / 2)
    return width > 0 and height > 0 and lowest >= -_BOX_SLACK and highest <= 1 + _BOX_SLACK


def _encloses_exactly(shares: Sequence[float]) -> bool:
    """Whether the first four numbers are the box of the points after them."""
    x, y, width, height = shares[:4]
    across, down = shares[4::2], shares[5::2]
    sides = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    around = (min(across), min(down), max(across), max(down))
    return all(abs(one - other) <= _SAME for one, other in zip(around, sides, strict=True))


def _outline(shares: list[float], rules: LabelRules, place: str) -> list[float]:
    """The points of a row of seven or more columns."""
    if len(shares) % 2 == 0:
        return shares
    if rules.options.with_confidence and 0 <= shares[-1] <= 1:
        return shares[:-1]
    raise UnreadableLabelsError(Code.COLUMNS, place, 1 + len(shares))


def _inside(shares: Sequence[float], place: str) -> list[float]:
    """Shares, clipped to 0..1 where they are outside by rounding."""
    if not all(-_SLACK <= share <= 1 + _SLACK for share in shares):  # false for NaN too
        raise UnreadableLabelsError(Code.OUTSIDE, place)
    return [_share(share) for share in shares]


def _class(word: str, kind: float, rules: LabelRules, place: str) -> int:
    num_classes = len(rules.names)
    if not kind.is_integer():
        raise UnreadableLabelsError(Code.CLASS_NOT_WHOLE, place, word[:20])
    if not 0 <= kind < num_classes:
        raise UnreadableLabelsError(Code.CLASS_UNKNOWN, place, int(kind), word[:20], num_classes, num_classes - 1)
    return int(kind)


def _box_row(kind: int, shares: Sequence[float], size: tuple[int, int], place: str) -> LabelRow:
    x, y, width, height = shares  # plain floats: arrays would take half of the time
    left, above = x - width / 2, y - height / 2
    right, below = x + width / 2, y + height / 2
    rows, columns = size
    unclipped = (left * columns, above * rows, right * columns, below * rows)
    box = (_share(left) * columns, _share(above) * rows, _share(right) * columns, _share(below) * rows)
    remarks = edge_remarks(unclipped, size)
    if width > x and height > y:
        remarks += (Code.CORNER_ORDER,)
    if x + width > 1 + _BOX_SLACK or y + height > 1 + _BOX_SLACK:  # x, y cannot be the upper left corner
        remarks += (Code.ONE_READING,)
    return LabelRow(place, (kind, *shares), kind, box, remarks=remarks)


def _outline_row(kind: int, shares: Sequence[float], size: tuple[int, int], place: str) -> LabelRow:
    outline = np.array(shares).reshape(-1, 2) * (size[1], size[0])
    remarks = [Code.OUTLINE]
    if _may_have_keypoints(shares):
        remarks.append(Code.MAY_BE_KEYPOINTS)
    if len(shares) == 6 and _is_box(shares):  # a triangle, or a box and two numbers
        remarks.append(Code.MAY_BE_MORE)
    return LabelRow(place, (kind, *shares), kind, box_around(outline), outline, remarks=tuple(remarks))


def _may_have_keypoints(shares: Sequence[float]) -> bool:
    """Whether an outline's numbers could as well be a box and keypoints in it."""
    if not _is_box(shares) or _is_parallelogram(shares):
        return False
    has_triples = (len(shares) - 4) % 3 == 0
    return _surrounds(shares, 2) or (has_triples and _surrounds(shares, 3))


def _is_parallelogram(shares: Sequence[float]) -> bool:
    """Whether four points are those of a rotated box, whose diagonals have the same centre."""
    if len(shares) != 8:
        return False
    x1, y1, x2, y2, x3, y3, x4, y4 = shares
    return abs(x1 + x3 - x2 - x4) <= 2 * _SAME and abs(y1 + y3 - y2 - y4) <= 2 * _SAME


def _surrounds(shares: Sequence[float], dimensions: int) -> bool:
    """Whether the first four numbers are a box around the keypoints after them. One that is not labelled is (0, 0).

    dimensions: 2, or 3 for keypoints with a confidence.
    """
    x, y, width, height = shares[:4]
    for across, down in zip(shares[4::dimensions], shares[5::dimensions], strict=True):
        is_labelled = across != 0 or down != 0
        # 0.6: half the side, and some slack
        if is_labelled and (abs(across - x) > 0.6 * width or abs(down - y) > 0.6 * height):
            return False
    return True


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)
