"""Atomic file writes, which survive a crash of the writing process, and digests of written data."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

T = TypeVar("T")
ABANDONED_SECONDS = 600.0
_PAUSES = (0.1, 0.4)  # seconds before a read is tried again
_LASTING = (PermissionError, IsADirectoryError, NotADirectoryError)  # the next try would fail as well


def read_patiently(read: Callable[[str], T], path: str) -> T:
    """The result of `read(path)`, which is called again after an OSError: a network drive may fail for a moment.

    Raises:
        OSError: of the last try, with the path.
    """
    for pause in (*_PAUSES, None):
        try:
            return read(path)
        except OSError as error:
            if pause is None or isinstance(error, _LASTING) or is_broken_link(path):
                raise OSError(error.errno, error.strerror or str(error), path) from error
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def is_broken_link(path: str) -> bool:
    """Whether a path is a link to no file, as in a data set that was fetched in part: a fact, and no failure."""
    return os.path.islink(path) and not os.path.exists(path)


def is_absence(error: OSError) -> bool:
    """Whether an error says that there is no such file or folder, or a link to itself; others are of the storage."""
    return isinstance(error, (FileNotFoundError, NotADirectoryError)) or error.errno == errno.ELOOP


def is_present(path: str) -> bool:
    """`os.path.lexists`, where an error of the storage is raised: it does not mean that there is no file."""
    return _status(os.lstat, path) is not None


def is_folder(path: str) -> bool:
    """`os.path.isdir`, where an error of the storage is raised."""
    status = _status(os.stat, path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _status(look: Callable[[str], os.stat_result], path: str) -> os.stat_result | None:
    def look_or_none(path: str) -> os.stat_result | None:
        try:
            return look(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    return read_patiently(look_or_none, path)


class HashingWriter(io.RawIOBase):
    """A file that computes digests and the size of all data written to it, without seeking."""

    def __init__(self, file: BinaryIO, *algorithms: str) -> None:
        self._file, self.size = file, 0
        self._hashes = {name: hashlib.new(name, usedforsecurity=False) for name in algorithms}

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._file.write(data)
        for digest in self._hashes.values():
            digest.update(data)
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def hexdigest(self, algorithm: str) -> str:
        """Digest of all data written so far."""
        return self._hashes[algorithm].hexdigest()


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary path next to `path`, with the same suffix; its file replaces `path` when the block ends.

    After an error `path` is unchanged and the temporary file is deleted. Only a killed process leaves one, whose name
    starts with a dot.

    Args:
        durable: flush the file and its name to the device; else a power cut may lose either.
    """
    temporary = path.with_name(f".{uuid.uuid4().hex}{path.suffix}")
    try:
        yield temporary
        if durable:
            sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def clear_temporary(folder: Path) -> None:
    """Remove the temporary files of `replacing` that killed processes have left in a folder.

    Another process may be writing one. What has not changed for `ABANDONED_SECONDS` is taken for left.
    """
    oldest = time.time() - ABANDONED_SECONDS
    for path in folder.glob(".*"):
        if re.fullmatch(r"\.[0-9a-f]{32}(\.[^.]*)?", path.name):
            with suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


def atomic_write(path: Path, data: bytes | str, *, durable: bool = True) -> None:
    """Write bytes, or text as UTF-8, to `path`; a reader sees either the old file or the new one.

    Characters that UTF-8 lacks, as in file names of other encodings, become escapes.
    """
    with replacing(path, durable=durable) as temporary:
        temporary.write_bytes(data.encode(errors="backslashreplace") if isinstance(data, str) else data)


def is_in_place(file: IO[Any]) -> bool:
    """Whether an open file is still the one that its path names: neither it nor a folder above it was moved, removed or
    replaced. The open file keeps its inode number from being used again.

    Raises:
        OSError: if storage fails.
    """
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except (FileNotFoundError, NotADirectoryError):
        return False


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
