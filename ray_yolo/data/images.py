"""Decode image files to upright 8-bit RGB arrays, or refuse them with a reason."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageOps

from ray_yolo.core.errors import DatasetError

cv2.setNumThreads(0)  # parallelism comes from processes and our own thread pools
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # the caller reports damaged files

SUFFIXES = frozenset({".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".pfm", ".png", ".tif", ".tiff", ".webp"})
MIN_SIDE_PX = 10
MAX_PIXELS = 178_956_970  # Pillow's limit for decompression bombs
# OpenCV's flags for a half, quarter and eighth; combined with RGB they do not mean grey.
_REDUCED = {1: 0, 2: cv2.IMREAD_REDUCED_GRAYSCALE_2, 4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
            8: cv2.IMREAD_REDUCED_GRAYSCALE_8}
_TURNED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
# The formats that Pillow may detect, for any suffix. Cameras do not write others, and EPS would start a program.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_JPEG, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_FILLED = 128  # grey of missing JPEG data
_MORE = bytes(range(1, 255)) * 4
# Errors of Pillow for damaged files, except decompression bombs.
_DAMAGE = (OSError, ValueError, SyntaxError, TypeError, KeyError, IndexError, OverflowError, struct.error)


class UnreadableImageError(DatasetError):
    """An unusable image file; the message is the reason without the path."""


def read_image(path: str | bytes, reduction: int = 1) -> np.ndarray:
    """The upright image, (height, width, 3) uint8 RGB; grey is repeated, alpha dropped, 16 bits cut to 8.

    Args:
        path: of the file, or its content.
        reduction: 2, 4 or 8 decodes a JPEG faster, with its sides divided by it; 1: full size.

    Raises:
        UnreadableImageError: if the file is not an image, is damaged or ends early.
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
    flags = cv2.IMREAD_COLOR_RGB
    if content[:2].tobytes() == _JPEG:  # OpenCV would decode others in full and resize them
        flags |= _REDUCED[reduction]
    try:
        image = cv2.imdecode(content, flags)
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
    """Fallback for rare formats (32-bit TIFF) that OpenCV does not support."""
    try:
        with _open(path) as file:
            return np.array(ImageOps.exif_transpose(file).convert("RGB"))
    except (*_DAMAGE, Image.DecompressionBombError):
        return None


def check_image(path: str | bytes) -> tuple[int, int]:
    """(height, width) of the upright image in a file, or in its content, after a check of the data.

    A JPEG is decoded at an eighth of its size, formats other than JPEG and PNG in full.

    Raises:
        UnreadableImageError: with the reason.
    """
    if (len(path) if isinstance(path, bytes) else Path(path).stat().st_size) == 0:
        raise UnreadableImageError("is empty (0 bytes)")
    height, width, complete = _header(path)
    if height * width > MAX_PIXELS:
        raise UnreadableImageError(f"has {width} x {height} pixels, more than the {MAX_PIXELS} that are decoded")
    if min(height, width) < MIN_SIDE_PX:
        raise UnreadableImageError(f"has {width} x {height} pixels; both sides must have {MIN_SIDE_PX} or more")
    if complete:
        return height, width
    content = _content(path)
    if content.startswith(_JPEG) and (small := _eighth(content)) is not None:
        if _is_truncated(content, small):
            raise UnreadableImageError("is grey from some point on: its data end before the image does")
        return height, width
    if _decode_with_pillow(path) is None:  # only Pillow refuses truncated images in every version
        raise UnreadableImageError("is damaged or cut off")
    return read_image(path).shape[:2]


def _eighth(content: bytes) -> np.ndarray | None:
    """A JPEG at an eighth of its size, in stored orientation; None if it is damaged."""
    try:
        with _open(content) as file:
            file.draft("L", (1, 1))
            return np.asarray(file)
    except _DAMAGE:
        return None


def _is_truncated(content: bytes, small: np.ndarray) -> bool:
    """Whether a JPEG with an end marker lacks data before it: decoders silently continue in grey.

    Extra data before the marker changes a truncated image, but not a complete one, which may end in grey too.
    """
    if (small[-1, -1] != _FILLED).any():
        return False
    end = content.rindex(_JPEG_END)
    extended = _eighth(content[:end] + _MORE + content[end:])
    return extended is None or not np.array_equal(small, extended)


def _header(path: str | bytes) -> tuple[int, int, bool]:
    """(height, width, known to be complete) from the file's header."""
    try:
        with _open(path) as file:
            (width, height), kind = file.size, file.format
            if kind == "PNG":  # reading EXIF would decode it, so a file with EXIF is left to the decoder
                complete = width * height <= MAX_PIXELS and b"eXIf" not in _content(path)
                file.verify()
                return height, width, complete
            turned = file.getexif().get(0x0112) in _TURNED
    except Image.DecompressionBombError:
        raise UnreadableImageError(f"has far more than the {MAX_PIXELS} pixels that are decoded") from None
    except _DAMAGE as error:
        if _is_pfm(path):
            return *read_image(path).shape[:2], True
        if isinstance(error, SyntaxError):  # Pillow's for PNG files with wrong checksums
            raise UnreadableImageError("is damaged: the checksum (CRC) of a part of this PNG file is wrong") from None
        raise UnreadableImageError(f"is not an image that can be read ({type(error).__name__})") from None
    return *((width, height) if turned else (height, width)), False
