"""Pictures and videos that a user points at: which there are, what their results are called, and their pixels."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from ray_yolo.data.folders import matching
from ray_yolo.data.images import SUFFIXES, UnreadableImageError
from ray_yolo.errors import InputError

VIDEO_SUFFIXES = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv"})
_USUAL_RATE = 30.0  # frames per second of a video that does not say


class Media(NamedTuple):
    """One file to detect in."""

    path: str  # absolute
    name: str  # path below the folder that all files of a source have in common
    stem: str  # what results are named by: unique in a source, `name` without its suffix where that is enough

    @property
    def is_video(self) -> bool:
        """Whether it has frames."""
        return _suffix(self.path) in VIDEO_SUFFIXES


def find_media(source: str) -> list[Media]:
    """The pictures and videos of a folder (at any depth, hidden ones left out), a file, a pattern or a list file.

    Raises:
        InputError: if there are none, or the list names a file that does not exist.
    """
    if "://" in source or source.isdigit():
        raise InputError(f"source: {source} is a stream or a camera; record it and give the file")
    root, paths = _paths(source)
    known = sorted(os.path.abspath(path) for path in set(paths) if _suffix(path) in SUFFIXES | VIDEO_SUFFIXES)
    if not known:
        kinds = ", ".join(sorted(SUFFIXES | VIDEO_SUFFIXES))
        raise InputError(f"source: no pictures and no videos in {source} (looked for {kinds})")
    root = os.path.abspath(root) if root else os.path.commonpath([os.path.dirname(path) for path in known])
    names = [os.path.relpath(path, root) for path in known]
    return [Media(*row) for row in zip(known, names, unique_stems(names), strict=True)]


def unique_stems(names: list[str]) -> list[str]:
    """Each name without its suffix, or whole where another file's results would be called the same.

    Frame 1 of `clip.mp4` is called clip_1: beside a picture `clip_1.jpg` the video keeps its whole name.
    """
    stems = [os.path.splitext(name)[0] for name in names]
    taken = Counter([*stems, *names])
    like_frames = {stem.rpartition("_")[0] for stem in stems if re.search(r"_\d+$", stem)}
    return [name if taken[stem] > 1 or (_suffix(name) in VIDEO_SUFFIXES and stem in like_frames) else stem
            for name, stem in zip(names, stems, strict=True)]


def read_video(path: str) -> Iterator[np.ndarray]:
    """The frames of a video, (height, width, 3) uint8 RGB, upright.

    Raises:
        UnreadableImageError: if there is not a single one.
    """
    video = cv2.VideoCapture(path, cv2.CAP_FFMPEG)
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
    """The rate of a video; 30 if it does not say."""
    video = cv2.VideoCapture(path, cv2.CAP_FFMPEG)
    rate = float(video.get(cv2.CAP_PROP_FPS))
    video.release()
    return rate if 0 < rate < 1000 else _USUAL_RATE


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _paths(source: str) -> tuple[str, Iterable[str]]:
    """The folder that names are relative to ('' for the deepest common one), and the files."""
    if os.path.isdir(source):
        below = Path(source).rglob("*")
        return source, [str(path) for path in below if path.is_file() and not _is_hidden(path.relative_to(source))]
    if _suffix(source) == ".txt":
        return "", _listed(Path(source))
    return "", [source] if os.path.isfile(source) else matching(source)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _listed(file: Path) -> list[str]:
    """The paths of a list file, relative ones below its folder."""
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except (UnicodeDecodeError, OSError):
        raise InputError(f"source: {file} cannot be read as text; expected one path per line") from None
    paths = [(number, file.parent / line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    for number, path in paths:
        if not path.is_file():
            raise InputError(f"source: {file}:{number}: there is no file {path}")
    return [str(path) for _, path in paths]
