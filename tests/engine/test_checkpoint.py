"""Checkpoints: verified before use, never half written, never unpickled."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_yolo.engine import checkpoint
from ray_yolo.errors import CheckpointError


def state(value: float) -> dict[str, Any]:
    return {"meta": json.dumps({"value": value}), "model": {"w": torch.full((100,), float(value))}}


def save(run_dir: Path, step: int, *kinds: str) -> Path:
    return checkpoint.save_checkpoint(run_dir, state(step), step, "digest", kinds)


def test_what_is_saved_is_read_back_and_linked_under_its_kinds(tmp_path: Path) -> None:
    folder = save(tmp_path, 7, "last", "best")
    for path in (folder / "state.pt", tmp_path / "weights" / "last.pt", tmp_path / "weights" / "best.pt"):
        read = checkpoint.read_state(path)
        assert json.loads(read["meta"]) == {"value": 7}
        assert torch.equal(read["model"]["w"], torch.full((100,), 7.0))
    assert (tmp_path / "weights" / "last.pt").stat().st_ino == (folder / "state.pt").stat().st_ino


@pytest.mark.parametrize("kind", ["last", "best", "epoch3"])
def test_weights_are_verified_by_the_manifest_beside_them(tmp_path: Path, kind: str) -> None:
    """Also when their checkpoint is gone, and when they name another one than before."""
    save(tmp_path, 6, kind)
    manifest = (save(tmp_path, 7, kind) / "MANIFEST.json").read_text()
    checkpoint.prune(tmp_path, keep=1)
    weights = tmp_path / "weights" / f"{kind}.pt"
    assert weights.with_suffix(".json").read_text() == manifest
    assert json.loads(manifest)["step"] == json.loads(checkpoint.read_state(weights)["meta"])["value"] == 7
    data = bytearray(weights.read_bytes())
    data[data.rindex(torch.full((100,), 7.0).numpy().tobytes()) + 2] ^= 0x40
    weights.unlink()
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{kind}\.pt.*SHA-256.*{kind}\.json"):
        checkpoint.read_state(weights)


def test_pruning_keeps_the_newest_by_step_and_everything_that_is_linked(tmp_path: Path) -> None:
    for step in (2, 10, 9):  # written out of order: names decide, not times
        save(tmp_path, step, *(["best"] if step == 2 else []))
    checkpoint.prune(tmp_path, keep=2)
    assert [folder.name for folder in checkpoint.newest_first(tmp_path)] == ["step-10", "step-9"]
    assert json.loads(checkpoint.read_state(tmp_path / "weights" / "best.pt")["meta"]) == {"value": 2}


@pytest.mark.parametrize("place", [0, 1, 100, -1, "cut", "empty", "gone", "no manifest", "bad manifest"])
def test_a_damaged_checkpoint_is_passed_over_with_a_reason(tmp_path: Path, place: int | str) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    file, manifest = newest / "state.pt", newest / "MANIFEST.json"
    data = bytearray(file.read_bytes())
    if isinstance(place, int):
        data[place] ^= 1
        file.write_bytes(data)
    elif place in ("cut", "empty"):
        file.write_bytes(data[:-1] if place == "cut" else b"")
    elif place == "gone":
        file.unlink()
    elif place == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text("{")
    found, problems = checkpoint.newest_verified(tmp_path)
    assert found is not None
    assert found.name == "step-1"
    assert len(problems) == 1
    assert problems[0].startswith("step-2: ")
    checkpoint.set_aside(tmp_path, newer_than=1)
    assert [folder.name for folder in checkpoint.newest_first(tmp_path)] == ["step-1"]
    assert (tmp_path / "checkpoints" / "damaged-step-2").exists()


def test_without_the_manifest_check_a_flipped_bit_would_be_loaded(tmp_path: Path) -> None:
    """Negative control: torch itself does not notice a damaged weight when its own checksum is not read."""
    folder = save(tmp_path, 1)
    data = bytearray((folder / "state.pt").read_bytes())
    at = data.rindex(torch.full((100,), 1.0).numpy().tobytes())
    data[at + 2] ^= 0x40
    (folder / "state.pt").write_bytes(data)
    assert checkpoint.damage(folder / "state.pt", folder / "MANIFEST.json")
    (folder / "MANIFEST.json").unlink()
    assert not torch.equal(checkpoint.read_state(folder / "state.pt")["model"]["w"], torch.full((100,), 1.0))


@pytest.mark.parametrize("moment", ["write", "manifest", "rename"])
def test_a_crash_while_saving_leaves_the_previous_checkpoint(
        tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, "last")
    original = checkpoint.write_durably

    def crash(path: Path, data: bytes) -> None:
        if moment == "write" or (moment == "manifest" and path.name == "MANIFEST.json"):
            path.write_bytes(data[: len(data) // 2])
            raise OSError("no space left on device")
        original(path, data)

    monkeypatch.setattr(checkpoint, "write_durably", crash)
    if moment == "rename":
        monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("interrupted")))
    with pytest.raises(OSError, match=r"no space|interrupted"):
        save(tmp_path, 2, "last")
    found, problems = checkpoint.newest_verified(tmp_path)
    assert found is not None
    assert found.name == "step-1"
    assert problems == []
    assert json.loads(checkpoint.read_state(tmp_path / "weights" / "last.pt")["meta"]) == {"value": 1}
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_data_is_on_the_device_before_its_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    sync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: (order.append("sync"), sync(descriptor))[1])
    monkeypatch.setattr(Path, "rename", lambda self, target: (order.append("rename"), rename(self, target))[1])
    save(tmp_path, 1)
    assert order == ["sync", "sync", "sync", "rename", "sync"]  # state, manifest, folder; name; its folder


class Evil:
    """Unpickling it would leave a trace."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unpickled",)


def test_pickled_objects_are_refused_with_the_line_that_converts_them(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Evil()}, "best.pt")
    Path("plain.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("best.pt", "plain.pt"):
        with pytest.raises(CheckpointError, match="state_dict"):
            checkpoint.read_state(Path(name))
    assert not Path("unpickled").exists()


def test_weights_that_inflate_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"weight": torch.zeros(1 << 20)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, \
            zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name))
    assert (tmp_path / "bomb.pt").stat().st_size * 100 < (tmp_path / "plain.pt").stat().st_size
    assert torch.equal(checkpoint.read_state(tmp_path / "plain.pt")["weight"], torch.zeros(1 << 20))
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(CheckpointError, match=r"bomb\.pt: its contents are compressed.*torch\.save"):
        checkpoint.read_state(tmp_path / "bomb.pt")


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 broken"])
def test_files_that_are_no_weights_get_one_clear_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        checkpoint.read_state(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="no such weights file"):
        checkpoint.read_state(tmp_path / "missing.pt")
    with pytest.raises(CheckpointError, match="no such weights file"):
        checkpoint.read_state(tmp_path / ("x" * 300 + ".pt"))
