"""Pictures, videos and streams that a user points at: which a source names, what their results are called, and frames.

A source is a folder, a file, a shell pattern, a list file, the number of a camera or the address of a stream. Every
real folder is looked into once, so that no arrangement of links makes the search endless; hidden files and folders are
left out. The order of names decides, so that the same tree gives the same paths on any file system.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from ray_yolo.data.images import SUFFIXES, UnreadableImageError
from ray_yolo.errors import DatasetError, InputError
from ray_yolo.redact import redact

VIDEO_SUFFIXES = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv"})
USUAL_RATE = 30.0  # frames per second of a video that does not say
_STREAM = re.compile(r"(?:rtsps?|rtmps?|https?|udp|tcp)://", re.IGNORECASE)
_ANY_DEPTH = re.compile(r"(?:^|(?<=/))(?:\*\*(?:/+|$))+")


class Media(NamedTuple):
    """One file or stream to detect in."""

    path: str  # absolute; of a stream its address, of a camera its number
    name: str  # path below the folder that all files of a source have in common
    stem: str  # what results are named by: unique in a source, `name` without its suffix where that is enough

    @property
    def is_video(self) -> bool:
        """Whether it has frames."""
        return self.is_stream or suffix(self.path) in VIDEO_SUFFIXES

    @property
    def is_stream(self) -> bool:
        """Whether it is a camera or comes over a network, and may have no end."""
        return self.path.isdigit() or bool(_STREAM.match(self.path))


def suffix(path: str) -> str:
    """The suffix of a path in small letters, with its dot."""
    return os.path.splitext(path)[1].lower()


def find_media(source: str) -> list[Media]:
    """The pictures and videos of a folder (at any depth, hidden ones left out), a file, a pattern or a list file; or
    the one stream.

    Raises:
        InputError: if there are none, or the list names a file that does not exist.
    """
    if _STREAM.match(source) or (source.isdigit() and not os.path.exists(source)):
        shown = redact(source)
        return [Media(source, shown, re.sub(r"\W+", "_", shown.partition("?")[0]).strip("_"))]
    kinds = SUFFIXES | VIDEO_SUFFIXES
    try:
        paths = {os.path.abspath(path) for path in files_of(source) if suffix(path) in kinds and os.path.isfile(path)}
    except DatasetError as error:
        raise InputError(f"source: {error}") from None
    if not paths:
        raise InputError(f"source: no pictures and no videos in {source} (looked for {', '.join(sorted(kinds))})")
    root = source if os.path.isdir(source) else os.path.commonpath([os.path.dirname(path) for path in paths])
    names = [os.path.relpath(path, root) for path in sorted(paths)]
    return [Media(*row) for row in zip(sorted(paths), names, unique_stems(names), strict=True)]


def unique_stems(names: list[str]) -> list[str]:
    """Each name without its suffix, or whole where another file's results would be called the same.

    Frame 1 of `clip.mp4` is called clip_1: beside a picture `clip_1.jpg` the video keeps its whole name.
    """
    stems = [os.path.splitext(name)[0] for name in names]
    taken = Counter([*stems, *names])
    like_frames = {stem.rpartition("_")[0] for stem in stems if re.search(r"_\d+$", stem)}
    return [name if taken[stem] > 1 or (suffix(name) in VIDEO_SUFFIXES and stem in like_frames) else stem
            for name, stem in zip(names, stems, strict=True)]


def files_of(source: str, root: Path | None = None) -> list[str]:
    """What a source names: all files below a folder, the lines of a list file, one file, or a pattern's matches.

    Args:
        root: where a list file's relative paths may lie too, besides its own folder.

    Raises:
        DatasetError: for a folder that may not be read, and for a list with a line that names no file.
    """
    if os.path.isdir(source):
        return [os.path.join(here, name) for here, names in _walk(source) for name in names]
    if suffix(source) == ".txt":
        return _listed(Path(source), root)
    return [source] if os.path.isfile(source) else matching(source)


def matching(pattern: str) -> list[str]:
    """What a shell pattern matches; `**` stands for any number of folders. May name a path twice."""
    if len(parts := _ANY_DEPTH.split(pattern, maxsplit=1)) == 1:
        return glob.glob(pattern)
    head, tail = parts
    folders = (here for top in (glob.glob(head) if head else ["."]) for here, _ in _walk(top))
    return [path for folder in folders for path in matching(os.path.join(glob.escape(folder), tail or "*"))]


def _walk(top: str) -> Iterator[tuple[str, list[str]]]:
    """Each folder from `top` down with the names of its files.

    Raises:
        DatasetError: for a folder that may not be read: a data set that is silently smaller trains silently worse.
    """
    seen = set()
    for here, folders, names in os.walk(top, followlinks=True, onerror=_refuse):
        real = os.path.realpath(here)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if real not in seen:
            seen.add(real)
            yield here, [name for name in names if not name.startswith(".")]


def _refuse(error: OSError) -> None:
    if isinstance(error, PermissionError):
        raise DatasetError(f"{error.filename}: may not be read; give this user the right to, or move it away") from None


def _listed(file: Path, root: Path | None) -> list[str]:
    """The paths in a list file; relative ones are below the file's folder or `root`."""
    try:
        if not os.path.isfile(file):  # reading a pipe or a device may never end
            raise FileNotFoundError
        lines = file.read_text("utf-8-sig").split("\n")  # any other line end may be part of a name
    except (UnicodeDecodeError, OSError):
        raise DatasetError(f"{file}: cannot be read as text; expected one path per line") from None
    paths = []
    for number, line in enumerate(map(str.strip, lines), 1):
        places = [os.path.normpath(folder / line) for folder in (file.parent, root or file.parent)]
        path = next((place for place in places if os.path.isfile(place)), None)
        if path:
            paths.append(path)
        elif line:
            raise DatasetError(f"{file}:{number}: there is no file {line!r}; looked for "
                               f"{' and '.join(dict.fromkeys(places))}")
    return paths


def read_video(path: str) -> Iterator[np.ndarray]:
    """The frames of a video, a stream or a camera, (height, width, 3) uint8 RGB, upright.

    Raises:
        UnreadableImageError: if there is not a single one.
    """
    video = cv2.VideoCapture(int(path)) if path.isdigit() else cv2.VideoCapture(path, cv2.CAP_FFMPEG)
    try:
        ok, frame = video.read()
        if not ok:
            raise UnreadableImageError("is not a video that can be read")
        while ok:
            yield cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
            ok, frame = video.read()
    finally:
        video.release()


def frames_per_second(path: str) -> float:
    """The rate of a video file; 30 if it does not say."""
    video = cv2.VideoCapture(path, cv2.CAP_FFMPEG)
    rate = float(video.get(cv2.CAP_PROP_FPS))
    video.release()
    return rate if 0 < rate < 1000 else USUAL_RATE
