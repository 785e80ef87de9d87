"""COCO annotation files (`instances_*.json`): the same labels as YOLO text files for the same boxes."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ray_yolo.data.labels import NO_LABELS, Labels, is_empty
from ray_yolo.data.yolo_txt import UnreadableLabelsError
from ray_yolo.errors import DatasetError
from ray_yolo.structures import Finding


class CocoFile:
    """One annotation file: its images' paths, and the labels of each.

    Categories belong to the description's classes by name, else in the order of their ids.

    Raises:
        DatasetError: if the file is no COCO annotation file or its categories are not the described classes.
    """

    def __init__(self, file: Path, root: Path, names: tuple[str, ...]) -> None:
        self.file = file
        content = _read(file)
        self._classes = _match(content["categories"], names, file)
        images = {_field(image, "id", file): image for image in content["images"]}
        file_names = [_file_name(image, file) for image in images.values()]
        folder = _image_folder(file, root, file_names)
        self._images = {os.path.normpath(folder / name): image
                        for name, image in zip(file_names, images.values(), strict=True)}
        self._rows: dict[object, list[dict[str, Any]]] = defaultdict(list)
        for row in content["annotations"]:
            if not row.get("iscrowd"):  # a crowd is no single object to learn
                self._rows[_field(row, "image_id", file)].append(row)

    @property
    def paths(self) -> list[str]:
        """Every image that the file names, whether or not it is on disk."""
        return list(self._images)

    def read(self, path: str, size: tuple[int, int]) -> tuple[Labels, list[Finding]]:
        """The labels of one of `paths`, whose picture has the upright `size`.

        Raises:
            UnreadableLabelsError: for a row without plain meaning, or a picture of another size than the file says.
            DatasetError: for a category that the file does not list.
        """
        image = self._images[path]
        said = (image.get("height", size[0]), image.get("width", size[1]))
        if said != size:
            raise UnreadableLabelsError(path, f"is {size[1]} x {size[0]} pixels, but {self.file.name} says "
                                              f"{said[1]} x {said[0]}")
        kept: dict[tuple[float, ...], np.ndarray] = {}
        findings = []
        for row in self._rows[image["id"]]:
            place = f"{self.file}: annotation {str(row.get('id'))[:80]}"
            kind, box = self._class(row, place), _box(row, size, place)
            if is_empty(box):
                findings.append(Finding(place, "the box is empty; it is left out", dropped=True))
            elif (kind, *box) in kept:
                findings.append(Finding(place, "repeats an earlier box; counted once", dropped=False))
            else:
                kept[(kind, *box)] = _outline(row, size)
        return _labels(kept), findings

    def _class(self, row: dict[str, Any], place: str) -> int:
        category = row.get("category_id")
        if not isinstance(category, (int, str)) or category not in self._classes:
            raise DatasetError(f"{place}: category {category}, which the file's categories do not list")
        return self._classes[category]


def _read(file: Path) -> dict[str, Any]:
    if not os.path.isfile(file):  # reading a pipe or a device may never end
        raise DatasetError(f"{file}: is not a file; expected COCO's annotations")
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise DatasetError(f"{file}: is not a JSON file: {error}") from None
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


def _match(categories: list[dict[str, Any]], names: tuple[str, ...], file: Path) -> dict[object, int]:
    """Class of each category id."""
    named = {_field(row, "id", file): str(row.get("name")) for row in categories}
    if set(named.values()) <= set(names):
        return {number: names.index(name) for number, name in named.items()}
    if len(named) == len(names):
        ordered = sorted(named, key=lambda number: (isinstance(number, str), number))
        return {number: place for place, number in enumerate(ordered)}
    raise DatasetError(f"{file}: its {len(named)} categories ({', '.join(named.values())[:200]}) are not the "
                       f"{len(names)} classes of the description; make `names` agree")


def _image_folder(file: Path, root: Path, file_names: list[str]) -> Path:
    """Where the images are: beside the annotations or in COCO's usual folders."""
    split = file.stem.removeprefix("instances_")
    bases = (file.parent, file.parent.parent, root)
    folders = [folder for base in bases for folder in (base / "images" / split, base / split, base / "images", base)]
    for folder in folders:
        if any(os.path.isfile(folder / name) for name in file_names[:100]):
            return folder
    raise DatasetError(f"{file}: none of its images is in {', '.join(map(str, dict.fromkeys(folders)))}")


def _box(row: dict[str, Any], size: tuple[int, int], place: str) -> tuple[float, float, float, float]:
    """xyxy, cut at the picture's edges."""
    try:
        if not isinstance(row["bbox"], list):
            raise TypeError
        x, y, width, height = map(float, row["bbox"])
        if not np.isfinite([x, y, width, height]).all() or width < 0 or height < 0:
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UnreadableLabelsError(place, f"has no usable bbox: {str(row.get('bbox'))[:80]}") from None
    return (min(max(x, 0.0), size[1]), min(max(y, 0.0), size[0]),
            min(max(x + width, 0.0), size[1]), min(max(y + height, 0.0), size[0]))


def _outline(row: dict[str, Any], size: tuple[int, int]) -> np.ndarray:
    """The outline of an object in one piece; empty for several pieces, run lengths, or none."""
    parts = row.get("segmentation")
    if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], list) and len(parts[0]) >= 6:
        with suppress(TypeError, ValueError, OverflowError):
            outline = np.array(parts[0], np.float64).reshape(-1, 2)
            if np.isfinite(outline).all():
                return outline.clip(0, (size[1], size[0])).astype(np.float32)
    return np.zeros((0, 2), np.float32)


def _labels(rows: dict[tuple[float, ...], np.ndarray]) -> Labels:
    if not rows:
        return NO_LABELS
    outlines = tuple(rows.values())
    return Labels(np.array([row[0] for row in rows]).astype(np.int64), np.array([row[1:] for row in rows], np.float32),
                  outlines if any(len(outline) for outline in outlines) else ())
