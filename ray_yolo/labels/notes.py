"""One line about each thing in a data set that its counts do not explain."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.labels.exports import ADVICE

_EXAMPLES = 3


def notes(index: AnnotationIndex, on_pixels: Sequence[str] = ()) -> tuple[str, ...]:
    """The notes about a split, each with at most three examples; `on_pixels` are those about the values of images."""
    others = index.other_files
    lines = list(unused_notes(index))
    if others.matched:
        pairs = [f"{image} has {_from(label, image)}" for image, label in others.matched]
        lines.append(f"{_number(len(pairs), 'label file')} found under another spelling or folder: {_first(pairs)}")
    if others.shared:
        lines.append(f"{counted(others.shared, 'image')} that share a label file, because they differ only in suffix")
    lines += [f"{export}, which is not read; {ADVICE}" for export in others.exports[:_EXAMPLES]]
    lines += on_pixels
    if index.twins:
        # A path alone: the same file is in both splits.
        pairs = [path if path == other else f"{path} = {other}" for path, other in index.twins]
        lines.append(f"{len(pairs)} of {len(index)} images are training images, too (the same content): "
                     f"{_first(pairs)}")
    return tuple(lines)


def unused_notes(index: AnnotationIndex) -> tuple[str, ...]:
    """The notes about files that may be meant as data, but are not used."""
    others = index.other_files
    lines = []
    if others.labels:
        lines.append(f"{counted(others.labels, 'label file')} without an image")
    if others.images:
        lines.append(f"{counted(others.images, 'picture')} in formats that are not read")
    return tuple(lines)


def file_lines(index: AnnotationIndex) -> list[str]:
    """One line for each file of the notes about files."""
    others = index.other_files
    return [*(f"{path}: belongs to no image" for path in others.labels),
            *(f"{path}: has a format that is not read" for path in others.images),
            *(f"{image}: has the label file {label}" for image, label in others.matched),
            *(f"{path}: shares its label file with another image" for path in others.shared),
            *(f"{path}: has the same content as the training image {other}" for path, other in index.twins)]


def counted(paths: Sequence[str], noun: str) -> str:
    """The number of files, and the first of them: '4 label files (a.txt, b.txt, c.txt, ...)'."""
    return f"{_number(len(paths), noun)} ({_first(paths)})"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _first(texts: Sequence[str]) -> str:
    examples = ", ".join(texts[:_EXAMPLES])
    return f"{examples}, ..." if len(texts) > _EXAMPLES else examples


def _from(label: str, image: str) -> str:
    """A label file's path as seen from its image."""
    return os.path.relpath(label, os.path.dirname(image))
