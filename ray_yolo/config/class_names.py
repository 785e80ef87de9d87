"""Compares the class names of a data set with those of a weights file.

A class number has a meaning only together with its name. Two lists of equal length may name the same classes in another
order, or other classes. This module imports neither torch nor ray.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ray_yolo.core.errors import DatasetError

SINGLE_CLASS = "item"
"""Name of the only class under `single_cls`."""

_PLACEHOLDER = re.compile(r"(class|cls|label|category|object)?[ _-]?([0-9]+)")


class ClassMatch(NamedTuple):
    """The classes of a weights file that belong to the classes of a data set."""

    rows: tuple[int, ...]
    """For each class of the data set, the number of the class in the weights."""
    note: str = ""
    """What the user must know about it, in one line; '' if the names are equal."""

    @property
    def is_identity(self) -> bool:
        """Whether each class of the data set has the same number in the weights, as far as the data set goes."""
        return self.rows == tuple(range(len(self.rows)))


def normalized(name: str) -> str:
    """A class name without differences of case, of surrounding and of repeated blanks."""
    return " ".join(name.split()).casefold()


def are_placeholders(names: Sequence[str]) -> bool:
    """Whether names only repeat the class numbers (`0`, `class1`, `class_2`), or there are none.

    Files without class names are given such names by the program that reads or writes them. `item` is the only class
    of a training under `single_cls`.
    """
    if tuple(names) == (SINGLE_CLASS,):
        return True
    numbers = [_PLACEHOLDER.fullmatch(normalized(name)) for name in names]
    counted = [int(match[2]) if match else None for match in numbers]
    return counted in (list(range(len(names))), list(range(1, len(names) + 1)))


def match_classes(data: Sequence[str], weights: Sequence[str], *, data_file: str, weights_file: str,
                  allow_names: bool = False) -> ClassMatch:
    """Match the classes of a data set with those of a weights file by name.

    | names | result |
    |---|---|
    | equal, apart from case and blanks | the same numbers |
    | the same, in another order | by name, with a note |
    | the data set has some of those of the weights | by name, with a note |
    | one side has only placeholders, equal in number | the same numbers, with a note |
    | any other | refused; with `allow_names` and equal numbers: by name where a name matches, the others in order |

    Args:
        data: names of the data set, by number.
        weights: names of the weights, by number; placeholders if the file has none.
        data_file: shown in messages.
        weights_file: shown in messages.

    Raises:
        DatasetError: with both lists side by side.
    """
    same_number = tuple(range(len(data)))
    if tuple(data) == tuple(weights):
        return ClassMatch(same_number)
    matched = _matches(data, weights)
    if len(data) == len(weights) and tuple(matched) == same_number:
        return ClassMatch(same_number)
    if all(number is not None for number in matched):
        rows = tuple(number for number in matched if number is not None)
        return ClassMatch(rows, _matched_note(data, weights, rows, data_file, weights_file))
    unnamed = [file for file, names in ((weights_file, weights), (data_file, data)) if are_placeholders(names)]
    if unnamed and len(data) == len(weights) and not any(number is not None for number in matched):
        return ClassMatch(same_number, _unnamed_note(unnamed, data, weights, weights_file))
    if allow_names and len(data) == len(weights):
        rows = _filled(matched)
        pairs = ", ".join(f"{name} = {weights[row]}" for name, row, number in zip(data, rows, matched, strict=True)
                          if number is None)
        return ClassMatch(rows, f"classes of {data_file} that {weights_file} names otherwise: {pairs} (--allow-names)")
    raise DatasetError(_difference(data, weights, matched, data_file, weights_file))


def _matches(data: Sequence[str], weights: Sequence[str]) -> list[int | None]:
    """For each name of the data set, its number in the weights; None if no name, or more than one, fits.

    Equal names go first, so that `cat` and `Cat` can be two classes.
    """
    numbers: list[int | None] = [None] * len(data)
    for spell in (str, normalized):
        taken = {number for number in numbers if number is not None}
        open_data = [spell(name) if number is None else None for name, number in zip(data, numbers, strict=True)]
        open_weights = [None if number in taken else spell(name) for number, name in enumerate(weights)]
        times_in_data, times_in_weights = Counter(open_data), Counter(open_weights)
        for position, name in enumerate(open_data):
            if name is not None and times_in_data[name] == times_in_weights[name] == 1:
                numbers[position] = open_weights.index(name)
    return numbers


def _filled(matched: Sequence[int | None]) -> tuple[int, ...]:
    """The same numbers, with the unused ones in ascending order in place of None."""
    unused = iter(sorted(set(range(len(matched))) - set(matched)))
    return tuple(next(unused) if number is None else number for number in matched)


def _unnamed_note(unnamed: Sequence[str], data: Sequence[str], weights: Sequence[str], weights_file: str) -> str:
    """The note on classes that one file does not name; '' if no file names them."""
    if len(unnamed) == 2:
        return ""
    names = data if unnamed[0] == weights_file else weights
    listed = ", ".join(f"{number} {name}" for number, name in enumerate(names))
    return f"{unnamed[0]} has no class names: its classes are taken by number ({listed})"


def _matched_note(data: Sequence[str], weights: Sequence[str], rows: Sequence[int], data_file: str, weights_file: str
                  ) -> str:
    """The note on classes that were matched by name and do not have equal numbers in both lists."""
    text = f"classes of {data_file} are matched with those of {weights_file} by name"
    if len(data) < len(weights):
        text += f"; other classes of the weights are left out: {len(weights) - len(data)}"
    moved = [f"{name} {number} = {row}" for number, (name, row) in enumerate(zip(data, rows, strict=True))
             if number != row]
    return f"{text} ({', '.join(moved)})" if moved else text


def _difference(data: Sequence[str], weights: Sequence[str], matched: Sequence[int | None], data_file: str,
                weights_file: str) -> str:
    """Both lists side by side, and what to do."""
    if len(data) != len(weights):
        what = f"has {len(data)} classes, but {weights_file} has {len(weights)}"
    else:
        what = f"names other classes than {weights_file}"
    width = max(len(data_file), *map(len, data))
    rows = [("", data_file, weights_file)]
    for number in range(max(len(data), len(weights))):
        left = data[number] if number < len(data) else "-"
        right = weights[number] if number < len(weights) else "-"
        rows.append((str(number), left, right))
    table = "\n".join(f"{number:>7}  {left:<{width}}  {right}" for number, left, right in rows)
    unknown = [name for name, number in zip(data, matched, strict=True) if number is None]
    remedy = f"the weights do not name {', '.join(unknown)}; correct `names` of the data set, or give other weights"
    if len(data) == len(weights):
        remedy += "; if only the spelling differs, --allow-names takes the unmatched classes in the order of this list"
    elif len(weights) == 1:
        remedy += "; for weights of one class, add --single-cls"
    return f"{data_file}: {what}:\n{table}\n{remedy}"
