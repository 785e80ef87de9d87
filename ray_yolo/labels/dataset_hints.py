"""Advice about files and keys given in place of those of a data-set YAML. Nothing here changes what is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

KEYS = ("path", "train", "val", "test", "names", "nc")
"""The keys of a data-set YAML that are read."""

_OTHER_SPELLINGS = {
    "valid": "val", "validation": "val", "validate": "val", "eval": "val", "dev": "val",
    "training": "train", "trainset": "train", "train_set": "train", "testing": "test", "testset": "test",
    "name": "names", "classes": "names", "class_names": "names", "labels": "names", "categories": "names",
}
_TABLES = frozenset({".csv", ".tsv", ".parquet", ".feather", ".arrow", ".xlsx", ".xls", ".ods", ".jsonl", ".ndjson"})
_ARCHIVES = re.compile(r"\.(zip|tar|tgz|tar\.\w+|gz|7z|rar|bz2|xz)$", re.IGNORECASE)
_DARKNET_LINE = re.compile(r"\s*(classes|train|valid|names|backup)\s*=\s*(.*?)\s*")
_MOST_BYTES = 64 * 1024  # A Darknet file is read up to this size.
_ESCAPES = {"\t": r"\t", "\n": r"\n", "\r": r"\r", "\a": r"\a", "\b": r"\b", "\f": r"\f", "\v": r"\v",
            "\N{ESCAPE}": r"\e"}


def is_archive(path: str) -> bool:
    """Whether a path is named like an archive."""
    return bool(_ARCHIVES.search(path))


def explain_file(path: Path) -> str:
    """Why a file is no data-set YAML, and what to write instead; '' if it may be one."""
    suffix = path.suffix.lower()
    if is_archive(path.name):
        return "is an archive; unpack it, and give its folder or the YAML file in it"
    if suffix == ".json":
        return ("is a JSON file; if it has COCO's annotations, write a YAML file with the lines "
                f"`val: {{annotations: {path.name}, images: FOLDER}}`, the same for `train`, and `names: [...]`")
    if suffix == ".xml":
        return ("is an XML file; for Pascal VOC, write a YAML file with `train: FOLDER`, `val: FOLDER` and "
                "`names: [...]`, where the folders have the images")
    if suffix == ".txt":
        return f"is a text file; for a list of images, write a YAML file with `train: {path.name}` and `names: [...]`"
    if suffix == ".names":
        return "lists class names; write a YAML file with `train: FOLDER`, `val: FOLDER` and these `names: [...]`"
    if suffix in (".pt", ".pth", ".onnx", ".safetensors"):
        return f"is a file of weights; give it with --weights {path.name}, and the data set with --data"
    return _explain_darknet(path)


def explain_source(path: Path) -> str:
    """Why a file is no source of a split's images, and what to do; '' if it may be one."""
    suffix = path.suffix.lower()
    if suffix in _TABLES:
        return ("is a table, which is not read; export YOLO, COCO or Pascal VOC from it, or write a list of the images "
                "(.txt) with one path on each line")
    if suffix in (".tfrecord", ".record", ".tfrecords", ".lmdb", ".rec"):
        return "has records of images, which are not read; unpack them into image files"
    if suffix in (".yaml", ".yml", ".xml"):
        kind = "an XML" if suffix == ".xml" else "a YAML"
        return f"is {kind} file; a split is a folder of images, a list of them (.txt) or a COCO file (.json)"
    return ""


def _explain_darknet(path: Path) -> str:
    """The YAML lines for Darknet's `obj.data`; '' for another file."""
    if path.suffix.lower() in (".yaml", ".yml"):
        return ""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    entries = {}
    for line in text.splitlines():
        match = _DARKNET_LINE.fullmatch(line)
        if match:
            key, value = match.groups()
            entries[key] = value
    if "train" not in entries and "names" not in entries:
        return ""
    names = _darknet_names(path.parent, entries.get("names", ""))
    lines = [f"`train: {entries.get('train', 'FOLDER')}`", f"`val: {entries.get('valid', 'FOLDER')}`",
             f"`names: {names}`"]
    return ("is Darknet's description, not YAML; in the folder in which Darknet is started, often "
            f"{path.absolute().parent.parent}, write a YAML file with the lines {', '.join(lines)}")


def _darknet_names(folder: Path, names: str) -> str:
    """The class names of a Darknet file, as a YAML list. Darknet is often started in the folder above that
    of obj.data, where the relative paths start then."""
    if not names:
        return "[...]"
    for start in (folder, folder.parent):
        try:
            lines = (start / names).read_text("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError, ValueError):
            continue
        found = [line.strip() for line in lines if line.strip()]
        if found:
            return json.dumps(found, ensure_ascii=False)  # quoted: a name may have a comma
    return f"[the lines of {names}]"


def other_spelling(content: Mapping[str, Any], key: str) -> str | None:
    """The key of a description that was probably meant as `key`, which is missing: `valid` for `val`."""
    if content.get(key) not in (None, ""):
        return None
    return next(_spellings(content, key), None)


def further_spellings(content: Mapping[str, Any], key: str) -> list[str]:
    """Other spellings of `key` beside itself: `valid` and `val`."""
    return list(_spellings(content, key)) if content.get(key) not in (None, "") else []


def _spellings(content: Mapping[str, Any], key: str) -> Iterator[str]:
    for given, value in content.items():
        if key == "names" and not isinstance(value, (list, dict)):  # `labels: FOLDER`
            continue
        plain = str(given).strip().casefold().replace("-", "_")
        if given != key and value not in (None, "") and (plain == key or _OTHER_SPELLINGS.get(plain) == key):
            yield str(given)


def path_hint(entry: str, exists: Callable[[str], bool] = lambda path: False) -> str:
    """Advice about a path that does not exist, such as one with backslashes; '' if it looks usual.

    Args:
        exists: whether a corrected path exists.
    """
    if any(character in entry for character in _ESCAPES):
        written = "".join(_ESCAPES.get(character, character) for character in entry)
        corrected = written.replace("\\", "/")
        return f"; in double quotes, a backslash starts an escape: write {corrected!r}"
    if "\\" in entry:
        corrected = entry.replace("\\", "/")
        state = "which exists" if exists(corrected) else "with the path on this machine"
        return f"; here, `\\` does not separate folders: write {corrected!r}, {state}"
    return ""
