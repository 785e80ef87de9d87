"""The tags of a TIFF file, which describe how its pixels are stored.

Sources: TIFF 6.0, sections 2, 8 and 18; the BigTIFF design, for files whose places have 64 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

SUBFILE_TYPE, BITS, PHOTOMETRIC, SAMPLES, PLANES, EXTRA_SAMPLES = 254, 258, 262, 277, 284, 338
REDUCED = 1  # This bit of the subfile's type marks a smaller copy of another picture in the file.
_LETTERS = {1: "B", 3: "H", 4: "I", 16: "Q"}
"""A type of a value has this letter of `struct`. The types are integers of 8, 16, 32 and 64 bits."""
_MOST_TAGS, _MOST_VALUES = 1000, 1000
MIN_IS_WHITE, MIN_IS_BLACK = 0, 1
SEPARATE = 2
BLENDED, APART = 1, 2
"""These are the kinds of alpha among the extra samples: the colours are multiplied by it, or they are not."""


class _Layout(NamedTuple):
    """Where a kind of TIFF file has what."""

    order: str
    """`struct` has this character for the order of bytes."""
    place: str
    """`struct` has this letter for a place in the file."""
    place_of_start: int
    """The place of the first picture's tags is written here."""
    of_number: str
    """`struct` has this letter for the number of tags."""


_LAYOUTS = {b"II*\0": _Layout("<", "I", 4, "H"), b"MM\0*": _Layout(">", "I", 4, "H"),
            b"II+\0": _Layout("<", "Q", 8, "Q"), b"MM\0+": _Layout(">", "Q", 8, "Q")}


def tags_of(content: bytes) -> Mapping[int, tuple[int, ...]]:
    """The whole-number tags of the first picture, by number; empty for files of other formats, and for damaged ones."""
    layout = _LAYOUTS.get(content[:4])
    if layout is None:
        return {}
    order = layout.order
    place_bytes = struct.calcsize(f"{order}{layout.place}")
    entry = f"{order}HH{layout.place}"  # tag, type, number of values; the values or their place follow
    entry_bytes = struct.calcsize(entry) + place_bytes
    tags: dict[int, tuple[int, ...]] = {}
    try:
        (start,) = struct.unpack_from(f"{order}{layout.place}", content, layout.place_of_start)
        (num_tags,) = struct.unpack_from(f"{order}{layout.of_number}", content, start)
        first = start + struct.calcsize(f"{order}{layout.of_number}")
        for number in range(min(num_tags, _MOST_TAGS)):
            place = first + number * entry_bytes
            tag, kind, num_values = struct.unpack_from(entry, content, place)
            letter = _LETTERS.get(kind)
            if letter is None or num_values > _MOST_VALUES:
                continue
            values = f"{order}{num_values}{letter}"
            place += struct.calcsize(entry)
            if struct.calcsize(values) > place_bytes:  # then the entry has the place of the values instead
                (place,) = struct.unpack_from(f"{order}{layout.place}", content, place)
            tags[tag] = struct.unpack_from(values, content, place)
    except (struct.error, OverflowError):  # the latter: a place that no file has
        return {}
    return tags


def has_alpha_apart(content: bytes) -> bool:
    """Whether a TIFF file's 8-bit colours have an alpha by which they are not multiplied. OpenCV multiplies them."""
    tags = tags_of(content)
    return APART in tags.get(EXTRA_SAMPLES, ()) and max(tags.get(BITS, (1,)), default=1) <= 8


def why_misread(content: bytes) -> str:
    """Why the picture of a TIFF file would be decoded as another one; '' if it would not.

    OpenCV 5.0 reads beyond the first plane of deep pixels in separate planes, only the first of several bands that have
    no colours, and deep pixels whose least value is white as if it were black.
    """
    tags = tags_of(content)
    (subfile_type,) = tags.get(SUBFILE_TYPE, (0,))[:1] or (0,)
    if subfile_type & REDUCED:  # a camera's DNG has such
        return "begins with a preview of its picture, and only the first one is read; export it as JPEG, PNG or TIFF"
    is_deep = max(tags.get(BITS, (1,)), default=1) > 8
    if tags.get(PLANES) == (SEPARATE,) and tags.get(SAMPLES, (1,)) != (1,) and is_deep:
        return "has separate planes of more than 8 bits, which are not read; save it with its channels interleaved"
    (num_samples,) = tags.get(SAMPLES, (1,))[:1] or (1,)
    num_alpha = sum(kind in (BLENDED, APART) for kind in tags.get(EXTRA_SAMPLES, ()))
    num_bands = num_samples - num_alpha  # other extra samples are bands whose meaning is not stated
    if tags.get(PHOTOMETRIC) == (MIN_IS_WHITE,) and is_deep:
        return "has more than 8 bits whose least value is white (MinIsWhite), which are not read; save it as MinIsBlack"
    if tags.get(PHOTOMETRIC) == (MIN_IS_BLACK,) and num_bands > 1:
        return f"has {num_bands} bands without colours (MinIsBlack), which are not read; save it as RGB or as grey"
    return ""
