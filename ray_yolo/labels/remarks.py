"""Remarks about single labels that mean something only as a count over a split, and the findings that follow.

One box at the edge of its image is normal; a split whose boxes all cross the edge was written in other coordinates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from ray_yolo.core.structures import Finding
from ray_yolo.labels.rules import Code, Remark

Format = Literal["YOLO", "VOC", "COCO"]
Counts = Mapping[tuple[Code, str], Remark]  # Remarks by their code and detail.
SPECK_PX = 1.0  # a box with a shorter side is a speck
MANY_TRIANGLES = 10  # fewer could be boxes by chance
FEW_CLIPPED, FEW_CLIPPED_SHARE = 2, 0.05  # clipped boxes of a split that are explained by a careless hand
CLIPPED_PX = 1.0  # a box that reaches this far out of its image was clipped; less is rounding


def combine(remarks: Iterable[Remark]) -> tuple[Remark, ...]:
    """One remark of each code and detail, with the sum of the counts and the first place."""
    counts: Counter[tuple[Code, str]] = Counter()
    places: dict[tuple[Code, str], str] = {}
    for code, place, detail, times in remarks:
        counts[code, detail] += times
        places.setdefault((code, detail), place)
    return tuple(Remark(code, place, detail, counts[code, detail]) for (code, detail), place in places.items())


def count_of(remarks: Iterable[Remark], code: Code) -> int:
    """How often a code holds, in all formats."""
    return sum(remark.times for remark in remarks if remark.code is code)


def judge(remarks: Sequence[Remark]) -> list[Finding]:
    """The findings that follow from the remarks about a split. None of them leaves anything out."""
    counts = {(remark.code, remark.detail): remark for remark in remarks}
    formats: tuple[Format, ...] = ("YOLO", "VOC", "COCO")
    findings: list[Finding] = []
    for name in formats:
        findings += _coordinates(counts, name)
    for code in Code:
        remark = counts.get((code, ""))
        if code.then == "count" and remark:
            findings.append(Finding(remark.place, code.text.format(n=remark.times), dropped=False, code=code.name,
                                    values=(remark.times,)))
    findings += _long_rows(counts)
    return findings


def _coordinates(counts: Counts, name: Format) -> Iterator[Finding]:
    """Findings about boxes whose numbers have another meaning than the format gives them."""
    boxes = _count(counts, Code.BOX, name)
    specks = counts.get((Code.SPECK, name))
    clipped = counts.get((Code.CLIPPED, name))
    corners = counts.get((Code.CORNERS, name))
    all_fit_by_other_point = (Code.ONE_READING, name) not in counts
    all_fit_as_corners = _count(counts, Code.CORNER_ORDER, name) == boxes

    def most(remark: Remark) -> bool:
        return remark.times * 2 > boxes

    if specks and most(specks):
        yield _first(specks, f"{boxes} boxes with a side under one pixel; {_SPECK_CAUSES[name]}")
    if corners and most(corners):
        yield _first(corners, f"{boxes} boxes whose area or outline fits only if their numbers are corners; "
                              f"{_CORNERS[name]}")
    elif clipped and all_fit_as_corners and name in _CORNERS:  # one clipped box is enough if all fit
        yield _first(clipped, f"{boxes} boxes that were clipped at the edge of their image, and all boxes would fit as "
                              f"corners; {_CORNERS[name]}")
    elif clipped and all_fit_by_other_point and name in _OTHER_POINT and (
            clipped.times > max(FEW_CLIPPED, FEW_CLIPPED_SHARE * boxes)):
        yield _first(clipped, f"{boxes} boxes that were clipped at the edge of their image, and all boxes would fit if "
                              f"{_OTHER_POINT[name]}")
    elif clipped and most(clipped):
        yield _first(clipped, f"{boxes} boxes that were clipped at the edge of their image; {_CLIPPED_CAUSES[name]}")


def _first(remark: Remark, of: str) -> Finding:
    return Finding(remark.place, f"is the first of {remark.times} of {of}", dropped=False)


_SPECK_CAUSES: dict[Format, str] = {
    "YOLO": "their fractions may have been divided by the image's size twice",
    "VOC": "they may be fractions of the image (0 to 1), but VOC has pixels; multiply them by the image's size",
    "COCO": "they may be fractions of the image (0 to 1), but COCO has pixels; multiply them by the image's size"}
_CLIPPED_CAUSES: dict[Format, str] = {
    "YOLO": "a row is `class x y width height` with the box's centre, not its corner",
    "VOC": "the picture may have been resized or turned after it was labelled",
    "COCO": "the picture may have been resized after it was labelled, or bbox is not [x, y, width, height]"}
_OTHER_POINT: dict[Format, str] = {
    "YOLO": "x and y were the upper left corner; a row is `class x y width height` with the box's centre",
    "COCO": "x and y were the centre; COCO's bbox is [x, y, width, height] with the upper left corner"}
_CORNERS: dict[Format, str] = {
    "YOLO": "they may be `class x1 y1 x2 y2`, but a row is `class x y width height` with the box's centre",
    "COCO": "they may be [x1, y1, x2, y2], but COCO's bbox is [x, y, width, height]"}


def _long_rows(counts: Counts) -> Iterator[Finding]:
    """A finding about rows that may be a box and more numbers, such as keypoints. Outlines differ in their number of
    points, keypoints do not: most rows have the same length then."""
    lengths = [remark for (code, _), remark in counts.items() if code is Code.OUTLINE]
    if not lengths:
        return
    rows = max(lengths, key=lambda remark: remark.times)
    if rows.times * 2 <= sum(remark.times for remark in lengths):
        return
    columns = int(rows.detail)
    keypoints = counts.get((Code.MAY_BE_KEYPOINTS, str(columns)))
    triangles = counts.get((Code.MAY_BE_MORE, str(columns)))
    if keypoints and keypoints.times * 2 >= rows.times:
        yield _may_be_keypoints(keypoints, columns)
    elif triangles and triangles.times == rows.times >= MANY_TRIANGLES:
        yield Finding(triangles.place, _MAY_BE_MORE.format(rows.times), dropped=False)


def _may_be_keypoints(rows: Remark, columns: int) -> Finding:
    num_points = (columns - 1) // 2  # without the class
    numbers = columns - 5  # the numbers of the keypoints, without class and box
    shapes = [f"`kpt_shape: [{numbers // size}, {size}]`" for size in (2, 3) if numbers % size == 0]
    what = (f"is the first of {rows.times} rows of {columns} columns that may be outlines, or boxes with keypoints; "
            f"they are read as outlines of {num_points} points ({' or '.join(shapes)} in the YAML file reads them as "
            "boxes)")
    return Finding(rows.place, what, dropped=False)


_MAY_BE_MORE = ("is the first of {} rows of 7 columns that may be outlines of 3 points, or boxes and two more numbers, "
                "such as an angle and a score; they are read as outlines (for boxes, remove the last two columns)")


def _count(counts: Counts, code: Code, detail: str) -> int:
    remark = counts.get((code, detail))
    return remark.times if remark else 0
