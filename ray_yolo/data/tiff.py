"""The tags of a TIFF file, which describe how its pixels are stored. Source: TIFF 6.0, sections 2 and 8."""

from __future__ import annotations

import struct
from collections.abc import Mapping

SUBFILE_TYPE, BITS, PHOTOMETRIC, SAMPLES, PLANES, EXTRA_SAMPLES = 254, 258, 262, 277, 284, 338
REDUCED = 1  # bit of the subfile's type: a smaller copy of another picture in the file
_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_LETTERS = {1: "B", 3: "H", 4: "I"}  # of `struct`, by type of a value: bytes, 16-bit and 32-bit integers
_ENTRY_BYTES = 12
_MOST_TAGS, _MOST_VALUES = 1000, 1000
MIN_IS_BLACK = 1
SEPARATE = 2


def tags_of(content: bytes) -> Mapping[int, tuple[int, ...]]:
    """The whole-number tags of the first picture, by number; empty for files of other formats, and for damaged ones."""
    order = _ORDERS.get(content[:4])
    if order is None:
        return {}
    tags: dict[int, tuple[int, ...]] = {}
    try:
        (start,) = struct.unpack_from(f"{order}I", content, 4)
        (num_tags,) = struct.unpack_from(f"{order}H", content, start)
        for number in range(min(num_tags, _MOST_TAGS)):
            place = start + 2 + number * _ENTRY_BYTES
            tag, kind, num_values = struct.unpack_from(f"{order}HHI", content, place)
            letter = _LETTERS.get(kind)
            if letter is None or num_values > _MOST_VALUES:
                continue
            values = f"{order}{num_values}{letter}"
            place += 8
            if struct.calcsize(values) > 4:  # then the entry has the place of the values instead
                (place,) = struct.unpack_from(f"{order}I", content, place)
            tags[tag] = struct.unpack_from(values, content, place)
    except struct.error:
        return {}
    return tags


def why_misread(content: bytes) -> str:
    """Why the picture of a TIFF file would be decoded as another one; '' if it would not.

    OpenCV 5.0 reads beyond the first plane of deep pixels in separate planes, and only the first of several bands that
    have no colours.
    """
    tags = tags_of(content)
    (subfile_type,) = tags.get(SUBFILE_TYPE, (0,))[:1] or (0,)
    if subfile_type & REDUCED:  # as in a camera's DNG
        return "begins with a preview of its picture, and only the first one is read; export it as JPEG, PNG or TIFF"
    is_deep = max(tags.get(BITS, (1,)), default=1) > 8
    if tags.get(PLANES) == (SEPARATE,) and tags.get(SAMPLES, (1,)) != (1,) and is_deep:
        return "has separate planes of more than 8 bits, which are not read; save it with its channels interleaved"
    (num_samples,) = tags.get(SAMPLES, (1,))[:1] or (1,)
    num_bands = num_samples - len(tags.get(EXTRA_SAMPLES, ()))
    if tags.get(PHOTOMETRIC) == (MIN_IS_BLACK,) and num_bands > 1:
        return f"has {num_bands} bands without colours (MinIsBlack), which are not read; save it as RGB or as grey"
    return ""
