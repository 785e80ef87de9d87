"""Files of class names that tools write beside label files, compared with the names of the description.

A label file has numbers alone. LabelImg, Label Studio, Darknet and CVAT write what the numbers mean into a file of
their own, so that there are two statements on one thing. Another data.yaml in the data set is a third.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ray_yolo.config.yaml import load_text_yaml
from ray_yolo.core.errors import DatasetError, InputError
from ray_yolo.core.structures import Finding
from ray_yolo.data.values import folded

_TEXTS = ("classes.txt", "obj.names")
_LABEL_STUDIO = "notes.json"
_DESCRIPTIONS = ("data.yaml", "data.yml", "dataset.yaml")
_FOLDERS_ABOVE = 2
_MAX_BYTES = 2**20

Names = Mapping[int, str]  # by number


def compare_class_files(names: Sequence[str], description: str, root: Path, folders: Iterable[str]) -> list[Finding]:
    """The findings about files that give the numbers of classes other names.

    Args:
        names: of the classes, by number, in the description.
        description: its file.
        root: of the data set; files above it belong to others.
        folders: of label files.

    Raises:
        DatasetError: if a file beside the label files has a name of the description at another number.
    """
    findings = []
    own = dict(enumerate(names))
    for file in _files_above(folders, root):
        is_description = os.path.basename(file) in _DESCRIPTIONS
        if is_description and os.path.realpath(file) == os.path.realpath(description):
            continue
        stated = _read_names(file)
        moved = _moved_name(own, stated)
        renamed = _renamed_number(own, stated)
        if moved is not None:
            number, other = moved
            what = f"gives class {own[number]!r} the number {other}, but {description} {number}"
            if not is_description:
                raise DatasetError(f"{file}: {what}, and labels have numbers alone; correct the one that is wrong, or "
                                   "remove this file if it is out of date")
            findings.append(Finding(file, f"{what}; the latter is used", dropped=False))
        elif renamed is not None:
            what = f"names class {renamed} {stated[renamed]!r}, but {description} {own[renamed]!r}; the latter is used"
            findings.append(Finding(file, what, dropped=False))
    return findings


def _files_above(folders: Iterable[str], root: Path) -> list[str]:
    """The files of class names in some folders and those above them, each once."""
    places: dict[Path, None] = {}  # a set that keeps the order: many folders have the same ones above them
    for folder in folders:
        place = Path(folder)
        for _ in range(1 + _FOLDERS_ABOVE):
            places[place] = None
            if place in (root, place.parent):
                break
            place = place.parent
    files = [place / name for place in places for name in (*_TEXTS, _LABEL_STUDIO, *_DESCRIPTIONS)]
    return [str(file) for file in files if file.is_file()]


def _read_names(file: str) -> Names:
    """The names in a file by their numbers; empty if it has none, or is no such file."""
    try:
        if os.path.getsize(file) > _MAX_BYTES:
            return {}
        if os.path.basename(file) in _TEXTS:
            lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
            return {number: line.strip() for number, line in enumerate(lines) if line.strip()}
        if os.path.basename(file) == _LABEL_STUDIO:
            categories = json.loads(Path(file).read_text(encoding="utf-8-sig"))["categories"]
            return {int(category["id"]): str(category["name"]) for category in categories}
        names = load_text_yaml(file).data["names"]  # as the description is read: 007 is no number
        pairs = names.items() if isinstance(names, dict) else enumerate(names)
        return {int(number): str(name) for number, name in pairs}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, InputError):
        return {}


def _moved_name(own: Names, stated: Names) -> tuple[int, int] | None:
    """The two numbers of the first name that has one in each, and not the same; None if there is none."""
    own_numbers = _unique_numbers(own)
    stated_numbers = _unique_numbers(stated)
    for name, number in own_numbers.items():
        other = stated_numbers.get(name, number)
        if other != number:
            return number, other
    return None


def _unique_numbers(names: Names) -> dict[str, int]:
    """The number of each name that has only one."""
    counts = Counter(folded(name) for name in names.values())
    return {folded(name): number for number, name in names.items() if counts[folded(name)] == 1}


def _renamed_number(own: Names, stated: Names) -> int | None:
    """The first number that has different names in both; None if there is none."""
    for number in sorted(own.keys() & stated.keys()):
        if folded(own[number]) != folded(stated[number]):
            return number
    return None
