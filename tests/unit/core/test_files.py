"""Files that are replaced in one moment, and digests of what is written."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ray_yolo.core.files import (
    ABANDONED_SECONDS,
    HashingWriter,
    atomic_write,
    clear_temporary,
    is_in_place,
    replacing,
)


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path, durable: bool) -> None:
    for data in (b"first", "zweite \N{LATIN SMALL LETTER U WITH DIAERESIS}"):
        atomic_write(tmp_path / "a.json", data, durable=durable)
        assert (tmp_path / "a.json").read_bytes() == (data if isinstance(data, bytes) else data.encode())
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_what_killed_processes_have_left_is_cleared(tmp_path: Path) -> None:
    names = [f".{'0a' * 16}.png", f".{'0b' * 16}", f".{'0c' * 16}.json", ".lock", ".records", "results.png", ".0a.png"]
    for name in names:
        (tmp_path / name).touch()
        if name != names[2]:  # which another process is writing
            os.utime(tmp_path / name, (0, time.time() - ABANDONED_SECONDS - 1))
    clear_temporary(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names[2:])


@pytest.mark.parametrize("deed", ["move", "move above", "remove", "replace"])
def test_an_open_file_knows_whether_it_is_in_its_place(tmp_path: Path, deed: str) -> None:
    run = tmp_path / "project" / "run"
    run.mkdir(parents=True)
    with (run / ".lock").open("a+") as lock:
        atomic_write(run / "other", b"")
        assert is_in_place(lock)
        if deed == "move":
            run.rename(tmp_path / "moved")
        elif deed == "move above":
            run.parent.rename(tmp_path / "moved")
        else:
            shutil.rmtree(run)
        if deed == "replace":
            run.mkdir()
            for _ in range(100):  # a file system may use a free inode again, but not one that is open
                (run / ".lock").unlink(missing_ok=True)
                (run / ".lock").touch()
                assert not is_in_place(lock)
        assert not is_in_place(lock)


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    atomic_write(tmp_path / "results.csv", "old")
    with suppress(KeyboardInterrupt), replacing(tmp_path / "results.csv") as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert (tmp_path / "results.csv").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


def test_characters_that_utf8_lacks_become_escapes(tmp_path: Path) -> None:
    atomic_write(tmp_path / "predictions.csv", "b\udcfcrste.jpg")
    assert (tmp_path / "predictions.csv").read_text() == r"b\udcfcrste.jpg"


def test_the_file_is_on_the_device_before_it_has_its_name_and_the_name_before_the_end(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        seen.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def note_replace(*args: str) -> None:
        seen.append("replace")
        replace(*args)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    atomic_write(tmp_path / "a", b"")
    assert seen == ["file", "replace", "folder"]
    atomic_write(tmp_path / "a", b"", durable=False)
    assert seen[3:] == ["replace"]


def test_a_hashing_writer_knows_size_and_digests(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        writer = HashingWriter(file, "sha256", "md5")
        for piece in (b"one", memoryview(b"two"), b""):
            writer.write(piece)
    assert (tmp_path / "a").read_bytes() == b"onetwo"
    assert (writer.size, writer.hexdigest("sha256"), writer.hexdigest("md5")) == (
        6, hashlib.sha256(b"onetwo").hexdigest(), hashlib.md5(b"onetwo").hexdigest())
