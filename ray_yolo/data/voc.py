"""Pascal VOC annotation files: the same labels as YOLO text files for the same boxes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from reprlib import repr as short
from xml.parsers import expat

from ray_yolo.core.structures import Finding
from ray_yolo.data.labels import LabelRow, Labels, UnreadableLabelsError, cut_box, labels_of, read_rows

_SIDES = ("xmin", "ymin", "xmax", "ymax")
USUAL = ("annotations", "annots", "Annotations", "annotations/xmls")
_MAX_DEPTH = 32  # an annotation has 4 levels


def annotation_path(image_path: str) -> Path | None:
    """The XML file of an image, the first one in its `folders`; None if there is none."""
    name = f"{Path(image_path).stem}.xml"
    return next((path for folder in folders(image_path) if (path := Path(folder, name)).is_file()), None)


def folders(image_path: str, exists: Callable[[str], bool] = os.path.isdir) -> list[str]:
    """The folders of an image's XML file: its own, `Annotations` next to its `JPEGImages`, or the existing usual ones
    next to `images`."""
    folder = os.path.dirname(image_path)
    head, found, tail = f"{folder}/".rpartition("/JPEGImages/")
    if found:
        return [folder, os.path.normpath(f"{head}/Annotations/{tail}")]
    head, found, tail = f"{folder}/".rpartition("/images/")
    usual = [os.path.normpath(f"{head}/{name}/{tail}") for name in USUAL] if found else []
    return [folder, *filter(exists, usual)]


def parse_voc(content: bytes, size: tuple[int, int], names: Sequence[str], where: str) -> tuple[Labels, list[Finding]]:
    """The labels in a VOC file's bytes, and the findings about its objects.

    VOC counts pixels from 1 and includes the last one, so a box spans xmin - 1 .. xmax.

    Raises:
        UnreadableLabelsError: for a file that is not an XML annotation.
    """
    rows, findings = read_rows(enumerate(_objects(content, where), 1),
                               lambda item: _row(item[1], size, names, f"{where}: object {item[0]}"))
    return labels_of(rows), findings


def _row(item: dict[str, str], size: tuple[int, int], names: Sequence[str], place: str) -> LabelRow:
    try:
        left, above, right, below = (float(item[side]) for side in _SIDES)
        box = cut_box((left - 1, above - 1, right, below), size)
    except (KeyError, ValueError):
        raise UnreadableLabelsError(place, "has no usable bndbox with xmin, ymin, xmax and ymax") from None
    if (name := item.get("name", "")) not in names:
        raise UnreadableLabelsError(place, f"has the class {short(name)}, which the data set does not name; correct it "
                                           "or add the name")
    kind = names.index(name)
    return LabelRow(place, (kind, *box), kind, box)


def _objects(content: bytes, where: str) -> list[dict[str, str]]:
    """Name and box sides of every object. Entities are refused, so parsing cannot expand or load others."""
    objects: list[dict[str, str]] = []
    path: list[str] = []
    parser = expat.ParserCreate()
    parser.buffer_text = True  # otherwise `cats &amp; dogs` arrives in three pieces

    def start(tag: str, _: dict[str, str]) -> None:
        path.append(tag)
        if len(path) > _MAX_DEPTH:
            raise UnreadableLabelsError(f"{where}:{parser.CurrentLineNumber}", f"is nested deeper than {_MAX_DEPTH}")
        if path[1:] == ["object"]:
            objects.append({})

    def text(data: str) -> None:
        if path[1:] == ["object", "name"] or (path[1:3] == ["object", "bndbox"] and path[-1] in _SIDES):
            objects[-1][path[-1]] = objects[-1].get(path[-1], "") + data.strip()

    def refuse(*_: object) -> None:
        raise UnreadableLabelsError(where, "declares a document type or entities, which no annotation needs")

    parser.StartElementHandler, parser.CharacterDataHandler = start, text
    parser.EndElementHandler = lambda _: path.pop()
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, LookupError, ValueError) as error:  # the last two: unsupported encodings
        raise UnreadableLabelsError(f"{where}:{parser.CurrentLineNumber}", f"is not XML that can be read: {error}"
                                    ) from None
    return objects
