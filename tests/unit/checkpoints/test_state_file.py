"""Files of states: written to the device, verified, and read without running anything in them."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_yolo.checkpoints import state_file
from ray_yolo.core.errors import CheckpointError
from tests.support.checkpoints import save
from tests.support.messages.weights import write_bomb, write_newer


def tree(weight: float, step: int) -> dict[str, Any]:
    return {"meta": json.dumps({"seconds": weight}), "model": {"a": torch.ones(2, 3), "b": torch.tensor([weight, 1.0])},
            "optimizer": {"0": {"step": torch.tensor(float(step))}}}


def test_a_written_state_is_known_by_its_size_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    known = state_file.write_state(path, tree(0.5, 2))
    (tmp_path / "state.json").write_text(state_file.manifest_text(
        {"format": 2, "step": 2, "recipe_digest": "digest", "weights": {}, **known}))
    assert state_file.verify_manifest(path, tmp_path / "state.json") is None
    assert known["size"] == path.stat().st_size
    read = state_file.read_state(path)
    assert state_file.digest(read) == state_file.digest(tree(0.5, 2))


@pytest.mark.parametrize("wrong", [
    {"weights": {"../../victim/best": 1}}, {"weights": {"epoch": 1}}, {"weights": {"best": "1"}},
    {"weights": {"best": -1}}, {"weights": ["best"]}, {"step": "1"}, {"step": None}, {"size": 1.5},
    {"sha256": "../../other/model"}, {"sha256": "A" * 64}, {"sha256": 1}, {"whole": {"size": 1, "sha256": "../x"}},
    {"whole": {"sha256": "a" * 64}}, {"whole": "a"}], ids=str)
def test_a_manifest_that_could_name_other_files_is_damaged(wrong: dict[str, Any]) -> None:
    """Its checksum protects against flipped bits only: who writes a manifest writes that, too."""
    right = {"format": 2, "step": 2, "recipe_digest": "digest", "size": 1, "sha256": "a" * 64,
             "weights": {"last": 2, "best": 0, "epoch12": 1}, "whole": {"size": 2, "sha256": "b" * 64}}
    assert state_file.parse_manifest(state_file.manifest_text(right).encode()).items() >= right.items()
    with pytest.raises(ValueError, match=r"its (weights|step|size|sha256|whole)"):
        state_file.parse_manifest(state_file.manifest_text(right | wrong).encode())


@pytest.mark.parametrize("mapped", [False, True])
def test_a_state_in_a_folder_that_is_not_utf_8_is_read(tmp_path: Path, mapped: bool) -> None:
    folder = tmp_path / os.fsdecode(b"n\xff")
    folder.mkdir()
    state_file.write_state(folder / "state.pt", tree(0.5, 2))
    read = state_file.load_plain(folder / "state.pt", mapped=mapped)
    assert state_file.digest(read) == state_file.digest(tree(0.5, 2))


def test_every_bit_and_name_of_a_tensor_counts() -> None:
    digests = {state_file.digest(state) for state in (
        tree(0.5, 2), tree(-0.5, 2), tree(0.5, 3), {**tree(0.5, 2), "more": torch.ones(1)},
        {"model": {"a": torch.ones(2, 3)}}, {"model": {"a": torch.ones(3, 2, dtype=torch.int32)}})}
    assert len(digests) == 6
    assert state_file.digest(tree(0.5, 2)) == state_file.digest({**tree(0.5, 2), "meta": "other text"})


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


def test_pickled_objects_are_not_loaded(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Evil()}, "best.pt")
    Path("plain.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("best.pt", "plain.pt"):
        with pytest.raises(CheckpointError):
            state_file.read_state(Path(name))
    assert not Path("unpickled").exists()


def test_weights_that_inflate_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_bomb(tmp_path / "bomb.pt")
    assert (tmp_path / "bomb.pt").stat().st_size * 100 < (tmp_path / "plain.pt").stat().st_size
    assert torch.equal(state_file.read_state(tmp_path / "plain.pt")["weight"], torch.zeros(1 << 20))
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(CheckpointError):
        state_file.read_state(tmp_path / "bomb.pt")


def test_an_archive_that_zipfile_cannot_read_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                   ) -> None:
    """torch's reader would accept it, compressed or not."""
    write_newer(tmp_path / "newer.pt")
    assert torch.equal(torch.load(tmp_path / "newer.pt", weights_only=True)["weight"], torch.zeros(3))
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(CheckpointError):
        state_file.read_state(tmp_path / "newer.pt")
