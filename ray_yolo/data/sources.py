"""Frames to detect in, one after the other: of files and streams, and of pixels that were handed over."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from PIL import Image, ImageOps

from ray_yolo.core.errors import DatasetError, InputError
from ray_yolo.core.redact import redact
from ray_yolo.data.images import SUFFIXES, UnreadableImageError, check_image, read_image

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


class Frame(NamedTuple):
    """A picture, or a frame of a video."""

    media: Media
    number: int | None = None  # of a video, counted from 1
    pixels: np.ndarray | None = None  # (height, width, 3) uint8 RGB; None: a file that is still to be read
    error: str = ""  # why there are none

    def read(self) -> Frame:
        """With its pixels, or with the reason why there are none."""
        if self.pixels is not None or self.error:
            return self
        try:
            check_image(self.media.path)
            return self._replace(pixels=read_image(self.media.path))
        except UnreadableImageError as error:
            return self._replace(error=str(error))
        except OSError as error:
            return self._replace(error=f"cannot be read: {error.strerror}")


def frames_of(media: Iterable[Media], stride: int = 1) -> Iterator[Frame]:
    """The pictures, still to be read, and every `stride`-th frame of the videos, the first one included."""
    for one in media:
        try:
            if one.is_video:
                frames = islice(enumerate(read_video(one.path), 1), 0, None, stride)
                yield from (Frame(one, number, pixels) for number, pixels in frames)
            else:
                yield Frame(one)
        except UnreadableImageError as error:
            yield Frame(one, error=str(error))


class InputSource(NamedTuple):
    """What a caller wants to be looked at."""

    parts: list[tuple[Media, np.ndarray | None]]  # files and streams, and pictures that are there already

    @property
    def alone(self) -> bool:
        """Whether there is nothing to be done side by side: one picture, or something live."""
        return any(media.is_stream for media, _ in self.parts) or (
            len(self.parts) == 1 and not self.parts[0][0].is_video)

    def frames(self, stride: int = 1) -> Iterator[Frame]:
        """In the order given; see `frames_of`."""
        for media, pixels in self.parts:
            if pixels is None:
                yield from frames_of([media], stride)
            else:
                yield Frame(media, pixels=pixels)


def read_source(source: object) -> InputSource:
    """One thing or a list of things, each of them

    - what `find_media` takes (path, folder, pattern, list file, camera number, address of a stream): text, Path or int
    - an array (height, width, 3) uint8 in OpenCV's order BGR; grey, and BGRA, too
    - a PIL image
    - a tensor (B, 3, height, width) or (3, height, width) RGB in 0..1, which is rounded to eight bits

    Raises:
        InputError: for anything else.
    """
    things = list(source) if isinstance(source, list | tuple) else [source]
    parts = [part for number, thing in enumerate(things) for part in _media_or_pixels(thing, number)]
    taken = Counter(media.stem for media, _ in parts)
    return InputSource([(media if taken[media.stem] == 1 else media._replace(stem=f"{number}_{media.stem}"), pixels)
                   for number, (media, pixels) in enumerate(parts)])


def _media_or_pixels(thing: object, number: int) -> list[tuple[Media, np.ndarray | None]]:
    """The files that a thing names, or the pictures that it holds."""
    if isinstance(thing, str | Path | int):
        return [(media, None) for media in find_media(os.fspath(thing) if isinstance(thing, Path) else str(thing))]
    if isinstance(thing, torch.Tensor):
        pictures = [_from_tensor(one) for one in (thing if thing.ndim == 4 else thing[None])]
    elif isinstance(thing, Image.Image):
        pictures = [np.array(ImageOps.exif_transpose(thing).convert("RGB"))]
    else:
        pictures = [_from_array(thing)]
    named = [f"image{number}" + f"_{place}" * (len(pictures) > 1) for place in range(len(pictures))]
    return [(Media(f"{name}.jpg", f"{name}.jpg", name), pixels) for name, pixels in zip(named, pictures, strict=True)]


def _from_tensor(picture: torch.Tensor) -> np.ndarray:
    if picture.ndim != 3 or len(picture) != 3 or not picture.is_floating_point():
        raise InputError(f"source: a tensor of {picture.dtype} {tuple(picture.shape)}; expected floats (B, 3, height, "
                         "width) in 0..1")
    scaled = picture.detach().cpu().float().clamp(0, 1) * 255
    return np.ascontiguousarray(scaled.round().byte().permute(1, 2, 0).numpy())


def _from_array(picture: Any) -> np.ndarray:
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.size == 0 or not (
            picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] in (1, 3, 4))):
        what = f"{picture.dtype} {picture.shape}" if isinstance(picture, np.ndarray) else type(picture).__name__
        raise InputError(f"source: {what}; expected a path, (height, width, 3) uint8 BGR pixels, a PIL image, a tensor "
                         "or a list of these")
    if picture.ndim == 2 or picture.shape[2] == 1:
        picture = np.repeat(picture.reshape(*picture.shape[:2], 1), 3, 2)
    return np.ascontiguousarray(picture[..., 2::-1])
