"""Plain values that modules exchange; nothing here reads files or depends on workers.

Boxes are xyxy float32 in pixels of the image they belong to; sizes are (height, width).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, overload

import numpy as np

from ray_yolo.core.events import Frozen

PixelKind = Literal["integer", "float"]
"""Type of the values of an image with more than 8 bits per channel."""


class Annotation(NamedTuple):
    """The labels of one image."""

    path: str
    size: tuple[int, int]  # (height, width) of the upright image (EXIF rotation applied)
    classes: np.ndarray  # (n,) int64
    boxes: np.ndarray  # (n, 4) float32, xyxy in pixels of the upright image
    polygons: tuple[np.ndarray, ...] = ()  # each box has (k, 2) float32 pixels; k = 0: no polygon


@dataclass(frozen=True)
class Finding:
    """One finding of the dataset check: where, what, and whether something was left out."""

    where: str  # "path:line" or "path"
    what: str
    dropped: bool
    image: bool = False  # a whole image was left out, not a row
    row: bool = False  # the finding has taken a row, too, the last one of its image
    is_transient: bool = False  # a read failed: not a fact about the file, so it is found anew at the next start
    code: str = ""  # the name of its rule, `ray_yolo.labels.rules.Code`
    values: tuple[str | int | float, ...] = ()  # the values in its text, for decisions

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))  # a list, if it was stored as JSON


class PixelValues(NamedTuple):
    """The range of images with more than 8 bits, without odd pixels and values that stand for missing data."""

    kind: PixelKind
    low: float
    high: float
    num_images: int = 1
    no_data: tuple[float, ...] = ()  # values that are taken as "no data"


class OtherFiles(NamedTuple):
    """Files of a split's folders whose names do not match by the layout's rule."""

    labels: tuple[str, ...] = ()  # label files without an image
    images: tuple[str, ...] = ()  # pictures in formats that are not read
    matched: tuple[tuple[str, str], ...] = ()  # (image, its label file), found under another spelling or folder
    shared: tuple[str, ...] = ()  # images that share their label file with another image
    exports: tuple[str, ...] = ()  # label files of tools in formats that are not read, with the tool


class DatasetSnapshot(NamedTuple):
    """A version of a dataset in object storage, and its local copy on this machine."""

    address: str
    version: str
    folder: str


class Paths(Sequence[str]):
    """An immutable sequence of file paths, in arrays: a path costs 8 bytes and its file name, a str 49 and all of it.

    Ray's workers map arrays from the memory of their node. Each of them would have its own copy of a tuple.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        folders: dict[str, int] = {}  # each folder once, with its number
        numbers = array("i")  # the folder of each path
        ends = array("q", [0])  # where each name ends in `names`, in bytes; a name begins where the last one ends
        names = bytearray()  # the names of all files, one after the other
        for path in paths:
            folder, separator, name = path.rpartition("/")
            number = folders.setdefault(folder + separator, len(folders))
            numbers.append(number)
            names += name.encode("utf-8", "surrogateescape")
            ends.append(len(names))
        self._folders = tuple(folders)
        self._numbers = np.asarray(numbers, np.int32)
        self._ends = np.asarray(ends, np.uint32 if len(names) < 2**32 else np.int64)
        self._names = np.frombuffer(bytes(names), np.uint8)

    def moved(self, folder: str, target: str) -> Paths:
        """The same files, where the beginning `folder` of their paths is `target` instead."""
        assert all(each.startswith(f"{folder}/") for each in self._folders), f"paths are not below {folder}"
        paths = copy(self)
        paths._folders = tuple(f"{target}{each.removeprefix(folder)}" for each in self._folders)
        return paths

    @overload
    def __getitem__(self, number: int) -> str: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[str, ...]: ...

    def __getitem__(self, number: int | slice) -> str | tuple[str, ...]:
        if isinstance(number, slice):
            return tuple(self[each] for each in range(len(self))[number])
        at = range(len(self))[number]  # also for negative numbers; IndexError
        name = self._names[self._ends[at]:self._ends[at + 1]].tobytes()
        return self._folders[self._numbers[at]] + name.decode("utf-8", "surrogateescape")

    def __len__(self) -> int:
        return len(self._numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Paths, tuple, list)) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return f"Paths({list(self[:3])}{'...' if len(self) > 3 else ''})"


@dataclass(frozen=True)
class AnnotationIndex:
    """All annotations of a data split as flat arrays, cheap to share between the processes of a node."""

    paths: Sequence[str]  # held in memory as `Paths`
    sizes: np.ndarray  # (images, 2) int32, (height, width)
    offsets: np.ndarray  # (images + 1,) int64 into classes and boxes
    classes: np.ndarray  # (labels,) int32
    boxes: np.ndarray  # (labels, 4) float32
    names: tuple[str, ...]
    polygons: dict[int, tuple[np.ndarray, ...]] = field(default_factory=dict)  # the keys are images that have some
    findings: tuple[Finding, ...] = ()
    areas: np.ndarray | None = None  # (labels,) float64 square pixels from the files; None: those of the boxes
    # (n, 7) float64 rows [image, class, x1, y1, x2, y2, area] of regions that only validation uses
    crowds: np.ndarray = field(default_factory=lambda: np.zeros((0, 7)))
    without_file: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # images without a label file
    pictures: str = ""  # fingerprint of the sizes and times of the split's image files; '' if it has none
    looked_for: tuple[str, ...] = ()  # label paths that were searched: COCO files, and patterns of the others
    snapshot: DatasetSnapshot | None = None  # `paths` belong to it
    num_clipped: int = 0  # boxes of the files that reached out of their image
    # Of images with more than 8 bits, by kind: (black, white), which every reader of the split uses
    pixel_range: Mapping[PixelKind, tuple[float, float]] = field(default_factory=dict)
    pixel_values: tuple[PixelValues, ...] = ()  # the values of the same images
    other_files: OtherFiles = field(default_factory=OtherFiles)
    twins: tuple[tuple[str, str], ...] = ()  # (path, path of a training image with the same content)

    def __post_init__(self) -> None:
        if not isinstance(self.paths, Paths):
            object.__setattr__(self, "paths", Paths(self.paths))
        object.__setattr__(self, "classes", np.asarray(self.classes, np.int32))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, image: int) -> Annotation:
        rows = slice(int(self.offsets[image]), int(self.offsets[image + 1]))
        height, width = self.sizes[image].tolist()
        return Annotation(self.paths[image], (height, width), self.classes[rows].astype(np.int64), self.boxes[rows],
                          self.polygons.get(image, ()))

    @property
    def owners(self) -> np.ndarray:
        """(labels,) int64, the image of each label."""
        return np.arange(len(self)).repeat(np.diff(self.offsets))

    @property
    def digest(self) -> str:
        """Identity of the labels: 16 hex digits of SHA-256 over class names, image sizes, classes and boxes, and over
        the range of the pixels if there is one."""
        digest = hashlib.sha256("\0".join(self.names).encode())
        for values in (self.sizes, self.offsets, self.classes.astype(np.int64), self.boxes):
            digest.update(np.ascontiguousarray(values).tobytes())
        if self.pixel_range:  # else the digest is that of older versions
            digest.update(repr(sorted(self.pixel_range.items())).encode())
        return digest.hexdigest()[:16]


class SampleKey(NamedTuple):
    """Identifies a training sample; its randomness depends on (seed, epoch, position) alone."""

    epoch: int
    position: int  # its place in the epoch's order; weighted sampling repeats images
    image: int
    block: tuple[int, ...] = ()  # images that its mosaics take others from; (): all


class MicrobatchPart(NamedTuple):
    """Consecutive samples of one worker's microbatch, which a loader process loads at once."""

    keys: tuple[SampleKey, ...]
    first: int  # the place of the first sample in the microbatch
    size: int  # the samples of the microbatch


class Progress(NamedTuple):
    """Progress of training. `step` counts optimiser steps over all epochs."""

    epoch: int = 0
    images_in_epoch: int = 0
    step: int = 0


class Orders(NamedTuple):
    """The reply to a worker's heartbeat: all that it can be ordered to do. Without Ray, a signal sets them.

    Orders describe a state, not an event: a worker that misses a reply has the same orders by the next one.
    """

    stop: bool = False  # End the training: finish the current step, save it, and return.
    save: bool = False  # Save the current step: all workers leave, so no other worker could take over the state.
    regroup: bool = False  # End the generation after the current step: a worker waits to join, or leaves.
    leave: bool = False  # This worker leaves after the current step, and the others continue without it.
    abort: bool = False  # The generation's collectives cannot finish: end those that wait for a peer.
    dumps: int = 0  # How often all workers were asked to dump their stacks. At each new request, they do.


class WorkerStatus(Frozen):
    """The status of a worker, as the coordinator of its training knows it."""

    worker: int
    node: str
    pid: int
    phase: str  # the name of the phase, or `silent`
    step: int
    seconds: float  # the time in this phase
    waits: bool  # whether it waits for other workers
