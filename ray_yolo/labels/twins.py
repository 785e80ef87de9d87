"""Validation images that are training images: their files have the same content."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain

Way = Callable[[Sequence[str]], Iterable[Hashable]]
_SAMPLE = 4096  # bytes from the middle of a file, which differ in most files of equal size


def find_twins(train: Sequence[str], val: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(validation image, training image) for each validation image whose file is a training image, or equals one.

    Only files of equal size are opened, and only those with an equal sample are read as a whole.
    """
    known = set(train)
    twins = [(path, path) for path in val if path in known]
    others = [path for path in val if path not in known]
    with ThreadPoolExecutor(16) as pool:
        ways: tuple[Way, ...] = (partial(map, _size), partial(pool.map, _sample), partial(pool.map, _digest))
        for keys_of in ways:  # each needs more reading than the one before, and leaves fewer files
            of_val = _groups(others, keys_of(others))
            of_train = _groups(train, keys_of(train))
            common = of_val.keys() & of_train.keys()
            others = list(chain.from_iterable(of_val[key] for key in common))
            train = list(chain.from_iterable(of_train[key] for key in common))
    for digest in common:
        original = of_train[digest][0]
        twins += [(path, original) for path in of_val[digest]]
    return tuple(sorted(twins))


def _groups(paths: Sequence[str], keys: Iterable[Hashable]) -> dict[Hashable, list[str]]:
    """The paths by their keys, in order."""
    groups = defaultdict[Hashable, list[str]](list)
    for path, key in zip(paths, keys, strict=True):
        groups[key].append(path)
    return groups


def _size(path: str) -> int | str:
    try:
        return os.stat(path).st_size
    except OSError:
        return path  # equal to no other


def _sample(path: str) -> tuple[int, bytes] | str:
    with suppress(OSError), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(size // 2 - _SAMPLE // 2, 0))
        return size, file.read(_SAMPLE)
    return path


def _digest(path: str) -> str:
    with suppress(OSError), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return path
