"""Files of class names that tools write beside label files, compared with the names of the description.

A label file has numbers alone. LabelImg, Label Studio, Darknet, CVAT and Roboflow write what the numbers mean into a
file of their own, so that there are two statements on one thing. Another data.yaml in the data set is a third.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ray_yolo.config.yaml import load_text_yaml
from ray_yolo.core.errors import DatasetError, InputError
from ray_yolo.core.structures import Finding
from ray_yolo.labels import values
from ray_yolo.labels.files import content_of, read_or_refuse
from ray_yolo.labels.rules import Code
from ray_yolo.labels.values import decode_text, folded

_LABEL_STUDIO = "notes.json"
# Tools write these beside their label files, so they say what the numbers in the labels mean.
_OF_TOOLS = frozenset({"classes.txt", "obj.names", "_darknet.labels", "darknet.labels", _LABEL_STUDIO})
_OTHER_TEXTS = frozenset({"class.txt", "_classes.txt", "class_names.txt", "labels.txt", "predefined_classes.txt",
                          "names.txt", "categories.txt"})
_DESCRIPTIONS = frozenset({"data.yaml", "data.yml", "dataset.yaml"})
_ALL = _OF_TOOLS | _OTHER_TEXTS | _DESCRIPTIONS  # Files that end in .names count as well.
_NUMBERED = re.compile(r"(\d+)\s*[:\s]\s*(.*\S)")  # 0: cat
_FOLDERS_ABOVE = 2
_MAX_BYTES = 2**20

Names = Mapping[int, str]
"""Class names by their numbers."""


def compare_class_files(names: Sequence[str], description: str, root: Path, folders: Iterable[str]) -> list[Finding]:
    """The findings about files that give the numbers of classes other names.

    Args:
        names: of the classes, by number, in the description.
        description: its file.
        root: of the data set; files above it belong to others.
        folders: of label files and images.

    Raises:
        DatasetError: if a file of the tool that wrote the labels has a name of the description at another number, or
            if storage fails.
    """
    findings = []
    own = dict(enumerate(names))
    for file in _files_above(folders, root):
        if os.path.realpath(file) == os.path.realpath(description):
            continue
        try:
            stated = _read_names(file)
        except UnicodeDecodeError:
            findings.append(Code.NAMES_NOT_UTF8.finding(file, description))
            continue
        is_of_tool = os.path.basename(file).lower() in _OF_TOOLS
        own_names, stated_names = ({folded(name) for name in names.values()} for names in (own, stated))
        if not is_of_tool and own_names.isdisjoint(stated_names):
            continue  # a list of something else, or the names of another set, such as Darknet's coco.names
        moved = _moved_name(own, stated)
        numbers_of_both = sorted(own.keys() & stated.keys())
        renamed = next((number for number in numbers_of_both if folded(own[number]) != folded(stated[number])), None)
        if moved is not None:
            number, other = moved
            if is_of_tool:
                raise DatasetError(f"{file}: gives class {own[number]!r} the number {other}, but {description} "
                                   f"{number}, and labels have numbers alone; correct the one that is wrong, or remove "
                                   "this file if it is out of date")
            findings.append(Code.OTHER_NUMBER.finding(file, own[number], other, description, number))
        elif renamed is not None:
            findings.append(Code.OTHER_NAME.finding(file, renamed, stated[renamed], description, repr(own[renamed])))
    return findings


def _files_above(folders: Iterable[str], root: Path) -> list[str]:
    """The files of class names in some folders and those above them, each once. Folders are listed, because the names'
    case does not count: 0.07 s for 100,000 files."""
    places: dict[Path, None] = {}  # a set that keeps the order: many folders have the same ones above them
    for folder in folders:
        place = Path(folder)
        for _ in range(1 + _FOLDERS_ABOVE):
            places[place] = None
            if place in (root, place.parent):
                break
            place = place.parent
    files: list[str] = []
    for place in places:
        files += [os.path.join(place, name) for name in _class_files_in(place)]
    return files


def _class_files_in(folder: Path) -> list[str]:
    """The names of the files in a folder that are named like files of class names."""
    lower = ((name, name.lower()) for name in read_or_refuse(_listing, folder))
    return sorted(name for name, plain in lower if plain in _ALL or plain.endswith(".names"))


def _listing(folder: str) -> list[str]:
    """The names in a folder; none if there is no such folder, or if it is closed to this user, as one above may be."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _read_names(file: str) -> Names:
    """The names in a file by their numbers; empty if it has none, or is no such file.

    Raises:
        DatasetError: if storage fails: a file that cannot be read may contradict the description.
        UnicodeDecodeError: for a text in an unknown encoding.
    """
    name = os.path.basename(file).lower()
    text = decode_text(read_or_refuse(partial(content_of, max_bytes=_MAX_BYTES), file) or b"")
    try:
        if name == _LABEL_STUDIO:
            categories = json.loads(text)["categories"]
            return {int(category["id"]): str(category["name"]) for category in categories}
        if name in _DESCRIPTIONS:
            names = load_text_yaml(file, text).data["names"]  # as the description is read: 007 is no number
            pairs = names.items() if isinstance(names, dict) else enumerate(names)
            return {int(number): str(name) for number, name in pairs}
        return _names_of_lines(text)
    except (ValueError, TypeError, LookupError, AttributeError, InputError):
        return {}


def _names_of_lines(text: str) -> Names:
    """The names in a text with one on each line, which may begin with its number."""
    lines = {number: line.strip() for number, line in enumerate(text.splitlines()) if line.strip()}
    for line in lines.values():
        words = line.split()
        is_label_row = len(words) >= 5 and all(values.number(word) is not None for word in words)
        if is_label_row:  # These are the labels of a picture that is called classes.jpg.
            return {}
    numbered = [match for line in lines.values() if (match := _NUMBERED.fullmatch(line))]
    if [int(match[1]) for match in numbered] != list(range(len(lines))):  # such as the names `2 euro` and `1 euro`
        return lines
    return {int(match[1]): match[2] for match in numbered}


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

