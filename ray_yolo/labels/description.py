"""Parse data-set YAML into one frozen value with absolute paths.

Supports the YOLOv5 keys (path, train, val, test, names, nc) and their variants:

- names as a list or by number;
- splits as folders, list files, patterns or lists of those;
- Roboflow's `../train/images`.

The `download` entry is never run.
"""

from __future__ import annotations

import glob
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import Any

from ray_yolo.core.errors import DatasetError
from ray_yolo.core.structures import DatasetSnapshot, Finding
from ray_yolo.labels import values
from ray_yolo.labels.dataset_hints import KEYS, further_spellings, is_archive, other_spelling, path_hint
from ray_yolo.labels.files import matching
from ray_yolo.labels.rules import Code

Where = Callable[..., str]  # keys from the top -> "file:line"
_ADDRESS = re.compile(r"https?://[^\s'\"`)\],]+")
_OF_LABELS = re.compile(r"label|annotation|exclude|single_cls", re.IGNORECASE)  # keys that say which labels are meant
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # would break the tables of results
_COUNTS = ("nc", "num_classes", "number_of_classes")  # The latter two are only compared with the number of classes.
_OUTSIDE = ("is not below the folder of this file, where a data set in a store has all its files; give a path "
            "relative to this folder")
MAX_CLASSES = 2**15  # limit of a model's head; the largest public data sets have some 20,000


@dataclass(frozen=True)
class DatasetDescription:
    """The images and class names of a data set.

    Splits are absolute paths of folders, list files, COCO files or glob patterns; () for a missing split.
    `image_folders` maps a COCO file to its folder of images if the description gives one.
    """

    file: str
    root: Path
    train: tuple[str, ...]
    val: tuple[str, ...]
    test: tuple[str, ...]
    names: tuple[str, ...]
    findings: tuple[Finding, ...] = ()  # findings about the description itself
    image_folders: Mapping[str, str] = field(default_factory=dict)
    snapshot: DatasetSnapshot | None = None  # None unless the data set is in a store
    not_fetched: tuple[str, ...] = ()  # pictures in the store whose formats are not read
    keypoints: tuple[int, int] | None = None  # `kpt_shape`: their number and their dimensions in each YOLO row

    def split(self, name: str) -> tuple[str, ...]:
        """Sources of `train`, `val` or `test`.

        Raises:
            DatasetError: if the description has no such split.
        """
        sources = {"train": self.train, "val": self.val, "test": self.test}[name]
        if not sources:
            raise DatasetError(f"{self.file}: there is no `{name}` split; add a line such as `{name}: images/{name}`")
        return sources


def describe(content: Mapping[str, Any], path: Path, where: Where | None = None, *, confined: bool = False
             ) -> DatasetDescription:
    """The description in an already loaded YAML mapping.

    Args:
        path: its file; `path:` is relative to the file's folder.
        where: returns `file:line` of a key for messages; by default the file.
        confined: all sources must be below the file's folder, as those of a data set in a store.

    Raises:
        DatasetError: naming the key, for classes or splits that are missing, ill-typed or not on disk.
    """
    where = where or (lambda *_: str(path))
    for key in KEYS:  # `valid` or `Train`, where the key that is read is missing
        given = other_spelling(content, key)
        if given is not None:
            raise DatasetError(f"{where(given)}: {given}: is not read; write `{key}:` instead")
    names = _names(content, where)
    folder = _text(content.get("path") or ".", where("path"), "path")
    root = Path(os.path.normpath(path.absolute().parent / os.path.expanduser(folder)))
    limit = path.absolute().parent if confined else Path("/")
    if not root.is_relative_to(limit):
        raise DatasetError(f"{where('path')}: path: {folder!r} {_OUTSIDE}")
    folders: dict[str, str] = {}  # the folders of the images of COCO files, filled by `_sources`
    splits = {key: _sources(content, key, root, limit, where, folders) for key in ("train", "val", "test")}
    if not splits["train"] and not splits["val"]:
        raise DatasetError(f"{path}: there is neither a `train` nor a `val` split; "
                           "add lines such as `train: images/train`")
    findings = [*_duplicates(names, where("names")), *_report_unread(content, names, where)]
    download = content.get("download")
    is_address = isinstance(download, str) and _ADDRESS.fullmatch(download.strip())
    if download and not is_address:  # Code under `download` is never run; an address needs no report.
        findings.insert(0, Code.DOWNLOAD_CODE.finding(where("download")))
    keypoints = _keypoints(content, where("kpt_shape"))
    return DatasetDescription(str(path), root, names=names, findings=tuple(findings), image_folders=folders,
                              snapshot=None, keypoints=keypoints, **splits)


def _report_unread(content: Mapping[str, Any], names: tuple[str, ...], where: Where) -> Iterator[Finding]:
    """Report keys that say something else than those that are read, and channels that are not read."""
    for key in KEYS:
        for given in further_spellings(content, key):
            if not _says_the_same(content[given], content[key], names if key == "names" else None):
                yield Code.OTHER_KEY.finding(where(given), given, key)
    channels = content.get("channels")
    if channels is not None and values.number(channels) != 3:
        yield Code.CHANNELS.finding(where("channels"), short(channels))
    for key, value in content.items():
        if value not in (None, "", False) and _OF_LABELS.search(str(key)):
            yield Code.KEY_ABOUT_LABELS.finding(where(key), short(key))


def _says_the_same(one: object, other: object, names: tuple[str, ...] | None) -> bool:
    """Whether two values of a key are equal, as paths or, where `names` are those that are read, as class names."""
    if names is None:
        are_paths = isinstance(one, str) and isinstance(other, str)
        return os.path.normpath(str(one)) == os.path.normpath(str(other)) if are_paths else one == other
    listed = list(one.values()) if isinstance(one, Mapping) else one
    if not isinstance(listed, list) or not all(isinstance(name, (str, int, float)) for name in listed):
        return True  # something else than names of classes
    return [str(name).strip() for name in listed] == list(names)


def _duplicates(names: tuple[str, ...], where: str) -> Iterator[Finding]:
    numbers: dict[str, list[str]] = defaultdict(list)
    for number, name in enumerate(names):
        numbers[name].append(str(number))
    for name, same in numbers.items():
        if len(same) > 1:
            yield Code.SAME_NAMES.finding(where, short(name), len(same), ", ".join(same[:10]))


def _names(content: Mapping[str, Any], where: Where) -> tuple[str, ...]:
    value = content.get("names")
    count = _count(content.get("nc"), where("nc"), "nc")
    if value is None and count is not None:
        return tuple(f"class{number}" for number in range(count))
    if isinstance(value, Mapping):
        value = _in_order(value, where)
    if not isinstance(value, list) or not value:
        raise DatasetError(f"{where('names')}: names: must list the classes, such as `names: [cat, dog]` or `0: cat`")
    if len(value) > MAX_CLASSES:
        raise DatasetError(f"{where('names')}: names: {len(value)} classes are more than {MAX_CLASSES}")
    for name in value:
        if isinstance(name, bool) or not isinstance(name, (str, int, float)) or not str(name).strip():
            raise DatasetError(f"{where('names')}: names: {short(name)} is not a class name; put it in quotes")
        if _CONTROL.search(str(name).strip()):
            raise DatasetError(f"{where('names')}: names: {short(name)} contains line ends or control characters")
    for key in _COUNTS:
        count = _count(content.get(key), where(key), key)
        if count is not None and count != len(value):
            raise DatasetError(f"{where(key)}: {key} is {count}, but names has {len(value)} entries; make them agree "
                               f"or drop {key}")
    return tuple(str(name).strip() for name in value)


def _in_order(names: Mapping[Any, Any], where: Where) -> list[Any]:
    """The names of a mapping by class number."""
    by_number = {_number(key): name for key, name in names.items()}
    numbers = range(len(names))
    if set(by_number) != set(numbers):  # also if two keys are the same number: 0 and 00
        raise DatasetError(f"{where('names')}: names: the class numbers must be 0 to {len(names) - 1} without gaps")
    return [by_number[number] for number in numbers]


def _keypoints(content: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    value = content.get("kpt_shape")
    if value is None:
        return None
    numbers = [_number(each) for each in value] if isinstance(value, list) else []
    if len(numbers) != 2 or numbers[0] < 1 or numbers[1] not in (2, 3):
        raise DatasetError(f"{where}: kpt_shape: must be [number of keypoints, 2 or 3], not {short(value)}")
    return numbers[0], numbers[1]


def _count(value: object, where: str, key: str) -> int | None:
    if value is None:
        return None
    count = _number(value)
    if not 1 <= count <= MAX_CLASSES:
        raise DatasetError(f"{where}: {key}: must be a number of classes from 1 to {MAX_CLASSES}, not {short(value)}")
    return count


def _number(value: object) -> int:
    """An integer or its decimal text; -1 for anything else."""
    text = str(value)
    is_plain = not isinstance(value, bool) and text.isdecimal() and len(text) < 10  # no conversion of huge numbers
    return int(text) if is_plain else -1


def _text(value: object, where: str, key: str) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise DatasetError(f"{where}: {key}: expected a path, found {short(value)}")
    return value.strip()


def _sources(content: Mapping[str, Any], key: str, root: Path, limit: Path, where: Where, folders: dict[str, str]
             ) -> tuple[str, ...]:
    """The sources of a split. `{annotations: FILE, images: FOLDER}` yields FILE, which `folders` maps to FOLDER."""
    def path_of(entry: object) -> str:
        return _locate(_text(entry, where(key), key), key, root, limit, content, where)

    value = content.get(key)
    if value in (None, ""):
        return ()
    sources = []
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, Mapping) and entry.keys() == {"annotations", "images"}:
            file = path_of(entry["annotations"])
            folders[file] = path_of(entry["images"])
            sources.append(file)
        else:
            sources.append(path_of(entry))
    return tuple(sources)


def _locate(entry: str, key: str, root: Path, limit: Path, content: Mapping[str, Any], where: Where) -> str:
    """The path of an entry: below `root`, else the same without Roboflow's leading `../`; below `limit` in any case."""
    without_dots = re.sub(r"^(\.\./)+", "", entry)
    spellings = [os.path.normpath(root / os.path.expanduser(text)) for text in (entry, without_dots)]
    tried = [path for path in dict.fromkeys(spellings) if Path(path).is_relative_to(limit)]
    if not tried:
        raise DatasetError(f"{where(key)}: {key}: {entry!r} {_OUTSIDE}")
    if is_archive(entry) and any(os.path.isfile(candidate) for candidate in tried):
        raise DatasetError(f"{where(key)}: {key}: {entry!r} is an archive; unpack it, and give its folder of images")
    if len(tried) > 1 and all(map(os.path.exists, tried)):
        raise DatasetError(f"{where(key)}: {key}: {entry!r} may be {' or '.join(tried)}, and both exist (Roboflow "
                           "writes `../` for its own folder); give the absolute path of the one that is meant")
    for candidate in tried:
        if os.path.exists(candidate) or (glob.has_magic(candidate) and matching(candidate)):
            return candidate
    if key == "test":  # many descriptions name a test split without files; using it is the error
        return tried[0]
    hint = path_hint(entry, lambda text: os.path.exists(root / text))
    folder_hint = path_hint(str(content.get("path") or "")) or "; correct the entry or `path`"
    raise DatasetError(f"{where(key)}: {key}: {entry!r} does not exist; looked for {' and '.join(tried)}"
                       f"{_download_hint(content)}{hint or folder_hint}")


def _download_hint(content: Mapping[str, Any]) -> str:
    download = content.get("download")
    if not download:
        return ""
    addresses = dict.fromkeys(_ADDRESS.findall(str(download)))  # each once
    steps = ["download the data yourself", *list(addresses)[:5]]
    return f" (`download` is never run: {', '.join(steps)})"
