"""Checks of a cluster's nodes before training starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.index import read_index
from ray_yolo.runtime import node_checks
from ray_yolo.runtime.node_checks import (
    Report,
    make_snapshot,
    node_errors,
    node_warnings,
    report,
    sample,
    versions,
)
from ray_yolo.storage.store import FolderStore
from tests.support.jobs import make_dataset, make_index

OURS = {"Python": "3.11", "torch": "2.9.0", "ray_yolo": "0.2.0 (aaaaaaaa)"}
SOUND = Report(OURS, unseen=False, refuses="", lacks=(), clock=0.0, free=10**12, shared=10**9)


def test_a_sound_node_has_no_errors_and_small_faults_are_warnings() -> None:
    assert list(node_errors("n1", SOUND, OURS, "/runs", 32)) == []
    assert list(node_warnings("n1", SOUND, 1.0)) == []
    *others, shared = node_warnings("n1", SOUND._replace(free=10**9, shared=67_108_864), -9.4)
    assert others == ["node n1: its clock is 9 s behind; so are times in logs",
                      "node n1: only 1.0 GB free for temporary files"]
    assert shared.startswith("node n1: only 67 MB free in /dev/shm, through which loader processes")


def test_a_node_reports_what_it_finds(tmp_path: Path) -> None:
    index = make_index(tmp_path, 40)
    files = sample(index, index)
    assert len(files) == 32
    assert {Path(path).stat().st_size == size for path, size in files} == {True}
    assert report(str(tmp_path), files)._replace(clock=0.0, free=0, shared=0) == Report(
        versions(), False, "", (), 0.0, 0, 0)
    Path(files[3][0]).unlink()
    Path(files[5][0]).write_bytes(b"another picture")
    assert report(str(tmp_path / files[0][0]), files).lacks == (files[3][0], files[5][0])
    assert report(str(tmp_path / "gone"), ()).unseen
    assert list(tmp_path.rglob(".ray_yolo*")) == []


def test_storage_that_cannot_be_written_to_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(node_checks.os, "fsync", refuse)
    assert "Read-only file system" in report(str(tmp_path), ()).refuses


def test_a_store_is_written_to_and_one_that_refuses_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    address = f"file://{tmp_path}/bucket"
    assert report(address, ())._replace(clock=0.0, free=0, shared=0) == Report(
        versions(), False, "", (), 0.0, 0, 0)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    monkeypatch.setenv("RAY_YOLO_CACHE", "/proc/cache")
    assert "/proc/cache" in report(address, ()).refuses

    def refuse(*_: object) -> None:
        raise OSError("AccessDenied")

    monkeypatch.setattr(FolderStore, "put", refuse)
    assert report(address, ()).refuses == "AccessDenied"
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    assert "pip install" in report("s3://bucket/x", ()).refuses


def test_a_node_makes_its_snapshot_of_the_drivers_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "driver"))
    index = read_index(read_description(f"file://{make_dataset(tmp_path / 'set', 5)}"), "train")
    assert index.snapshot
    assert sample(index) == ()
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "node"))
    error, [line] = make_snapshot(index.snapshot)
    assert not error
    assert f"downloading 33 files (0.1 MB) into {tmp_path}/node/" in line
    assert make_snapshot(index.snapshot) == ("", [])
    (tmp_path / "set" / "images" / "train" / "000.png").unlink()
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "late"))
    assert "has changed since" in make_snapshot(index.snapshot)[0]


def test_other_code_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("a", "gain = 0.05"), ("b", "gain = 0.5")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    found = []
    for name in "aab":
        monkeypatch.setattr(node_checks.ray_yolo, "__file__", str(tmp_path / name / "__init__.py"))
        found.append(versions()["ray_yolo"])
    assert found[0] == found[1] != found[2]
