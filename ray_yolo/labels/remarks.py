"""Remarks about single labels that mean something only as a count over a split, and the findings that follow.

One box at the edge of its image is normal; a split whose boxes all cross the edge was written in other coordinates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from ray_yolo.core.structures import Finding

Format = Literal["YOLO", "VOC", "COCO"]
SPECK_PX = 1.0  # a box with a shorter side is a speck
MANY_TRIANGLES = 10  # fewer could be boxes by chance
FEW_CLIPPED, FEW_CLIPPED_SHARE = 2, 0.05  # clipped boxes of a split that are explained by a careless hand
CLIPPED_PX = 1.0  # a box that reaches this far out of its image was clipped; less is rounding


class Kind(NamedTuple):
    """What a remark is about."""

    about: Literal["box", "clipped", "speck", "corner order", "corners", "counted from 0", "difficult", "file name",
                   "area", "bad outline", "other outline", "outline", "keypoints", "two files", "crowd", "rotation",
                   "ignored", "one reading", "triangle", "deleted", "near repeat"]
    # one reading: the box fits into its image only as its format reads the first two numbers, centre or corner
    detail: str = ""  # the format, the number of columns, or the kind of file that is read


class Remark(NamedTuple):
    """How often there is a reason for a remark, and the place of the first one."""

    kind: Kind
    place: str
    times: int = 1


def combine(remarks: Iterable[Remark]) -> tuple[Remark, ...]:
    """One remark of each kind, with the sum of the counts and the first place."""
    counts: Counter[Kind] = Counter()
    places: dict[Kind, str] = {}
    for kind, place, times in remarks:
        counts[kind] += times
        places.setdefault(kind, place)
    return tuple(Remark(kind, place, counts[kind]) for kind, place in places.items())


def count_of(remarks: Iterable[Remark], what: str) -> int:
    """The number of reasons of one kind, in all formats."""
    return sum(times for kind, _, times in remarks if kind.about == what)


def conclude(remarks: Sequence[Remark]) -> list[Finding]:
    """The findings that follow from the remarks about a split. None of them leaves anything out."""
    by_kind = {remark.kind: remark for remark in remarks}
    formats: tuple[Format, ...] = ("YOLO", "VOC", "COCO")
    findings: list[Finding] = []
    for name in formats:
        findings += _coordinates(by_kind, name)
    findings += _single(by_kind)
    findings += _long_rows(by_kind)
    return findings


def _coordinates(by_kind: dict[Kind, Remark], name: Format) -> Iterator[Finding]:
    """Findings about boxes whose numbers have another meaning than the format gives them."""
    boxes = _count(by_kind, Kind("box", name))
    specks = by_kind.get(Kind("speck", name))
    clipped = by_kind.get(Kind("clipped", name))
    corners = by_kind.get(Kind("corners", name))
    all_fit_by_other_point = Kind("one reading", name) not in by_kind
    all_fit_as_corners = _count(by_kind, Kind("corner order", name)) == boxes

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


def _single(by_kind: dict[Kind, Remark]) -> Iterator[Finding]:
    """Findings that need no comparison: each says how often, and how the files were read."""
    for kind, text in _SINGLE.items():
        remark = by_kind.get(kind)
        if remark:
            yield Finding(remark.place, text.format(remark.times), False)
    for name in ("YOLO", "VOC", "COCO"):
        remark = by_kind.get(Kind("near repeat", name))
        if remark:
            yield Finding(remark.place, _NEAR_REPEAT.format(remark.times), False)


_NEAR_REPEAT = ("is the first of {} boxes that equal another box of their class and image but for rounding; each is "
                "trained on (remove one if both are one object)")
_SINGLE: dict[Kind, str] = {
    Kind("counted from 0", "VOC"):
        "is the first of {} boxes with xmin or ymin below 1, so its tool counts pixels from 0; VOC counts from 1, and "
        "the boxes are read so, one pixel further left and up",
    Kind("difficult", "VOC"):
        "is the first of {} objects marked difficult; they are left out, as YOLOv5's converter does (--keep-difficult "
        "keeps them)",
    Kind("file name", "VOC"):
        "is the first of {} annotations whose <filename> is another one; they are used for the image with the name of "
        "the XML file",
    Kind("two files", "text"):
        "is the first of {} XML files that are not read, because their image has a .txt file too",
    Kind("two files", "XML"):
        "is the first of {} XML files that are not read, because their image has another one that is",
    Kind("two files", "COCO"):
        "is the first of {} label files that are not read, because a COCO file lists their image",
    Kind("crowd", "COCO"):
        "is the first of {} annotations marked iscrowd; crowds are not trained on (some tools mark single objects so, "
        "as CVAT does with masks: then set iscrowd to 0)",
    Kind("difficult", "COCO"):
        "is the first of {} annotations marked ignore or difficult; they are trained on like others",
    Kind("deleted", "COCO"):
        "is the first of {} annotations marked deleted; they are left out",
    Kind("deleted", "VOC"):
        "is the first of {} objects marked deleted; they are left out",
    Kind("rotation", "COCO"):
        "is the first of {} boxes with a rotation, which is not used: the upright box of its bbox is read",
    Kind("rotation", "VOC"):
        "is the first of {} objects with a rotation, which is not used: the upright box of their bndbox is read",
    Kind("ignored", "VOC"):
        "is the first of {} objects marked ignore; they are trained on like others",
    Kind("area", "COCO"):
        "is the first of {} annotations whose area is larger than their bbox; `val --coco` uses the area",
    Kind("bad outline", "COCO"):
        "is the first of {} annotations with a segmentation that is no outline (three or more pairs of numbers); their "
        "bbox is used alone",
    Kind("other outline", "COCO"):
        "is the first of {} annotations whose segmentation disagrees with their bbox by more than 2 pixels and a tenth "
        "of a side; it is not used, their bbox is"}


def _long_rows(by_kind: dict[Kind, Remark]) -> Iterator[Finding]:
    """A finding about rows that may be a box and more numbers, such as keypoints. Outlines differ in their number of
    points, keypoints do not: most rows have the same length then."""
    lengths = [remark for kind, remark in by_kind.items() if kind.about == "outline"]
    if not lengths:
        return
    rows = max(lengths, key=lambda remark: remark.times)
    if rows.times * 2 <= sum(remark.times for remark in lengths):
        return
    columns = int(rows.kind.detail)
    keypoints = by_kind.get(Kind("keypoints", str(columns)))
    triangles = by_kind.get(Kind("triangle", str(columns)))
    if keypoints and keypoints.times * 2 >= rows.times:
        yield _may_be_keypoints(keypoints, columns)
    elif triangles and triangles.times == rows.times >= MANY_TRIANGLES:
        yield Finding(triangles.place, _MAY_BE_MORE.format(rows.times), dropped=False)


def _may_be_keypoints(rows: Remark, columns: int) -> Finding:
    num_points = (columns - 1) // 2  # without the class
    numbers = columns - 5  # of the keypoints, without class and box
    shapes = [f"`kpt_shape: [{numbers // size}, {size}]`" for size in (2, 3) if numbers % size == 0]
    what = (f"is the first of {rows.times} rows of {columns} columns that may be outlines, or boxes with keypoints; "
            f"they are read as outlines of {num_points} points ({' or '.join(shapes)} in the YAML file reads them as "
            "boxes)")
    return Finding(rows.place, what, dropped=False)


_MAY_BE_MORE = ("is the first of {} rows of 7 columns that may be outlines of 3 points, or boxes and two more numbers, "
                "such as an angle and a score; they are read as outlines (for boxes, remove the last two columns)")


def _count(by_kind: dict[Kind, Remark], kind: Kind) -> int:
    remark = by_kind.get(kind)
    return remark.times if remark else 0
