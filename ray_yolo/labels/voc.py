"""Pascal VOC annotation files: the same labels as YOLO text files for the same boxes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from reprlib import repr as short
from xml.parsers import expat

from ray_yolo.core.files import is_folder, is_present
from ray_yolo.labels.remarks import combine
from ray_yolo.labels.rows import (
    Box,
    ImageLabels,
    LabelRow,
    LabelRules,
    UnreadableLabelsError,
    cut_box,
    edge_remarks,
    labels_of,
    read_rows,
)
from ray_yolo.labels.rules import Code, Remark
from ray_yolo.labels.values import find_class, folded, number, size_conflict, truth

_SIDES = ("xmin", "ymin", "xmax", "ymax")
USUAL = ("annotations", "annots", "Annotations", "annotations/xmls")
_MARKS = (["ignore"], ["deleted"], ["angle"], ["bndbox", "angle"])  # tags in an object
_ATTRIBUTE = ["attributes", "attribute"]
_MAX_DEPTH = 32  # an annotation has 4 levels


def annotation_paths(image_path: str) -> list[Path]:
    """All XML files with the name of an image in its `folders`, each once; the first one is read. A link to a missing
    file is one of them."""
    stem = os.path.splitext(os.path.basename(image_path))[0]
    paths: list[Path] = []
    for folder in folders(image_path):
        file = f"{folder}/{stem}.xml"
        if not is_present(file):  # Most images have none: one look at the disk.
            continue
        path = Path(file)
        if not path.exists():  # a broken link
            paths.append(path)
            continue
        is_known = any(other.exists() and other.samefile(path) for other in paths)  # a disk may ignore case
        if path.is_file() and not is_known:
            paths.append(path)
    return paths


def folders(image_path: str, exists: Callable[[str], bool] = is_folder) -> list[str]:
    """The folders of an image's XML file: its own, `Annotations` next to its `JPEGImages`, or the existing usual ones
    next to `images`."""
    folder = os.path.dirname(image_path)
    head, found, tail = f"{folder}/".rpartition("/JPEGImages/")
    if found:
        return [folder, os.path.normpath(f"{head}/Annotations/{tail}")]
    head, found, tail = f"{folder}/".rpartition("/images/")
    usual = [os.path.normpath(f"{head}/{name}/{tail}") for name in USUAL] if found else []
    return [folder, *filter(exists, usual)]


@dataclass
class _Object:
    """The texts of one object's tags, and those that it has twice."""

    place: str
    texts: dict[str, str] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)
    marks: dict[str, str] = field(default_factory=dict)  # texts of tags that are not read, only reported
    attributes: list[dict[str, str]] = field(default_factory=list)  # each with name and value, as CVAT writes them

    def open(self, tag: str) -> None:
        if tag in self.texts:
            self.repeated.add(tag)
        self.texts[tag] = ""


@dataclass
class _Annotation:
    """The content of a file."""

    objects: list[_Object] = field(default_factory=list)
    header: dict[str, str] = field(default_factory=dict)  # the texts of width, height and filename
    size_line: int = 1


def parse_voc(content: bytes, size: tuple[int, int], rules: LabelRules, where: str) -> ImageLabels:
    """The labels in a VOC file's bytes, and the findings about its objects.

    VOC counts pixels from 1 and includes the last one, so a box spans xmin - 1 .. xmax. Objects marked difficult are
    left out unless the rules keep them.

    Raises:
        UnreadableLabelsError: for a file that is not an XML annotation, or describes an image of another size.
    """
    annotation = _parse(content, where)
    stated = size_conflict(size, annotation.header.get("width"), annotation.header.get("height"))
    if stated:
        raise UnreadableLabelsError(Code.VOC_OTHER_SIZE, f"{where}:{annotation.size_line}", stated, size[1], size[0])
    kept: list[_Object] = []
    remarks: list[Remark] = []
    for item in annotation.objects:
        if truth(item.marks.get("deleted")):  # LabelMe keeps the objects that its user has deleted
            remarks.append(Remark(Code.VOC_DELETED, item.place))
        elif truth(item.texts.get("difficult")) and not rules.options.keep_difficult:
            remarks.append(Remark(Code.DIFFICULT, item.place))
        else:
            kept.append(item)
            remarks += [Remark(code, item.place) for code in _unused_marks(item)]
    if _names_other_file(annotation.header.get("filename", ""), where):
        remarks.append(Remark(Code.OTHER_FILE_NAME, where))
    rows, findings = read_rows(kept, lambda item: _row(item, size, rules))
    labels = labels_of(rows, findings, "VOC")
    return labels._replace(remarks=combine([*labels.remarks, *remarks]))


def _unused_marks(item: _Object) -> Iterator[Code]:
    """Remarks about what an object says and nothing here reads: that it is to be ignored, and a turned box."""
    if truth(item.marks.get("ignore")):
        yield Code.VOC_IGNORED
    turns = [number(item.marks.get("angle"))]
    for attribute in item.attributes:
        if attribute.get("name", "").strip() == "rotation":
            turns.append(number(attribute.get("value")))
    if any(turn is not None and turn % 360 for turn in turns):
        yield Code.VOC_ROTATION


def _row(item: _Object, size: tuple[int, int], rules: LabelRules) -> LabelRow:
    place = item.place
    if item.repeated:
        raise UnreadableLabelsError(Code.VOC_REPEATED_TAG, place, min(item.repeated))
    difficult = item.texts.get("difficult", "")
    is_stated = difficult.strip().lower() != "unspecified"  # some files say so, as of poses
    if is_stated and truth(difficult) is None:
        raise UnreadableLabelsError(Code.VOC_DIFFICULT_UNCLEAR, place, short(difficult))
    sides = [number(item.texts.get(side)) for side in _SIDES]
    left, above, right, below = sides
    if left is None or above is None or right is None or below is None:
        raise UnreadableLabelsError(Code.VOC_NO_BOX, place)
    if right < left or below < above:
        shown = ", ".join(f"{name} {side:g}" for name, side in zip(_SIDES, sides, strict=True))
        raise UnreadableLabelsError(Code.VOC_EXCHANGED_SIDES, place, shown)
    unclipped: Box = (left - 1, above - 1, right, below)  # pixel xmax is included: up to its far edge
    box = cut_box(unclipped, size)
    name = item.texts.get("name", "").strip()
    kind = find_class(name, rules.names)
    if kind is None:
        raise UnreadableLabelsError(Code.VOC_CLASS_UNKNOWN, place, short(name))
    remarks = edge_remarks(unclipped, size)
    if 0 <= min(left, above) < 1:
        remarks += (Code.COUNTED_FROM_0,)
    return LabelRow(place, (kind, *box), kind, box, remarks=remarks)


def _names_other_file(name: str, where: str) -> bool:
    """Whether <filename> names another image than the one of this file. It may lack the suffix or have folders."""
    file_name = PureWindowsPath(name.strip()).name  # parts folders at both kinds of slashes
    stem = folded(Path(where).stem)
    return bool(file_name) and stem not in (folded(file_name), folded(Path(file_name).stem))


def _parse(content: bytes, where: str) -> _Annotation:
    """The content of a file. Entities are refused, so parsing cannot expand or load others."""
    parser = expat.ParserCreate()
    parser.buffer_text = True  # otherwise `cats &amp; dogs` arrives in three pieces
    reader = _AnnotationReader(parser, where)

    def refuse(*_: object) -> None:
        raise UnreadableLabelsError(Code.XML_ENTITIES, where)

    parser.StartElementHandler = reader.start
    parser.CharacterDataHandler = reader.text
    parser.EndElementHandler = reader.end
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, LookupError, ValueError) as error:  # the last two: unsupported encodings
        raise UnreadableLabelsError(Code.NO_XML, f"{where}:{parser.CurrentLineNumber}", str(error)) from None
    return reader.annotation


class _AnnotationReader:
    """Collects the content of an annotation, tag by tag."""

    def __init__(self, parser: expat.XMLParserType, where: str) -> None:
        self.annotation = _Annotation()
        self._parser, self._where = parser, where
        self._path: list[str] = []  # the names of the tags that are open

    def start(self, name: str, _: dict[str, str]) -> None:
        """A tag begins."""
        tag = name.lower()
        self._path.append(tag)
        path, objects = self._path, self.annotation.objects
        line = f"{self._where}:{self._parser.CurrentLineNumber}"
        if len(path) > _MAX_DEPTH:
            raise UnreadableLabelsError(Code.XML_TOO_DEEP, line, _MAX_DEPTH)
        if path == [tag] and tag != "annotation":
            raise UnreadableLabelsError(Code.OTHER_XML, line, short(name)[1:-1])
        if tag == "bndbox" and path[1:2] != ["object"]:
            raise UnreadableLabelsError(Code.STRAY_BNDBOX, line)
        if path[1:] == ["object"]:
            objects.append(_Object(f"{self._where}: object {len(objects) + 1}"))
        elif path[1:] == ["size"]:
            self.annotation.size_line = self._parser.CurrentLineNumber
        elif path[1:] == ["object", *_ATTRIBUTE]:
            objects[-1].attributes.append({})
        elif self._is_of_object():
            objects[-1].open(tag)

    def text(self, data: str) -> None:
        """A part of the text of the open tag."""
        texts = self._texts()
        if texts is not None:
            tag = self._path[-1]
            texts[tag] = texts.get(tag, "") + data

    def end(self, _: str) -> None:
        """The open tag ends."""
        self._path.pop()

    def _texts(self) -> dict[str, str] | None:
        """The texts to which that of the open tag belongs; None if it is not read."""
        path = self._path
        if path[1:] in (["filename"], ["size", "width"], ["size", "height"]):
            return self.annotation.header
        if path[1:2] != ["object"]:
            return None
        item = self.annotation.objects[-1]
        if self._is_of_object():
            return item.texts
        if path[2:] in _MARKS:
            return item.marks
        if path[2:4] == _ATTRIBUTE and path[4:] in (["name"], ["value"]):
            return item.attributes[-1]
        return None

    def _is_of_object(self) -> bool:
        path = self._path
        if path[1:3] == ["object", "bndbox"]:
            return len(path) == 4 and path[3] in _SIDES
        return path[1:] in (["object", "name"], ["object", "difficult"])
