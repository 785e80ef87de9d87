"""Files of a data set by their names: which are pictures, and those of a folder, a list or a pattern."""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from PIL import features

from ray_yolo.core.errors import DatasetError
from ray_yolo.core.files import is_absence, read_patiently
from ray_yolo.labels.values import decode_text

T = TypeVar("T")
_BY_BUILD = {"avif": ("AVIF", (".avif",)), "jpg_2000": ("JPEG2000", (".j2k", ".jp2"))}  # Pillow may be built without
_KNOWN = {*features.modules, *features.codecs}
_OPTIONAL = dict(of_format for name, of_format in _BY_BUILD.items() if name in _KNOWN and features.check(name))
OPTIONAL_FORMATS = tuple(_OPTIONAL)
"""Pillow's names of the formats that this build of it reads beside the usual ones."""
SUFFIXES = frozenset({
    ".bmp", ".dng", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".mpo", ".pbm", ".pfm", ".pgm", ".png", ".pnm",
    ".ppm", ".tif", ".tiff", ".webp", *(each for suffixes in _OPTIONAL.values() for each in suffixes)})
"""Suffixes of the files that are read, in lower case."""
UNREAD_SUFFIXES = frozenset({
    ".arw", ".avif", ".cr2", ".cr3", ".dcm", ".dicom", ".exr", ".hdr", ".heic", ".heif", ".ico", ".j2k", ".jp2", ".jpx",
    ".jxl", ".jxr", ".nef", ".nii", ".orf", ".pcx", ".psd", ".raf", ".raw", ".rw2", ".svg", ".svs", ".tga", ".xcf"
}) - SUFFIXES
"""Suffixes of pictures that no installed library reads safely and upright."""
_ANY_DEPTH = re.compile(r"(?:^|(?<=/))(?:\*\*(?:/+|$))+")
_QUOTED = re.compile(r"""(["'])(.+)\1,?""")
_log = logging.getLogger(__name__)


def suffix(path: str) -> str:
    """The lower-case suffix of a path with its dot."""
    return os.path.splitext(path)[1].lower()


def files_of(source: str, root: Path | None = None) -> list[str]:
    """The files of a source: all below a folder, the lines of a list file, one file, or a pattern's matches. Relative
    paths of a list file start in its own folder or in `root`.

    Raises:
        DatasetError: for an unreadable folder, or a list with a line that names no file.
    """
    if os.path.isdir(source):
        return [os.path.join(folder, name) for folder, names in walk(source) for name in names]
    if suffix(source) == ".txt":
        return _listed(Path(source), root)
    return [source] if os.path.isfile(source) else matching(source)


def matching(pattern: str) -> list[str]:
    """The matches of a shell pattern; `**` matches any number of folders. May contain duplicates.

    The name of an existing file or folder stands for itself, even if it contains `[`, `*` or `?`.
    """
    pattern = _with_literal_names(pattern)
    parts = _ANY_DEPTH.split(pattern, maxsplit=1)
    if len(parts) == 1:
        return _expanded(pattern)
    head, tail = parts
    paths = []
    for top in _expanded(head) if head else ["."]:
        for folder, _ in walk(top):
            paths += matching(os.path.join(glob.escape(folder), tail or "*"))  # the tail may have another `**`
    return paths


def _expanded(pattern: str) -> list[str]:
    """As `glob.glob`, which leaves out what cannot be listed; here that is refused."""
    if glob.escape(pattern) == pattern:
        return [pattern] if os.path.lexists(pattern) else []
    folder, name = os.path.split(pattern)
    found = []
    for each in _expanded(folder) if folder else [""]:
        if glob.escape(name) == name:
            names = [name] if os.path.lexists(os.path.join(each, name)) else []
        else:
            names = fnmatch.filter(names_in(each or "."), name)
        found += [os.path.join(each, one) for one in names if name.startswith(".") or not one.startswith(".")]
    return found


def names_in(folder: str | Path) -> list[str]:
    """The names in a folder; none if it does not exist.

    Raises:
        DatasetError: if it cannot be listed.
    """
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except OSError as error:
        _refuse(error)
        return []


def _with_literal_names(pattern: str) -> str:
    """The pattern with its leading existing names escaped: those up to the first part that is no name."""
    names = pattern.split("/")
    for number in range(len(names)):
        leading = "/".join(names[:number + 1]) or "/"
        if not os.path.lexists(leading):
            escaped = [glob.escape(name) for name in names[:number]]
            return "/".join([*escaped, *names[number:]])
    return glob.escape(pattern)


def walk(top: str) -> Iterator[tuple[str, list[str]]]:
    """Each folder from `top` down with the names of its files."""
    seen = set()
    for folder, folders, names in os.walk(top, followlinks=True, onerror=_refuse):
        real = os.path.realpath(folder)
        if real in seen:  # A link leads to a folder that was seen, perhaps to one above.
            folders.clear()  # `os.walk` goes on in what is left of this list
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield folder, [name for name in names if not name.startswith(".")]


def _refuse(error: OSError) -> None:  # silently missing data would degrade the training
    if isinstance(error, PermissionError):
        raise DatasetError(f"{error.filename}: permission denied; grant read access, or move it away") from None
    if not is_absence(error):
        raise DatasetError(f"{error.filename}: cannot be listed: {error.strerror}; check the storage, and run the same "
                           "command again") from None


def read_or_refuse(read: Callable[[str], T], path: str | Path) -> T:
    """The result of `read(path)`, which is called again after an OSError, as by `read_patiently`.

    Raises:
        DatasetError: if storage fails in each of several tries.
    """
    try:
        return read_patiently(read, str(path))
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}; check the storage, and run the same command "
                           "again") from None


def content_of(path: str, max_bytes: int | None = None) -> bytes | None:
    """The bytes of a plain file; None if there is none, or if it has more than `max_bytes`.

    Raises:
        OSError: if storage fails.
    """
    try:
        status = os.stat(path)
        is_plain = stat.S_ISREG(status.st_mode)  # reading a pipe or a device may block forever
        if not is_plain or (max_bytes is not None and status.st_size > max_bytes):
            return None
        return Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _listed(file: Path, root: Path | None) -> list[str]:
    """The files that the lines of a list name, in order."""
    try:
        content = read_or_refuse(content_of, file)
        text = None if content is None else decode_text(content)
    except UnicodeDecodeError:
        text = None
    if text is None:
        raise DatasetError(f"{file}: cannot be read as text; expected one path per line")
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # other line ends may be part of a name
    pictures = _folder_of_stems(file)
    if pictures is not None:
        return _files_of_stems(file, lines, pictures)
    paths = []
    folders = (file.parent, root or file.parent)
    dropped: str | None = None  # leading folders that this machine does not have
    for number, line in enumerate(lines, 1):
        entry = line.strip()
        if not entry:
            continue
        plain = _unquoted(entry).replace("\\", "/")  # a list of Windows has backslashes
        candidates = []
        for spelling in dict.fromkeys((entry, _unquoted(entry), plain)):
            candidates += [os.path.normpath(folder / spelling) for folder in folders]
        path = _first_file(candidates)
        if path is None:
            prefix, path = _without_leading_folders(plain, folders, dropped)
            if path is None:
                hint = "" if suffix(plain) else "; a line is the path of an image, with its suffix"
                raise DatasetError(f"{file}:{number}: there is no file {entry!r}; looked for "
                                   f"{' and '.join(dict.fromkeys(candidates))}{hint}")
            dropped = prefix
        paths.append(path)
    if dropped is not None:
        _log.warning("%s: its images were found without the leading %s of their paths", file, dropped)
    return paths


def _unquoted(entry: str) -> str:
    """A line without the quotes, and the comma after them, that some programs write."""
    match = _QUOTED.fullmatch(entry)
    return match[2] if match else entry


def _folder_of_stems(file: Path) -> Path | None:
    """The folder of the pictures whose names without suffix a list of Pascal VOC has: `JPEGImages` for a file in
    `ImageSets`; None for another list."""
    for folder in file.absolute().parents[:2]:
        pictures = folder.parent / "JPEGImages"
        if folder.name.lower() == "imagesets" and pictures.is_dir():
            return pictures
    return None


def _files_of_stems(file: Path, lines: Sequence[str], folder: Path) -> list[str]:
    """The pictures of a list in Pascal VOC's `ImageSets`."""
    names = defaultdict[str, list[str]](list)
    for name in sorted(os.listdir(folder)):
        if suffix(name) in SUFFIXES:
            names[name].append(name)
            names[os.path.splitext(name)[0]].append(name)
    paths = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        found = names.get(line.strip(), [])
        if not found and len(words) == 2 and words[1] in ("1", "-1", "0") and words[0] in names:
            raise DatasetError(f"{file}:{number}: {line.strip()!r} says whether a picture has objects of one class; "
                               "use the list of all pictures, such as train.txt")
        if len(found) != 1:
            what = f"may be {' or '.join(found)}" if found else "is no picture"
            raise DatasetError(f"{file}:{number}: {line.strip()!r} {what} in {folder}")
        paths.append(str(folder / found[0]))
    return paths


def _first_file(paths: Sequence[str]) -> str | None:
    for path in paths:
        if os.path.isfile(path):
            return path
    return None


def _without_leading_folders(line: str, folders: Sequence[Path], dropped: str | None) -> tuple[str, str | None]:
    """The leading folders of a path that another machine or program has, and the file at the rest of the path.

    Darknet's lists start in the folder of the program (`data/obj/a.jpg`), others at its root. All lines of a list must
    lack the same folders, `dropped`; None: not known yet.
    """
    parts = line.split("/")
    for number in range(1, len(parts)):
        prefix = "/".join(parts[:number]) + "/"
        rest = "/".join(parts[number:])
        if not rest or dropped not in (None, prefix):
            continue
        path = _first_file([os.path.normpath(folder / rest) for folder in folders])
        if path is not None:
            return prefix, path
    return "", None
