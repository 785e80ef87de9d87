"""COCO annotation files (`instances_*.json`, Roboflow's `_annotations.coco.json`). Equal boxes give the same labels as
in YOLO text files.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from copy import copy
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np

from ray_yolo.core.errors import DatasetError
from ray_yolo.core.structures import Finding
from ray_yolo.data.exports import ADVICE, tool_of
from ray_yolo.data.labels import (
    NO_OUTLINE,
    Box,
    ImageLabels,
    LabelRow,
    UnreadableLabelsError,
    cut_box,
    labels_of,
    read_rows,
)
from ray_yolo.data.other_files import resolve_names


class CocoFile:
    """One annotation file: the paths of its images, and the labels of each.

    Categories map to the description's classes by name, else in the order of their ids. A category without annotations
    (Roboflow's supercategory) may be unknown. Images are in `folder`, by default in one of the usual ones;
    `findings` has the annotations of unknown images, which are left out. `respelled` has the path of each
    image whose `file_name` is spelled otherwise.

    Raises:
        DatasetError: if the file is not a COCO annotation file, or its categories do not match the description.
    """

    def __init__(self, file: Path, root: Path, names: tuple[str, ...], folder: Path | None = None) -> None:
        self.file = file
        content = _read(file)
        self._classes = _match(content, names, file)
        file_names = [_file_name(image, file) for image in content["images"]]
        folder = folder or _image_folder(file, root, file_names)
        self.respelled = resolve_names(str(folder), file_names)
        paths = [self.respelled.get(name, os.path.normpath(folder / name)) for name in file_names]
        self._images = dict(zip(paths, content["images"], strict=True))
        self.paths = list(self._images)  # every listed image, whether or not it exists on disk
        path_of: dict[object, str] = {}
        for path, image in zip(paths, content["images"], strict=True):
            if path_of.setdefault(_field(image, "id", file), path) != path:
                raise DatasetError(f"{file}: {path_of[image['id']]} and {path} have the same id {short(image['id'])}; "
                                   "give each image its own id")
        self._rows: dict[str, list[dict[str, Any]]] = {path: [] for path in paths}
        self.findings: list[Finding] = []
        for row in content["annotations"]:
            number = row.get("image_id")
            if isinstance(number, (int, float, str)) and number in path_of:
                self._rows[path_of[number]].append(row)
            else:
                what = f"has the image_id {short(number)}, which no image of the file has; the row is left out"
                self.findings.append(Finding(self._place(row), what, dropped=True))

    def part(self, paths: list[str]) -> CocoFile:
        """The same file with a subset of its images."""
        chosen = copy(self)
        chosen.paths, chosen.findings = paths, []
        chosen._images = {path: self._images[path] for path in paths}
        chosen._rows = {path: self._rows[path] for path in paths}
        return chosen

    def own_ids(self, path: str) -> tuple[int | str, dict[int, object]]:
        """The file's own ids of one of `paths` and of each class."""
        return self._images[path]["id"], {kind: number for number, kind in reversed(self._classes.items())}

    def read(self, path: str, size: tuple[int, int]) -> ImageLabels:
        """The labels of one of `paths`, an image of upright `size`. Crowds are not training labels.

        Raises:
            UnreadableLabelsError: if the size differs from the one in the file.
        """
        image = self._images[path]
        listed = (image.get("height", size[0]), image.get("width", size[1]))
        if listed != size:
            raise UnreadableLabelsError(path, f"is {size[1]} x {size[0]} pixels, but {self.file.name} says "
                                              f"{short(listed[1])} x {short(listed[0])}")
        (rows, findings), (crowds, more) = (
            read_rows([row for row in self._rows[path] if bool(row.get("iscrowd")) == is_crowd],
                      lambda row: self._row(row, size)) for is_crowd in (False, True))
        return ImageLabels(labels_of(rows), [*findings, *more], np.array([row.area for row in rows]),
                           np.array([(row.kind, *row.box, row.area) for row in crowds]).reshape(-1, 6))

    def _row(self, row: dict[str, Any], size: tuple[int, int]) -> LabelRow:
        place, category = self._place(row), row.get("category_id")
        if not isinstance(category, (int, float, str)) or category not in self._classes:
            raise UnreadableLabelsError(place, f"has the category_id {short(category)}, which the file's categories do "
                                               "not list")
        kind, box = self._classes[category], _box(row, size, place)
        return LabelRow(place, (kind, *box), kind, box, _outline(row, size), _area(row, box))

    def _place(self, row: dict[str, Any]) -> str:
        return f"{self.file}: annotation {str(row.get('id'))[:80]}"


def _read(file: Path) -> dict[str, Any]:
    if not os.path.isfile(file):  # reading a pipe or a device may block forever
        raise DatasetError(f"{file}: is not a file; expected COCO's annotations")
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise DatasetError(f"{file}: is not a JSON file: {error}; write or download it again") from None
    if tool := tool_of(content):
        raise DatasetError(f"{file}: is a file of {tool}, which is not read; {ADVICE}")
    for key in ("images", "annotations", "categories"):
        rows = content.get(key) if isinstance(content, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise DatasetError(f"{file}: has no list of {key}; expected COCO's images, annotations and categories")
    return content


def _field(row: dict[str, Any], key: str, file: Path) -> Any:
    if not isinstance(row.get(key), (int, str)):
        raise DatasetError(f"{file}: an entry has no {key}: {str(row)[:80]}")
    return row[key]


def _file_name(image: dict[str, Any], file: Path) -> str:
    name = str(_field(image, "file_name", file))
    with suppress(UnicodeEncodeError):  # half a surrogate pair
        if b"\0" not in os.fsencode(name):
            return name
    raise DatasetError(f"{file}: an entry has the file_name {name[:80]!r}, which no file can have")


def _match(content: dict[str, Any], names: tuple[str, ...], file: Path) -> dict[object, int]:
    """The class of each category id, without categories that are neither a class nor used by an annotation."""
    rows: list[dict[str, Any]] = content["categories"]
    if len(rows) > len(names):
        used = [row.get("category_id") for row in content["annotations"]]
        rows = [row for row in rows if str(row.get("name")) in names or row.get("id") in used]
    named = {_field(row, "id", file): str(row.get("name")) for row in rows}
    if set(named.values()) <= set(names):
        return {number: names.index(name) for number, name in named.items()}
    if len(named) == len(names):
        ordered = sorted(named, key=lambda number: (isinstance(number, str), number))
        return {number: kind for kind, number in enumerate(ordered)}
    raise DatasetError(f"{file}: its {len(named)} categories ({', '.join(named.values())[:200]}) do not match "
                       f"the {len(names)} classes of the description; correct `names`")


def _image_folder(file: Path, root: Path, file_names: list[str]) -> Path:
    """The folder of the images: beside the annotations or one of COCO's usual folders."""
    split = file.stem.removeprefix("instances_")
    bases = (file.parent, file.parent.parent, root)
    folders = [folder for base in bases for folder in (base / "images" / split, base / split, base / "images", base)]
    for folder in folders:
        if any(os.path.isfile(folder / name) for name in file_names[:100]):
            return folder
    for folder in folders:
        if resolve_names(str(folder), file_names[:100]):
            return folder
    raise DatasetError(f"{file}: none of its images is in {', '.join(map(str, dict.fromkeys(folders)))}")


def _box(row: dict[str, Any], size: tuple[int, int], place: str) -> Box:
    """xyxy, clipped to the image."""
    bbox = row.get("bbox")
    with suppress(TypeError, ValueError, OverflowError):
        if isinstance(bbox, list):
            x, y, width, height = map(float, bbox)
            return cut_box((x, y, x + width, y + height), size)
    raise UnreadableLabelsError(place, f"has no usable bbox: {str(bbox)[:80]}")


def _outline(row: dict[str, Any], size: tuple[int, int]) -> np.ndarray:
    """The outline of an object in one part; empty for several parts, run lengths, or none."""
    parts = row.get("segmentation")
    if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], list) and len(parts[0]) >= 6:
        with suppress(TypeError, ValueError, OverflowError):
            outline = np.array(parts[0], np.float64).reshape(-1, 2)
            if np.isfinite(outline).all():
                return outline.clip(0, (size[1], size[0])).astype(np.float32)
    return NO_OUTLINE


def _area(row: dict[str, Any], box: Box) -> float:
    """The object's area in the file, else that of its box."""
    with suppress(TypeError, ValueError, OverflowError):
        area = float(row.get("area", math.nan))
        if math.isfinite(area) and area >= 0:
            return area
    return (box[2] - box[0]) * (box[3] - box[1])
