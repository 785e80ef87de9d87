"""Pascal VOC annotation files: the same labels as YOLO text files for the same boxes."""

from __future__ import annotations

from pathlib import Path
from xml.parsers import expat

import numpy as np

from ray_yolo.data.labels import NO_LABELS, Labels, is_empty
from ray_yolo.data.yolo_txt import UnreadableLabelsError
from ray_yolo.errors import DatasetError
from ray_yolo.structures import Finding

_SIDES = ("xmin", "ymin", "xmax", "ymax")
_MAX_DEPTH = 32  # an annotation has 4 levels


def annotation_path(image_path: str) -> Path | None:
    """The XML file of an image: beside it, or in `Annotations` next to its `JPEGImages`; None if there is none."""
    head, found, tail = image_path.rpartition("/JPEGImages/")
    places = [Path(image_path).with_suffix(".xml")]
    if found:
        places.append(Path(f"{head}/Annotations/{tail}").with_suffix(".xml"))
    return next((place for place in places if place.is_file()), None)


def parse_voc(content: bytes, size: tuple[int, int], names: tuple[str, ...],
              where: str) -> tuple[Labels, list[Finding]]:
    """The labels in a VOC file's bytes and what there was to say about them.

    VOC counts pixels from 1 and includes the last one, so a box spans xmin - 1 .. xmax.

    Raises:
        UnreadableLabelsError: for a file or an object without plain meaning.
        DatasetError: for an object whose name the data set does not list.
    """
    kept: dict[tuple[float, ...], None] = {}
    findings = []
    for number, item in enumerate(_objects(content, where), 1):
        place = f"{where}: object {number}"
        name = item.get("name", "")
        if name not in names:
            raise DatasetError(f"{place}: class {name!r}, which the data set does not name; correct it or add the name")
        row = (names.index(name), *_box(item, size, place))
        if is_empty(row[1:]):
            findings.append(Finding(place, "the box is empty; it is left out", dropped=True))
        elif row in kept:
            findings.append(Finding(place, "repeats an earlier box; counted once", dropped=False))
        else:
            kept[row] = None
    if not kept:
        return NO_LABELS, findings
    rows = np.array(list(kept))
    return Labels(rows[:, 0].astype(np.int64), rows[:, 1:].astype(np.float32)), findings


def _box(item: dict[str, str], size: tuple[int, int], place: str) -> tuple[float, float, float, float]:
    try:
        left, above, right, below = (float(item[side]) for side in _SIDES)
        if not np.isfinite([left, above, right, below]).all() or right < left or below < above:
            raise ValueError
    except (KeyError, ValueError):
        raise UnreadableLabelsError(place, "has no usable bndbox with xmin, ymin, xmax and ymax") from None
    height, width = size
    return (min(max(left - 1, 0.0), width), min(max(above - 1, 0.0), height),
            min(max(right, 0.0), width), min(max(below, 0.0), height))


def _objects(content: bytes, where: str) -> list[dict[str, str]]:
    """Name and box sides of every object. Entities are refused, so a file cannot grow or reach out while parsed."""
    objects: list[dict[str, str]] = []
    path: list[str] = []
    parser = expat.ParserCreate()
    parser.buffer_text = True  # or `cats &amp; dogs` comes in three pieces

    def start(tag: str, _: dict[str, str]) -> None:
        path.append(tag)
        if len(path) > _MAX_DEPTH:
            raise UnreadableLabelsError(f"{where}:{parser.CurrentLineNumber}", f"is nested deeper than {_MAX_DEPTH}")
        if path[1:] == ["object"]:
            objects.append({})

    def end(_: str) -> None:
        path.pop()

    def text(data: str) -> None:
        if path[1:] == ["object", "name"] or (path[1:3] == ["object", "bndbox"] and path[-1] in _SIDES):
            objects[-1][path[-1]] = objects[-1].get(path[-1], "") + data.strip()

    def refuse(*_: object) -> None:
        raise UnreadableLabelsError(where, "declares a document type or entities, which no annotation needs")

    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, text
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, LookupError, ValueError) as error:  # the last two for encodings that expat cannot read
        raise UnreadableLabelsError(f"{where}:{parser.CurrentLineNumber}", f"is not XML that can be read: {error}"
                                    ) from None
    return objects
