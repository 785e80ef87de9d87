"""Values in label files by what they say. Tools write the same number as `3`, `3.0` or `"3"`, and an unknown one as
null, 0 or -1.
"""

from __future__ import annotations

import codecs
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"([+-]?\d+)(\.0*)?", re.ASCII)
_YES, _NO = ("true", "yes", "y"), ("", "false", "no", "n")
_MAX_DIGITS = 400  # A number has so many digits at most; Python refuses to convert thousands.


def decode_text(content: bytes) -> str:
    """The text in the bytes of a file: UTF-8 with or without BOM, or UTF-16 with BOM.

    Raises:
        UnicodeDecodeError: for another encoding.
    """
    has_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if has_utf16 else "utf-8-sig")


def number(value: object) -> float | None:
    """The finite number that a number or a text says; None for anything else, `true` too."""
    if isinstance(value, str):
        text = value.strip()
        if len(text) > _MAX_DIGITS or not _NUMBER.fullmatch(text):
            return None
        value = float(text)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def identity(value: object) -> int | str | None:
    """An id: 7, 7.0, "7" and "007" are the same one. Other text is an id too; None for anything else."""
    if isinstance(value, str):
        text = value.strip()
        whole = _WHOLE.fullmatch(text)
        if whole and len(text) <= _MAX_DIGITS:
            return int(whole[1])
        return text
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None  # neither NaN nor infinity is
    return value


def truth(value: object) -> bool | None:
    """Whether a flag is set: true, 1, "1" and "yes" are; null, 0, "0", "false" and "" are not; None: neither."""
    if value is None or isinstance(value, bool):
        return bool(value)
    as_number = number(value)
    if as_number is not None:
        return as_number != 0
    if not isinstance(value, str):
        return None
    word = value.strip().lower()
    if word in _YES:
        return True
    return False if word in _NO else None


def size_conflict(size: tuple[int, int], width: object, height: object) -> str:
    """What a label file says of its image's size, with the likely cause, if the image has another one; else ''.

    size: (height, width) of the upright image. A side that is null, 0, negative or no number is unknown.
    """
    actual_height, actual_width = size
    stated_width, stated_height = _known_side(width), _known_side(height)
    width_fits = stated_width is None or _same_side(stated_width, actual_width)
    height_fits = stated_height is None or _same_side(stated_height, actual_height)
    if width_fits and height_fits:
        return ""
    shown = " x ".join("?" if side is None else f"{side:g}" for side in (stated_width, stated_height))
    if _same_side(stated_width, actual_height) and _same_side(stated_height, actual_width):
        return f"{shown} (the sides are exchanged: it may describe the picture without its EXIF rotation)"
    return f"{shown} (the picture may have been resized after it was labelled)"


def _known_side(value: object) -> float | None:
    """A side in pixels; None if it is unknown."""
    side = number(value)
    return side if side is not None and side > 0 else None


def _same_side(stated: float | None, actual: int) -> bool:
    return stated is not None and abs(stated - actual) < 1  # some tools write fractions


def folded(name: str) -> str:
    """A name without case, surrounding blanks and different spellings of the same letters."""
    return unicodedata.normalize("NFC", name.strip()).casefold()


def find_class(name: object, names: Sequence[str]) -> int | None:
    """The number of the class with a name: with exactly this one, else with the only one that is equal if `folded`."""
    if isinstance(name, bool) or not isinstance(name, (str, int, float)):
        return None
    exact, similar = _numbers(tuple(names))
    text = str(name)
    if text in exact:
        return exact[text]
    candidates = similar.get(folded(text), ())
    return candidates[0] if len(candidates) == 1 else None  # "Cat" may be neither "cat" nor "CAT"


@cache
def _numbers(names: tuple[str, ...]) -> tuple[Mapping[str, int], Mapping[str, Sequence[int]]]:
    """The first class of each name, and the classes of each folded one; classes with the same name count once."""
    exact: dict[str, int] = {}
    similar: dict[str, list[int]] = defaultdict(list)
    for kind, name in enumerate(names):
        if name not in exact:
            exact[name] = kind
            similar[folded(name)].append(kind)
    return exact, similar
