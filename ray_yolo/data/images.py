"""Decode image files to upright 8-bit RGB arrays, or refuse them with a reason."""

from __future__ import annotations

import io
import re
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ray_yolo.core.errors import DatasetError
from ray_yolo.core.files import read_patiently
from ray_yolo.core.structures import PixelValues
from ray_yolo.data.pixels import OWN_RANGE, PixelRange, three_channels, to_levels, values_of
from ray_yolo.data.tiff import has_alpha_apart, why_misread
from ray_yolo.labels.files import OPTIONAL_FORMATS, SUFFIXES

cv2.setNumThreads(0)  # parallelism comes from processes and our own thread pools
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # the caller reports damaged files
MIN_SIDE_PX = 10
MAX_PIXELS = 178_956_970  # Pillow takes an image with more for a decompression bomb.
# OpenCV's flags for a half, quarter and eighth; combined with RGB they do not mean grey.
_REDUCED = {1: 0, 2: cv2.IMREAD_REDUCED_GRAYSCALE_2, 4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
            8: cv2.IMREAD_REDUCED_GRAYSCALE_8}
_ORIENTATION = 0x0112  # EXIF has the orientation under this tag.
_TURNED = (5, 6, 7, 8)  # These orientations of EXIF exchange width and height.
# The formats that Pillow may detect, for any suffix. EPS would start a program.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP", *OPTIONAL_FORMATS)
_UNREAD = {  # These bytes, at these places, identify files of other formats.
    (4, b"ftyphei"): "HEIC", (4, b"ftypmif1"): "HEIF", (4, b"ftypavif"): "AVIF", (128, b"DICM"): "DICOM",
    (0, b"v/1\x01"): "OpenEXR", (0, b"#?RADIANCE"): "Radiance HDR", (0, b"8BPS"): "Photoshop",
    (0, b"\xff\x0a"): "JPEG XL", (0, b"\0\0\0\x0cJXL "): "JPEG XL", (0, b"\0\0\0\x0cjP"): "JPEG 2000",
    (0, b"%PDF"): "PDF", (0, b"<svg"): "SVG", (0, b"<?xml"): "XML", (0, b"<!DOCTYPE"): "HTML",
    (0, b"version https://git-lfs"): "of a pointer of Git LFS (run `git lfs pull`)"}
_PNM = re.compile(rb"P[56](?:\s|#[^\n]*\n)+\d+(?:\s|#[^\n]*\n)+\d+(?:\s|#[^\n]*\n)+(\d+)")  # width, height, white
_PNM_BYTES = 1024  # A header with its comments has so many at most.
_JPEG, _JPEG_DATA, _JPEG_END, _AVIF = b"\xff\xd8", b"\xff\xda", b"\xff\xd9", b"ftypav"
_PNG_DEPTH, _HEAD = 24, 256
"""A PNG has its bits per channel at the first place; as many bytes as the second identify a format."""
_OPENCV_ONLY = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"PF\n", b"Pf\n")  # TIFF of float RGB or of 64 bits, PFM
_FILLED = (127, 128)  # A decoder shows missing JPEG data as these greys; 127 is 128 of inverted CMYK.
_MORE = bytes(range(1, 255)) * 4
DECODERS = (Image.__version__, cv2.__version__, *sorted(SUFFIXES))
"""What decides which files can be decoded, and to which pixels; part of the key of all that is cached of them."""
DAMAGED_SHARE = 0.1  # Above this share of the images, they are not a few damaged files: the storage fails.
_FEW_DAMAGED, _MANY_IMAGES = 4, 200
# Errors of Pillow for damaged content, except decompression bombs. It reads from memory, so an OSError is one of them.
_DAMAGE = (OSError, ValueError, SyntaxError, TypeError, KeyError, IndexError, OverflowError, RuntimeError,
           struct.error)


class UnreadableImageError(DatasetError):
    """An unusable image file; the message is the reason without the path."""


class UnreachableImageError(UnreadableImageError):
    """The bytes of an image file cannot be read, after several tries: a failure of the storage, or the file is gone.

    This says nothing about the image, so nothing may record it as a property of the image.
    """


class ImageFacts(NamedTuple):
    """The findings of the check of a usable image."""

    size: tuple[int, int]
    """The upright image has this (height, width)."""
    values: PixelValues | None = None
    """An image with more than 8 bits has these values."""
    notes: tuple[str, ...] = ()
    """These are remarks about the image's contents."""


def read_image(path: str | bytes, reduction: int = 1, pixel_range: PixelRange = OWN_RANGE) -> np.ndarray:
    """The upright image, (height, width, 3) uint8 RGB; grey is repeated, alpha dropped, the first frame read.

    Args:
        path: of the file, or its content.
        reduction: 2, 4 or 8 decodes a JPEG faster, with its sides divided by it; 1: full size.
        pixel_range: of images with more than 8 bits; without it, each has its own range (see `pixels.to_levels`).

    Raises:
        UnreadableImageError: if the file is not an image, is damaged or ends early.
        UnreachableImageError: as in `read_content`.
    """
    return to_levels(_read_values(read_content(path), reduction), pixel_range)


def read_content(path: str | bytes) -> bytes:
    """The bytes of an image file. Every reader of image files gets them here, so it meets only two errors.

    path: of the file, or its content.

    Raises:
        UnreachableImageError: if the file is gone, or storage fails in each of three tries.
    """
    if isinstance(path, bytes):
        return path
    try:
        return read_patiently(lambda file: Path(file).read_bytes(), path)
    except OSError as error:
        raise UnreachableImageError(f"cannot be read: {error.strerror}") from error


def has_too_many(damaged: int, tried: int, images: int) -> bool:
    """Whether so many of the images that were tried are damaged that training must not go on without them.

    They are all images, or more than `DAMAGED_SHARE` of those tried. A few are allowed in any case, and the share is
    not taken of the first images alone.

    images: of the whole split.
    """
    return damaged == images or damaged > max(_FEW_DAMAGED, DAMAGED_SHARE * max(tried, min(images, _MANY_IMAGES)))


def _read_values(source: bytes, reduction: int = 1) -> np.ndarray:
    """The upright image in the content of a file, (height, width, 3) RGB, with the file's own values, of any type.

    reduction: as in `read_image`.
    """
    content = np.frombuffer(source, np.uint8)
    if not content.size:  # OpenCV raises for an empty buffer
        raise UnreadableImageError("is damaged or cut off")
    image = _decode(content, reduction)
    if image is None:
        image = _decode_with_pillow(source)
    if image is None:  # OpenCV reads a TIFF of 64-bit floats only without conversions
        image = _channels_reversed(_imdecode(content, cv2.IMREAD_UNCHANGED))
    if image is None:
        raise UnreadableImageError("is damaged or cut off")
    return image


def _decode(content: np.ndarray, reduction: int) -> np.ndarray | None:
    if content[:2].tobytes() == _JPEG:  # OpenCV would decode others in full and resize them
        return _imdecode(content, cv2.IMREAD_COLOR_RGB | _REDUCED[reduction])
    if content[4:10].tobytes() == _AVIF:  # OpenCV would not turn it
        return None
    if _is_dark_pnm(content[:_PNM_BYTES].tobytes()):  # OpenCV would not scale it
        return None
    if content[:2].tobytes() in (b"II", b"MM") and has_alpha_apart(content.tobytes()):
        return None
    image = _imdecode(content, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_ANYDEPTH)
    if image is None or image.dtype == np.uint8:
        return image
    # Decoded again: OpenCV 5.0 swaps the channels of 16-bit TIFFs wrongly.
    return _channels_reversed(_imdecode(content, cv2.IMREAD_COLOR_BGR | cv2.IMREAD_ANYDEPTH))


def _is_dark_pnm(header: bytes) -> bool:
    """Whether a binary PGM or PPM file has a white below 255."""
    match = _PNM.match(header)
    return match is not None and int(match[1]) < 255


def _imdecode(content: np.ndarray, flags: int) -> np.ndarray | None:
    try:
        return cv2.imdecode(content, flags)
    except cv2.error:
        return None


def _channels_reversed(image: np.ndarray | None) -> np.ndarray | None:
    """OpenCV's grey, BGR or BGRA as RGB; None for other numbers of channels."""
    if image is None:
        return None
    if image.ndim == 2 or image.shape[2] == 1:
        return three_channels(image)
    return np.ascontiguousarray(image[..., 2::-1]) if image.shape[2] in (3, 4) else None


def _open(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content), formats=FORMATS)


def _decode_with_pillow(content: bytes) -> np.ndarray | None:
    """Fallback for rare formats (32-bit TIFF) that OpenCV does not support."""
    try:
        with _open(content) as file:
            return values_of_picture(file)
    except (*_DAMAGE, Image.DecompressionBombError):
        return None


def values_of_picture(picture: Image.Image) -> np.ndarray:
    """The upright RGB values (height, width, 3) of a Pillow image: uint8, or the type of a deeper grey image."""
    upright = ImageOps.exif_transpose(picture)
    if upright.mode in ("I", "F") or upright.mode.startswith("I;16"):  # Pillow would clip them to 8 bits
        return three_channels(np.array(upright))
    return np.array(upright.convert("RGB"))


def check_image(path: str | bytes) -> tuple[int, int]:
    """(height, width) of the upright image in a file, or in its content, after a check of the data.

    Raises:
        UnreadableImageError: with the reason.
    """
    return inspect_image(path).size


def inspect_image(path: str | bytes) -> ImageFacts:
    """The facts about the image in a file, or in its content, after a check of the data.

    A JPEG is decoded at an eighth of its size, formats other than JPEG and PNG in full.

    Raises:
        UnreadableImageError: with the reason.
        UnreachableImageError: as in `read_content`.
    """
    content = read_content(path)
    if not content:
        raise UnreadableImageError("is empty (0 bytes)")
    header = _header(content)
    if header is None or header.is_tiff:
        problem = why_misread(content)
        if problem:
            raise UnreadableImageError(problem)
    if header is None:  # Pillow does not know this type of TIFF or PFM
        return _facts(_read_values(content), frames=1)
    height, width = header.size
    if height * width > MAX_PIXELS:
        raise UnreadableImageError(f"has {width} x {height} pixels, more than the {MAX_PIXELS} that are decoded; "
                                   "cut it into tiles")
    _check_sides(height, width)
    if header.complete:
        return ImageFacts(header.size, notes=_frame_notes(header.frames))
    small = _eighth(content) if content.startswith(_JPEG) else None
    if small is not None:
        end = _end_of_jpeg(content)
        if end < 0:  # a decoder that finds padding takes it for the missing data
            raise UnreadableImageError("is damaged or cut off")
        if _is_truncated(content, end, small):
            raise UnreadableImageError("is grey from some point on: its data end before the image does")
        return ImageFacts(header.size)
    if _decode_with_pillow(content) is None:  # only Pillow refuses truncated images in every version
        raise UnreadableImageError("is damaged or cut off")
    return _facts(_read_values(content), header.frames)


def _check_sides(height: int, width: int) -> None:
    if min(height, width) < MIN_SIDE_PX:
        raise UnreadableImageError(f"has {width} x {height} pixels; both sides must have {MIN_SIDE_PX} or more")


def _facts(pixels: np.ndarray, frames: int) -> ImageFacts:
    height, width = pixels.shape[:2]
    _check_sides(height, width)
    values, notes = values_of(pixels), _frame_notes(frames)
    for missing in values.no_data if values else ():
        number = int((pixels == missing).any(axis=2).sum())
        notes = (*notes, f"has {number} pixels of the value {missing:g}, far from all others: taken as no data")
    if pixels.dtype.kind == "f":
        if values is None:
            raise UnreadableImageError("has no pixel with a finite value")
        is_strange = (~np.isfinite(pixels)).any(axis=2)  # (height, width)
        strange = int(is_strange.sum())
        if strange:
            notes = (*notes, f"has {strange} pixels that are NaN or infinite; NaN is read as black")
    return ImageFacts((height, width), values, notes)


def _frame_notes(frames: int) -> tuple[str, ...]:
    if frames <= 1:
        return ()
    return (f"has {frames} frames or pages; only the first one is read",)


def _eighth(content: bytes) -> np.ndarray | None:
    """A JPEG at an eighth of its size, in stored orientation; None if it is damaged."""
    try:
        with _open(content) as file:
            file.draft("L", (1, 1))
            return np.asarray(file)
    except _DAMAGE:
        return None


def _end_of_jpeg(content: bytes) -> int:
    """The place of a JPEG's end marker; -1 if it has none. A preview in its header has another one."""
    at = len(_JPEG)
    while content[at:at + 1] == _JPEG_DATA[:1] and content[at:at + 2] != _JPEG_DATA:
        is_fill = content[at + 1:at + 2] == _JPEG_DATA[:1]
        at += 1 if is_fill else 2 + int.from_bytes(content[at + 2:at + 4])  # the marker and its segment
    return content.find(_JPEG_END, at)


def _is_truncated(content: bytes, end: int, small: np.ndarray) -> bool:
    """Whether a JPEG with an end marker at `end` lacks data before it: decoders silently continue in grey.

    Extra data before the marker changes a truncated image, but not a complete one, which may end in grey too.
    """
    if not np.isin(small[-1, -1], _FILLED).all():
        return False
    extended = _eighth(content[:end] + _MORE + content[end:])
    return extended is None or not np.array_equal(small, extended)


class _Header(NamedTuple):
    size: tuple[int, int]
    complete: bool
    """All facts are known without decoding, and the pixels are levels."""
    frames: int = 1
    is_tiff: bool = False


def _orientation(picture: Image.Image) -> object:
    """The orientation that the decoder follows. OpenCV's looks at EXIF alone, as browsers do, Pillow's also at XMP."""
    if picture.format not in ("JPEG", "MPO", "WEBP"):
        return picture.getexif().get(_ORIENTATION)
    return _exif_orientation(picture.info.get("exif", b""))


def _exif_orientation(exif: bytes) -> int:
    """The orientation in EXIF data; 0 without one. For OpenCV it is the first two bytes of its value, of any type."""
    data = exif.removeprefix(b"Exif\0\0")
    order = "<" if data.startswith(b"II") else ">"
    with suppress(struct.error):  # the data end early
        start, = struct.unpack_from(f"{order}I", data, 4)
        entries, = struct.unpack_from(f"{order}H", data, start)
        for number in range(entries):
            tag, value = struct.unpack_from(f"{order}H6xH", data, start + 2 + 12 * number)  # type and count between
            if tag == _ORIENTATION:
                return int(value)
    return 0


def _header(content: bytes) -> _Header | None:
    """The facts in a file's header; None for a file that only OpenCV may decode."""
    try:
        with _open(content) as file:
            width, height = file.size
            kind = file.format
            frames = 1 if kind in ("JPEG", "MPO") else getattr(file, "n_frames", 1)  # MPO: previews
            if kind == "PNG":
                may_be_turned = b"eXIf" in content  # reading EXIF would decode it, which is left to the decoder
                is_deep = content[_PNG_DEPTH] > 8
                complete = width * height <= MAX_PIXELS and not may_be_turned and not is_deep
                file.verify()  # the checksums
                return _Header((height, width), complete, frames)
            turned = _orientation(file) in _TURNED
    except Image.DecompressionBombError:
        raise UnreadableImageError(f"has far more than the {MAX_PIXELS} pixels that are decoded; cut it into "
                                   "tiles") from None
    except _DAMAGE as error:
        head = content[:_HEAD]
        if head.startswith(_OPENCV_ONLY):
            return None
        for (place, sign), name in _UNREAD.items():
            if head.startswith(sign, place):
                raise UnreadableImageError(f"has the format {name}, which is not read; use JPEG or PNG") from None
        if isinstance(error, SyntaxError):  # Pillow's for PNG files with wrong checksums
            raise UnreadableImageError("is damaged: the checksum (CRC) of a part of this PNG file is wrong") from None
        if isinstance(error, UnidentifiedImageError):
            raise UnreadableImageError("is not an image that can be read (UnidentifiedImageError)") from None
        raise UnreadableImageError(f"is damaged or cut off ({error})") from None
    size = (width, height) if turned else (height, width)
    return _Header(size, complete=False, frames=frames, is_tiff=kind == "TIFF")
