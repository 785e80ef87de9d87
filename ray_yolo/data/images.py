"""Image files to arrays: what is read is upright, RGB, eight bits, or refused with a reason."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageOps

from ray_yolo.core.errors import DatasetError

cv2.setNumThreads(0)  # parallelism comes from processes and our own thread pools
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # what is wrong with a file is for the caller to tell

SUFFIXES = frozenset({".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".pfm", ".png", ".tif", ".tiff", ".webp"})
MIN_SIDE_PX = 10
MAX_PIXELS = 178_956_970  # Pillow's limit for decompression bombs
# OpenCV's bits of "a half, quarter, eighth"; with its bit of RGB they do not mean grey.
_REDUCED = {1: 0, 2: cv2.IMREAD_REDUCED_GRAYSCALE_2, 4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
            8: cv2.IMREAD_REDUCED_GRAYSCALE_8}
_TURNED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
# What Pillow may take a file for, whatever its suffix. The others are no pictures that cameras make, and one of them
# (EPS) starts a program to be drawn.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_JPEG, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_FILLED = 128  # grey of what a JPEG has no data for
_MORE = bytes(range(1, 255)) * 4
# What Pillow raises for damaged files, a decompression bomb apart.
_DAMAGE = (OSError, ValueError, SyntaxError, TypeError, KeyError, IndexError, OverflowError, struct.error)


class UnreadableImageError(DatasetError):
    """An image file that has to be left out; the message is the reason and does not repeat the path."""


def read_image(path: str | bytes, reduction: int = 1) -> np.ndarray:
    """The upright picture, (height, width, 3) uint8 RGB; grey is repeated, alpha dropped, 16 bits cut to 8.

    Args:
        path: of the file, or its content.
        reduction: 2, 4 or 8 gives a JPEG with sides so many times shorter, which costs less; 1 as it is.

    Raises:
        UnreadableImageError: if the file is no picture, is damaged or ends early.
    """
    content = np.frombuffer(path, np.uint8) if isinstance(path, bytes) else np.fromfile(path, np.uint8)
    if content.size and (image := _decode(path, content, reduction)) is not None:
        return image
    raise UnreadableImageError("is damaged or cut off")


def _decode(path: str | bytes, content: np.ndarray, reduction: int) -> np.ndarray | None:
    if _is_pfm(path):  # floats, which the plain decoder would truncate to black
        floats = cv2.imdecode(content, cv2.IMREAD_UNCHANGED)
        if floats is None:
            return None
        grey = np.nan_to_num(floats * 255.0, nan=0.0, posinf=255.0, neginf=0.0).clip(0, 255).astype(np.uint8)
        return cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB if grey.ndim == 2 else cv2.COLOR_BGR2RGB)
    way = cv2.IMREAD_COLOR_RGB
    if content[:2].tobytes() == _JPEG:  # others would be decoded in full and then resized
        way |= _REDUCED[reduction]
    try:
        image = cv2.imdecode(content, way)
    except cv2.error:
        image = None
    return image if image is not None else _decode_with_pillow(path)


def _is_pfm(path: str | bytes) -> bool:
    return isinstance(path, str) and path.lower().endswith(".pfm")


def _content(path: str | bytes) -> bytes:
    return path if isinstance(path, bytes) else Path(path).read_bytes()


def _open(path: str | bytes) -> Image.Image:
    return Image.open(io.BytesIO(path) if isinstance(path, bytes) else path, formats=_FORMATS)


def _decode_with_pillow(path: str | bytes) -> np.ndarray | None:
    """Second opinion for rare forms (32-bit TIFF) that OpenCV does not know."""
    try:
        with _open(path) as file:
            return np.array(ImageOps.exif_transpose(file).convert("RGB"))
    except (*_DAMAGE, Image.DecompressionBombError):
        return None


def check_image(path: str | bytes) -> tuple[int, int]:
    """(height, width) of the upright picture in a file, or in its content, from its header, after a look at the data.

    A JPEG is decoded at an eighth of its size, formats other than JPEG and PNG whole, to be sure.

    Raises:
        UnreadableImageError: saying why the file cannot be used.
    """
    if (len(path) if isinstance(path, bytes) else Path(path).stat().st_size) == 0:
        raise UnreadableImageError("is empty (0 bytes)")
    height, width, whole = _header(path)
    if height * width > MAX_PIXELS:
        raise UnreadableImageError(f"has {width} x {height} pixels, more than the {MAX_PIXELS} that are decoded")
    if min(height, width) < MIN_SIDE_PX:
        raise UnreadableImageError(f"has {width} x {height} pixels; both sides must have {MIN_SIDE_PX} or more")
    if whole:
        return height, width
    content = _content(path)
    if content.startswith(_JPEG) and (small := _eighth(content)) is not None:
        if _starves(content, small):
            raise UnreadableImageError("is grey from some place on: its data end before the picture does")
        return height, width
    if _decode_with_pillow(path) is None:  # Pillow alone refuses a picture that ends early in every version
        raise UnreadableImageError("is damaged or cut off")
    return read_image(path).shape[:2]


def _eighth(content: bytes) -> np.ndarray | None:
    """A JPEG at an eighth of its size, as it lies in the file; None if it is damaged."""
    try:
        with _open(content) as file:
            file.draft("L", (1, 1))
            return np.asarray(file)
    except _DAMAGE:
        return None


def _starves(content: bytes, small: np.ndarray) -> bool:
    """Whether a JPEG with an end marker has too little data before it: decoders go on in grey and say nothing.

    With more data before the marker such a picture is another one; a whole one, which may end in grey, stays as it is.
    """
    if (small[-1, -1] != _FILLED).any():
        return False
    end = content.rindex(_JPEG_END)
    fed = _eighth(content[:end] + _MORE + content[end:])
    return fed is None or not np.array_equal(small, fed)


def _header(path: str | bytes) -> tuple[int, int, bool]:
    """(height, width, known to be whole) from what the file says of itself."""
    try:
        with _open(path) as file:
            (width, height), kind = file.size, file.format
            if kind == "PNG":  # asking for EXIF would decode it, so it is left to the decoder where there is any
                whole = width * height <= MAX_PIXELS and b"eXIf" not in _content(path)
                file.verify()
                return height, width, whole
            turned = file.getexif().get(0x0112) in _TURNED
    except Image.DecompressionBombError:
        raise UnreadableImageError(f"has far more than the {MAX_PIXELS} pixels that are decoded") from None
    except _DAMAGE as error:
        if _is_pfm(path):
            return *read_image(path).shape[:2], True
        raise UnreadableImageError(f"is not an image that can be read ({type(error).__name__})") from None
    return *((width, height) if turned else (height, width)), False
