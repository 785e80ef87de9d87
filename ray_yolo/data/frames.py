"""Frames to detect in, one after the other: of files and streams, and of pixels that were handed over."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps

from ray_yolo.data.images import UnreadableImageError, check_image, read_image
from ray_yolo.data.media import Media, find_media, read_video
from ray_yolo.errors import InputError


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


class Source(NamedTuple):
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


def read_source(source: object) -> Source:
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
    return Source([(media if taken[media.stem] == 1 else media._replace(stem=f"{number}_{media.stem}"), pixels)
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
