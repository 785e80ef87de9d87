"""Decoded images at the network's size, cached once per node and shared by all its processes.

One file holds all images of a split back to back, in memory (`/dev/shm`) or on disk. Workers and loader processes map
it read-only, so N processes need the memory of one, and a restarted worker reuses it. Its name is a digest of its
sources. It is built once, under the folder's lock, and appears atomically.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import cv2
import numpy as np

from ray_yolo.core.cache_folder import cache_folder
from ray_yolo.core.errors import DatasetError
from ray_yolo.core.file_lock import try_lock, wait_for_lock
from ray_yolo.core.formatting import format_size
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.core.system import available_memory
from ray_yolo.data.augment import GREY
from ray_yolo.data.images import DAMAGED_SHARE, DECODERS, UnreadableImageError, has_too_many, read_image
from ray_yolo.data.index_cache import content_key

Mode = Literal["none", "ram", "disk"]
MEMORY_SHARE = 0.25  # Images are cached by default in this share of the free memory.
FORMAT = 3  # The version of the cache file; raise it when a pixel of it would change.
SHARED_MEMORY = Path("/dev/shm")  # Linux has its file system in memory here.
_MARGIN = 1.1  # A cached byte needs so many free ones, to leave some for others.
_LOCK_SECONDS = 3600.0  # Another process may take so long to decode a large data set.
_log = logging.getLogger(__name__)


def loaded_sizes(sizes: np.ndarray, imgsz: int) -> np.ndarray:
    """Sizes scaled to a long side of `imgsz`: (n, 2) int64 from (n, 2), (height, width), at least 1 px."""
    ratios = imgsz / sizes.max(axis=-1, keepdims=True)
    return np.maximum(1, np.rint(sizes * ratios)).astype(np.int64)


def resized(image: np.ndarray, size: tuple[int, int], *, smooth: bool) -> np.ndarray:
    """The image (h, w, 3) at `size` (height, width): shrunk by area averaging if `smooth`, else linearly."""
    if image.shape[:2] == size:
        return image
    shrinks = size[0] < image.shape[0] or size[1] < image.shape[1]
    interpolation = cv2.INTER_AREA if smooth and shrinks else cv2.INTER_LINEAR
    return cv2.resize(image, size[::-1], interpolation=interpolation)


def decoded_bytes(index: AnnotationIndex, imgsz: int) -> int:
    """Bytes of the index's decoded images."""
    return int(loaded_sizes(index.sizes, imgsz).prod(axis=1).sum()) * 3


def room_for_images() -> int:
    """Bytes of this node's memory that the cache may use by default."""
    with suppress(OSError):
        of_memory = MEMORY_SHARE * available_memory()
        of_shared_memory = shutil.disk_usage(SHARED_MEMORY).free / _MARGIN
        return int(min(of_memory, of_shared_memory))
    return 0


class NodeRoom(NamedTuple):
    """Free memory of a node, bytes."""

    images: int  # `room_for_images`
    shared: int  # `room_in_shared_memory`


def node_room() -> NodeRoom:
    """The free memory of this node."""
    return NodeRoom(room_for_images(), room_in_shared_memory())


def room_in_shared_memory() -> int:
    """Bytes of this node's shared memory that are free for the batches of loader processes; 0 if it is read-only."""
    with suppress(OSError):
        return shutil.disk_usage(SHARED_MEMORY).free if os.access(SHARED_MEMORY, os.W_OK) else 0
    return 0


class ImageStore:
    """Images of an index with their long side at `imgsz`, decoded on access or once per node.

    Pickling it is cheap: another process maps the same file.

    Args:
        mode: none decodes at every call.
        directory: folder of the cache file; by default shared memory (ram) or the user's cache (disk).
        smooth: shrink the full image by area averaging (validation) instead of linearly (training).
    """

    def __init__(self, index: AnnotationIndex, imgsz: int, mode: Mode = "none", directory: Path | None = None, *,
                 smooth: bool = False) -> None:
        self.paths = index.paths
        self.pixel_range = index.pixel_range
        self.sizes = loaded_sizes(index.sizes, imgsz)
        self.file: Path | None = None
        self._smooth = smooth
        self._original = index.sizes
        self._mapped: np.ndarray | None = None
        self._tried: set[int] = set()
        """This process has decoded or asked for these images."""
        self._damaged: set[int] = set()
        """These of them could not be decoded."""
        lengths = self.sizes.prod(axis=1) * 3  # bytes of each image
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        """(n + 1,) int64: the first byte of each image where all are back to back, and the number of bytes."""
        folder = None if mode == "none" else _folder(mode, directory, int(self.starts[-1]))
        if folder:
            pixel_range = sorted(self.pixel_range.items())
            key = content_key(self.paths, FORMAT, DECODERS, imgsz, smooth, index.sizes.tolist(), pixel_range)
            self.file = folder / f"{key}.rgb"
            self._mapped = self._build(self.file)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None, "_tried": set(), "_damaged": set()}

    def load(self, image: int) -> np.ndarray:
        """(height, width, 3) uint8 RGB, long side `imgsz`; read-only if cached.

        Raises:
            UnreadableImageError: if the file no longer has the image that the index describes.
            DatasetError: if that holds for so many images that storage must have failed.
        """
        if self.file is None:
            return self._read(image)
        if self._mapped is None:
            self._mapped = _map(self.file)
        # After the images, a byte for each: whether it was decoded. If not, the read may have failed for a moment.
        if not self._mapped[self.starts[-1] + image]:
            return self._read(image)
        self._tried.add(image)
        pixels = self._mapped[self.starts[image]:self.starts[image + 1]]
        return pixels.reshape(*self.sizes[image].tolist(), 3)

    def load_or_grey(self, image: int) -> np.ndarray:
        """`load`, or a grey image if the file was damaged after the check. Its labels then count as missed."""
        try:
            return self.load(image)
        except UnreadableImageError as error:
            _log.warning("%s: %s; replaced by a grey image", self.paths[image], error)
            return np.full((*self.sizes[image].tolist(), 3), GREY, np.uint8)

    def close(self) -> None:
        """Unmap the file; in shared memory its last user removes it."""
        self._mapped = None
        if self.file is not None and SHARED_MEMORY in self.file.parents:
            _remove_unused(self.file)

    def _read(self, image: int) -> np.ndarray:
        """`load` from the image's own file. Every failed image is counted here."""
        self._tried.add(image)
        try:
            return self._decode(image)
        except UnreadableImageError as error:
            self._damaged.add(image)
            if has_too_many(len(self._damaged), len(self._tried), len(self.paths)):
                raise DatasetError(
                    f"{len(self._damaged)} of {len(self._tried)} images, more than {DAMAGED_SHARE:.0%}, cannot be read "
                    f"any more; the last one is {self.paths[image]}, which {error}. Check the storage, and run the "
                    "same command again") from error
            raise

    def _decode(self, image: int) -> np.ndarray:
        original, target = self._original[image], self.sizes[image]
        reduction = 1 if self._smooth else _reduction(original, target)  # validation decodes as prediction does
        picture = read_image(self.paths[image], reduction, self.pixel_range)
        full, reduced = tuple(original.tolist()), tuple((original // reduction).tolist())
        if picture.shape[:2] not in (full, reduced):  # only JPEGs are reduced
            raise UnreadableImageError("has changed its size since the data set was checked")
        return resized(picture, tuple(target.tolist()), smooth=self._smooth)

    def _build(self, file: Path) -> np.ndarray:
        """The file's bytes, built first if missing. Mapped under the lock: an unmapped file counts as unused.

        A folder has one builder at a time, because each decodes with all CPUs.
        """
        lock = file.with_name(".lock")
        # No link is followed: the user's cache may be in a folder that others write to
        with open(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "a") as locked:
            _lock(lock, locked, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):  # its last user may remove it at any time
                return _map(file)
            for other in file.parent.glob("*.rgb"):
                if SHARED_MEMORY in other.parents:
                    _remove_unused(other)
            temporary = file.with_suffix(".part")  # its only writer holds the lock
            try:
                self._fill(temporary)
                temporary.replace(file)
            finally:
                temporary.unlink(missing_ok=True)
            return _map(file)

    def _fill(self, temporary: Path) -> None:
        total = int(self.starts[-1]) + len(self.paths)
        temporary.unlink(missing_ok=True)  # a killed process has left it, or it is a link
        with temporary.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, total)  # "no space" now, not a bus error later
        content = np.memmap(temporary, np.uint8, "r+", shape=(total,))

        def store(image: int) -> None:
            with suppress(UnreadableImageError):  # `load` tries again
                content[self.starts[image]:self.starts[image + 1]] = self._read(image).reshape(-1)
                content[self.starts[-1] + image] = 1

        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            list(pool.map(store, range(len(self.paths)), chunksize=8))
        content.flush()


def _reduction(original: np.ndarray, target: np.ndarray) -> int:
    """The divisor of an image's sides that decoding may apply: 8, 4 or 2; 1: none.

    The decoded image is not below the target size, and the divisor divides both sides: rounded ones would shift the
    image against its labels.
    """
    for part in (8, 4, 2):
        if (original >= part * target).all() and not (original % part).any():
            return part
    return 1


def _folder(mode: Mode, directory: Path | None, num_bytes: int) -> Path | None:
    """The first folder with enough space: shared memory, disk, or None (with a warning)."""
    folders = [directory or cache_folder() / "images"]
    if mode == "ram":
        folders.insert(0, directory or SHARED_MEMORY / f"ray_yolo-{os.getuid()}")
    for number, folder in enumerate(folders):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.parent == SHARED_MEMORY and not _is_private(folder):
                _log.warning("%s is not private (another user created it, or may write to it): memory is not used; "
                             "remove it, or use --cache disk", folder)
                continue
            free = shutil.disk_usage(folder).free
            if SHARED_MEMORY in folder.parents:  # its limit may exceed the memory that is free
                free = min(free, available_memory())
            if free > num_bytes * _MARGIN:
                if number:  # the disk instead of memory
                    _log.warning("decoded images need %s, more than the free memory: cached in %s",
                                 format_size(num_bytes), folder)
                return folder
    _log.warning("decoded images need %s, more than the free space in %s: they are not cached",
                 format_size(num_bytes), folders[-1])
    return None


def _is_private(folder: Path) -> bool:
    """Whether no other user can have created a file or link there: shared memory is world-writable."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _lock(path: Path, file: IO[Any], kind: int) -> None:
    """Wait for a lock of another process; TimeoutError after a while, because that process may be frozen."""
    if not wait_for_lock(file, _LOCK_SECONDS, kind):
        raise TimeoutError(f"{path}: another process has locked it for {_LOCK_SECONDS:g} s; end that process, or use "
                           "--cache none")


def _map(path: Path) -> np.ndarray:
    """The file's bytes, read-only. A shared lock marks it as in use for the lifetime of the mapping."""
    with path.open("rb") as file:
        _lock(path, file, fcntl.LOCK_SH)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def _remove_unused(path: Path) -> None:
    """Remove a cache file that no process maps."""
    with suppress(OSError), path.open("rb") as file:
        if try_lock(file):
            path.unlink()
