"""The folder and the process groups of a Ray of our own."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_yolo.runtime.local_ray import session_folder


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short folder, as addresses of sockets must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="b") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


def test_each_session_has_a_folder_that_no_other_user_can_enter(base: Path) -> None:
    folders = {session_folder().parent for _ in range(2)}
    assert {folder.parent for folder in folders} == {base}
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 2


def test_a_long_temporary_folder_leaves_room_for_addresses_of_sockets(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("long" * 10)))
    session = "session_2026-11-23_22-03-06_123456_4194304/sockets/plasma_store"
    assert len(f"{session_folder()}/{session}") <= 107
