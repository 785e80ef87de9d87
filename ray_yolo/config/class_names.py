"""Compares the class names of a data set with those of a weights file.

A class number has a meaning only together with its name. Two lists of equal length may name the same classes in another
order, or other classes. This module imports neither torch nor ray.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
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
    numbers = []
    for name in names:
        match = _PLACEHOLDER.fullmatch(normalized(name))
        if match is None:
            return False
        numbers.append(int(match[2]))
    from_zero = list(range(len(names)))
    from_one = list(range(1, len(names) + 1))
    return numbers in (from_zero, from_one)


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
    found = tuple(number for number in matched if number is not None)
    is_as_long = len(data) == len(weights)
    if is_as_long and found == same_number:
        return ClassMatch(same_number)
    if len(found) == len(data):
        return ClassMatch(found, _matched_note(data, weights, found, data_file, weights_file))
    has_unnamed_side = are_placeholders(data) or are_placeholders(weights)
    if is_as_long and has_unnamed_side and not found:
        return ClassMatch(same_number, _unnamed_note(data, weights, data_file, weights_file))
    if is_as_long and allow_names:
        rows = _filled(matched)
        pairs = []
        for number, name in enumerate(data):
            if matched[number] is None:
                pairs.append(f"{name} = {weights[rows[number]]}")
        note = f"classes of {data_file} that {weights_file} names otherwise: {', '.join(pairs)} (--allow-names)"
        return ClassMatch(rows, note)
    raise DatasetError(_difference(data, weights, matched, data_file, weights_file))


def common_classes(data: Sequence[str], weights: Sequence[str], *, data_file: str, weights_file: str
                   ) -> tuple[tuple[int | None, ...], str]:
    """For each class of a data set its number in the weights, None if these have no class of this name, and a note.

    The note names in one line the kept, the new and the left-out classes; it is '' if both lists are equal.
    """
    matched = tuple(_matches(data, weights))
    if matched == tuple(range(len(weights))):
        return matched, ""
    kept, new = [], []
    for name, number in zip(data, matched, strict=True):
        if number is None:
            new.append(name)
        else:
            kept.append(name)
    gone = [name for number, name in enumerate(weights) if number not in matched]
    groups = {"kept": kept, "new": new, "left out": gone}
    parts = [f"{what} {', '.join(names)}" for what, names in groups.items() if names]
    return matched, f"classes of {data_file} are matched with those of {weights_file} by name: {'; '.join(parts)}"


def _matches(data: Sequence[str], weights: Sequence[str]) -> list[int | None]:
    """For each name of the data set, its number in the weights; None if no name, or more than one, fits.

    Equal names go first, so that `cat` and `Cat` can be two classes.
    """
    equal = _unique_pairs(dict(enumerate(data)), dict(enumerate(weights)))
    other_data = {number: normalized(name) for number, name in enumerate(data) if number not in equal}
    taken = set(equal.values())
    other_weights = {number: normalized(name) for number, name in enumerate(weights) if number not in taken}
    pairs = equal | _unique_pairs(other_data, other_weights)
    return [pairs.get(number) for number in range(len(data))]


def _unique_pairs(data: Mapping[int, str], weights: Mapping[int, str]) -> dict[int, int]:
    """Number in the data set -> number in the weights, for each name that occurs exactly once in both."""
    times_in_data = Counter(data.values())
    times_in_weights = Counter(weights.values())
    number_in_weights = {name: number for number, name in weights.items()}
    pairs = {}
    for number, name in data.items():
        if times_in_data[name] == times_in_weights[name] == 1:
            pairs[number] = number_in_weights[name]
    return pairs


def _filled(matched: Sequence[int | None]) -> tuple[int, ...]:
    """The same numbers, with the unused ones in ascending order in place of None."""
    unused = iter(sorted(set(range(len(matched))) - set(matched)))
    return tuple(next(unused) if number is None else number for number in matched)


def _unnamed_note(data: Sequence[str], weights: Sequence[str], data_file: str, weights_file: str) -> str:
    """The note on classes that one file does not name; '' if no file names them."""
    if are_placeholders(data) and are_placeholders(weights):
        return ""
    unnamed, names = (weights_file, data) if are_placeholders(weights) else (data_file, weights)
    listed = ", ".join(f"{number} {name}" for number, name in enumerate(names))
    return f"{unnamed} has no class names: its classes are taken by number ({listed})"


def _matched_note(data: Sequence[str], weights: Sequence[str], rows: Sequence[int], data_file: str, weights_file: str
                  ) -> str:
    """The note on classes that were matched by name and do not have equal numbers in both lists."""
    text = f"classes of {data_file} are matched with those of {weights_file} by name"
    if len(data) < len(weights):
        text += f"; other classes of the weights are left out: {len(weights) - len(data)}"
    moved = []
    for number, row in enumerate(rows):
        if number != row:
            moved.append(f"{data[number]} {number} = {row}")
    return f"{text} ({', '.join(moved)})" if moved else text


def _difference(data: Sequence[str], weights: Sequence[str], matched: Sequence[int | None], data_file: str,
                weights_file: str) -> str:
    """Both lists side by side, and what to do."""
    if len(data) != len(weights):
        what = f"has {len(data)} classes, but {weights_file} has {len(weights)}"
    else:
        what = f"names other classes than {weights_file}"
    width = max(len(data_file), *(len(name) for name in data))
    lines = [f"{'':>7}  {data_file:<{width}}  {weights_file}"]
    for number, (left, right) in enumerate(zip_longest(data, weights, fillvalue="-")):
        lines.append(f"{number:>7}  {left:<{width}}  {right}")
    table = "\n".join(lines)
    unknown = [name for name, number in zip(data, matched, strict=True) if number is None]
    remedy = f"the weights do not name {', '.join(unknown)}; correct `names` of the data set, or give other weights"
    if len(data) == len(weights):
        remedy += "; if only the spelling differs, --allow-names takes the unmatched classes in the order of this list"
    elif len(weights) == 1:
        remedy += "; for weights of one class, add --single-cls"
    return f"{data_file}: {what}:\n{table}\n{remedy}"
