"""Input sources of prediction: files, streams and arrays as a sequence of frames."""

from __future__ import annotations

import glob
import io
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from PIL import Image

from ray_yolo.core.errors import DatasetError, InputError
from ray_yolo.core.formatting import encodable
from ray_yolo.core.redact import redact
from ray_yolo.data.images import UnreadableImageError, inspect_image, read_content, read_image, values_of_picture
from ray_yolo.data.pixels import OWN_RANGE, PixelRange, three_channels, to_levels
from ray_yolo.labels.files import SUFFIXES, UNREAD_SUFFIXES, files_of, suffix
from ray_yolo.labels.notes import counted

VIDEO_SUFFIXES = frozenset({".3gp", ".asf", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg",
                            ".mts", ".ts", ".webm", ".wmv"})
_MISSING = 0.05  # A video may lack this share of its frames: OpenCV estimates a number that the file does not have.
_ROUNDED = 0.5 / 255  # Values of a tensor that are so far outside of 0..1 still round to the same byte.
USUAL_RATE = 30.0  # A video without a rate has so many frames per second.
_WEB = re.compile(r"https?://", re.IGNORECASE)
_STREAM = re.compile(r"(?:rtsps?|rtmps?|https?|udp|tcp)://", re.IGNORECASE)
_log = logging.getLogger(__name__)


class Media(NamedTuple):
    """One file or stream to detect in."""

    path: str
    """It is an absolute path, the address of a stream, or the number of a camera."""
    name: str
    """It is the path below the common folder of the source's files."""
    stem: str
    """Results have this name, which is unique in a source: `name` without its suffix, if that is unique."""

    @property
    def is_video(self) -> bool:
        """Whether it consists of frames."""
        return self.is_stream or suffix(self.path) in VIDEO_SUFFIXES

    @property
    def is_stream(self) -> bool:
        """Whether it is a camera or a network stream, which may not end."""
        return _is_number(self.path) or bool(_STREAM.match(self.path))


def _is_number(path: str) -> bool:
    """Whether a source is the number of a camera."""
    return path.isascii() and path.isdecimal()  # int() refuses the ² that `isdigit` takes


def find_media(source: str) -> list[Media]:
    """Find the images and videos of a source: a folder (recursively, without hidden files), a file, a pattern or a
    list. A stream is one medium.

    Raises:
        InputError: if there are none, or the list names a file that does not exist.
    """
    if _STREAM.match(source) or (_is_number(source) and not os.path.exists(source)):
        shown = redact(source)
        if _WEB.match(source) and suffix(source.partition("?")[0]) in SUFFIXES:
            raise InputError(f"source: {shown}: is the address of a picture, and addresses are read as videos; save "
                             "the picture, and give its path")
        return [Media(source, shown, re.sub(r"\W+", "_", shown.partition("?")[0]).strip("_"))]
    kinds = SUFFIXES | VIDEO_SUFFIXES
    try:
        files = files_of(source)
    except DatasetError as error:
        raise InputError(f"source: {error}") from None
    if not files and not os.path.exists(source):
        what = "no file matches this pattern" if glob.has_magic(source) else "no such file or folder"
        raise InputError(f"source: {source}: {what}")
    paths = sorted({os.path.abspath(path) for path in files if suffix(path) in kinds and _is_file_or_broken(path)})
    unread = sorted(path for path in files if suffix(path) in UNREAD_SUFFIXES)
    note = f"{counted(unread, 'picture')} in formats that are not read; use JPEG or PNG" if unread else ""
    if not paths:
        raise InputError(f"source: no images and no videos in {source} (looked for {', '.join(sorted(kinds))})"
                         f"{note and f'; {note}'}")
    if note:
        _log.warning("source: %s", note)
    root = source if os.path.isdir(source) else os.path.commonpath([os.path.dirname(path) for path in paths])
    names = [os.path.relpath(path, root) for path in paths]
    stems = unique_stems(names)
    return [Media(path, name, stem) for path, name, stem in zip(paths, names, stems, strict=True)]


def _is_file_or_broken(path: str) -> bool:
    """Whether a path is a file, or a link to none: its frame has the error then."""
    return os.path.isfile(path) or (os.path.islink(path) and not os.path.exists(path))


def unique_stems(names: list[str]) -> list[str]:
    """Each name without its suffix, or with it where results of two files would collide.

    Frame 1 of `clip.mp4` is named clip_1: beside an image `clip_1.jpg` the video keeps its suffix.
    """
    stems = [os.path.splitext(name)[0] for name in names]
    taken = Counter([*stems, *names])  # a name without suffix may equal another one's stem
    like_frames = {stem.rpartition("_")[0] for stem in stems if re.search(r"_\d+$", stem)}
    unique = []
    for name, stem in zip(names, stems, strict=True):
        like_own_frame = suffix(name) in VIDEO_SUFFIXES and stem in like_frames
        unique.append(name if taken[stem] > 1 or like_own_frame else stem)
    return unique


@contextmanager
def _plain_path(path: str) -> Iterator[str]:
    """The path of a video in UTF-8; a link to it if its name is in another encoding, with which OpenCV crashes."""
    if encodable(path) == path:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        link = os.path.join(folder, f"video{suffix(path)}")
        os.symlink(path, link)
        yield link


def read_video(path: str) -> Iterator[np.ndarray]:
    """The frames of a video, a stream or a camera, (height, width, 3) uint8 RGB, upright.

    A file with fewer frames than its length and its rate give is a warning: it may be damaged or cut short.

    Raises:
        UnreadableImageError: if there is none.
    """
    with _plain_path(path) as plain:
        video = cv2.VideoCapture(int(path)) if _is_number(path) else cv2.VideoCapture(plain, cv2.CAP_FFMPEG)
        try:
            ok, frame = video.read()
            if not ok:
                raise UnreadableImageError("is not a video that can be read")
            stated = video.get(cv2.CAP_PROP_FRAME_COUNT) if os.path.isfile(path) else 0
            count = 0
            while ok:
                count += 1
                yield cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
                ok, frame = video.read()
            if stated - count > max(1, _MISSING * stated):
                _log.warning("%s: only %d of %d frames, by its length and rate, can be read; it may be damaged or cut "
                             "short", path, count, stated)
        finally:
            video.release()


def frames_per_second(path: str) -> float:
    """The rate of a video file; 30 if unknown."""
    with _plain_path(path) as plain:
        video = cv2.VideoCapture(plain, cv2.CAP_FFMPEG)
        rate = float(video.get(cv2.CAP_PROP_FPS))
        video.release()
    return rate if 0 < rate < 1000 else USUAL_RATE


class Frame(NamedTuple):
    """An image, or a frame of a video."""

    media: Media
    number: int | None = None
    """The frame has this number in its video, from 1."""
    pixels: np.ndarray | None = None
    """These are RGB values (height, width, 3). None: they are not read yet."""
    content: bytes | None = None
    """The file has these bytes. None: they are read from the path."""
    error: str = ""
    """The frame cannot be read for this reason."""

    def read(self, pixel_range: PixelRange = OWN_RANGE) -> Frame:
        """The frame with its pixels as uint8 levels, or with its error."""
        if self.error:
            return self
        if self.pixels is not None:
            return self._replace(pixels=to_levels(self.pixels, pixel_range))
        try:
            content = read_content(self.media.path if self.content is None else self.content)
            for note in inspect_image(content).notes:
                _log.warning("%s: %s", self.media.path, note)
            return self._replace(pixels=read_image(content, pixel_range=pixel_range))
        except UnreadableImageError as error:
            return self._replace(error=str(error))


class InputSource(NamedTuple):
    """The parsed input of a prediction."""

    parts: Sequence[tuple[Media, np.ndarray | bytes | None]]
    """Beside a medium are its pixels or a file's bytes, if the input holds them. None: they are read from its path."""

    @property
    def alone(self) -> bool:
        """Whether there is nothing to parallelize: one image, or a live stream."""
        media = [part[0] for part in self.parts]
        if any(each.is_stream for each in media):
            return True
        return len(media) == 1 and not media[0].is_video

    def frames(self, stride: int = 1) -> Iterator[Frame]:
        """In the given order: the images, files not read yet, and every `stride`-th frame of videos from the first on.
        """
        for media, pixels in self.parts:
            if isinstance(pixels, bytes):
                yield Frame(media, content=pixels)
                continue
            if pixels is not None or not media.is_video:
                yield Frame(media, pixels=pixels)
                continue
            try:
                numbered = enumerate(read_video(media.path), 1)
                for number, frame in islice(numbered, 0, None, stride):
                    yield Frame(media, number, frame)
            except UnreadableImageError as error:
                yield Frame(media, error=str(error))


def read_source(source: object) -> InputSource:
    """Parse one input or a list of inputs. Each is one of

    - an argument of `find_media` (path, folder, pattern, list file, camera number, address of a stream): str, Path, int
    - an array (height, width, 3) uint8 BGR as in OpenCV, or grey, or BGRA
    - a PIL image
    - the content of an image file: bytes, or a binary file such as io.BytesIO, which is read to its end
    - a tensor (B, 3, height, width) or (3, height, width) RGB in 0..1, which is rounded to eight bits

    Raises:
        InputError: for anything else.
    """
    inputs = list(source) if isinstance(source, list | tuple) else [source]
    found: list[tuple[Media, np.ndarray | bytes | None]] = []
    for number, value in enumerate(inputs):
        found += _media_or_pixels(value, number)
    taken = Counter(media.stem for media, _ in found)
    parts = []
    for number, (media, pixels) in enumerate(found):
        if taken[media.stem] > 1:  # several inputs have this stem
            media = media._replace(stem=f"{number}_{media.stem}")
        parts.append((media, pixels))
    return InputSource(parts)


def _media_or_pixels(value: object, number: int) -> list[tuple[Media, np.ndarray | bytes | None]]:
    """The files of one input, or its images with their pixels or content; `number` is the input's."""
    if isinstance(value, str | Path | int):
        return [(media, None) for media in find_media(str(value))]
    images: Sequence[np.ndarray | bytes]
    if isinstance(value, bytes | bytearray | memoryview):
        images = [bytes(value)]
    elif isinstance(value, io.BufferedIOBase):
        images = [value.read()]
    elif isinstance(value, torch.Tensor):
        batch = value if value.ndim == 4 else value[None]
        images = [_from_tensor(image) for image in batch]
    elif isinstance(value, Image.Image):
        images = [values_of_picture(value)]
    else:
        images = [_from_array(value)]
    parts: list[tuple[Media, np.ndarray | bytes | None]] = []
    for position, pixels in enumerate(images):
        name = f"image{number}" if len(images) == 1 else f"image{number}_{position}"
        parts.append((Media(f"{name}.jpg", f"{name}.jpg", name), pixels))
    return parts


def _from_tensor(picture: torch.Tensor) -> np.ndarray:
    """(height, width, 3) uint8 of a tensor (3, height, width) in 0..1; both are RGB."""
    is_image = picture.ndim == 3 and len(picture) == 3 and picture.numel() > 0
    if not is_image or not picture.is_floating_point():
        raise InputError(f"source: a tensor of {picture.dtype} {tuple(picture.shape)}; expected floats (B, 3, height, "
                         "width) in 0..1")
    low, high = (float(limit) for limit in picture.detach().aminmax())
    if not (low >= -_ROUNDED and high <= 1 + _ROUNDED):  # also NaN
        raise InputError(f"source: a tensor with values from {low:g} to {high:g}; expected 0..1 (divide 0..255 by 255, "
                         "and undo a normalisation by mean and deviation)")
    scaled = picture.detach().cpu().float().clamp(0, 1) * 255
    return np.ascontiguousarray(scaled.round().byte().permute(1, 2, 0).numpy())


def _from_array(picture: Any) -> np.ndarray:
    if not isinstance(picture, np.ndarray):
        raise _unknown_input(type(picture).__name__)
    has_image_shape = picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] in (1, 3, 4))
    if picture.dtype != np.uint8 or picture.size == 0 or not has_image_shape:
        raise _unknown_input(f"{picture.dtype} {picture.shape}")
    if picture.ndim == 2 or picture.shape[2] == 1:
        return three_channels(picture)
    return np.ascontiguousarray(picture[..., 2::-1])  # BGR or BGRA to RGB


def _unknown_input(what: str) -> InputError:
    return InputError(f"source: {what}; expected a path, (height, width, 3) uint8 BGR pixels, a PIL image, a tensor, "
                      "the bytes of a file, or a list of these")
