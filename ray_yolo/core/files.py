"""Files that appear whole or not at all, whatever ends the process that writes them, and digests of what is written."""

from __future__ import annotations

import hashlib
import io
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


class HashingWriter(io.RawIOBase):
    """A file that knows the digests of what is written to it, from its beginning to its end."""

    def __init__(self, file: BinaryIO, *algorithms: str) -> None:
        self._file, self.size = file, 0
        self._hashes = {name: hashlib.new(name, usedforsecurity=False) for name in algorithms}

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._file.write(data)
        for each in self._hashes.values():
            each.update(data)
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def hexdigest(self, algorithm: str) -> str:
        """Of all that was written."""
        return self._hashes[algorithm].hexdigest()


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary path beside `path`, of the same suffix, whose file replaces it when the block ends.

    After an error `path` is as it was and the temporary file is gone; only a killed process leaves one, whose name
    begins with a dot.

    Args:
        durable: wait until the device has the file and its name; else a power cut may lose either.
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


def atomic_write(path: Path, data: bytes | str, *, durable: bool = True) -> None:
    """Make `path` a file of these bytes, or of this text in UTF-8; a reader sees the old file or the new one."""
    with replacing(path, durable=durable) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def sync(path: Path) -> None:
    """Wait until the device has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
