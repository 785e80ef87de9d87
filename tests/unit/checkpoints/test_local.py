"""Checkpoints: verified before use, never half written, never unpickled."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints import state_file
from ray_yolo.core.errors import CheckpointError
from tests.support.checkpoints import begin, save, shown, value
from tests.support.messages.weights import flip_weight, write_later_format


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_saved_is_read_back_and_linked_under_its_kinds(tmp_path: Path) -> None:
    folder = save(tmp_path, 7, "last", "best")
    for path in (folder / "state.pt", tmp_path / "weights" / "last.pt", tmp_path / "weights" / "best.pt"):
        read = state_file.read_state(path)
        assert json.loads(read["meta"]) == {"value": 7}
        assert torch.equal(read["model"]["w"], torch.full((100,), 7.0))
    assert (tmp_path / "weights" / "last.pt").stat().st_ino == (folder / "state.pt").stat().st_ino


@pytest.mark.parametrize("kind", ["last", "best", "epoch3"])
def test_weights_are_verified_by_the_manifest_beside_them(tmp_path: Path, kind: str) -> None:
    """Also after their checkpoint was pruned, and after they were linked to another one."""
    save(tmp_path, 6, kind)
    manifest = (save(tmp_path, 7, kind) / "MANIFEST.json").read_text()
    checkpoint.prune(tmp_path, keep=1)
    weights = tmp_path / "weights" / f"{kind}.pt"
    assert weights.with_suffix(".json").read_text() == manifest
    assert json.loads(manifest)["step"] == json.loads(state_file.read_state(weights)["meta"])["value"] == 7
    flip_weight(weights, 7.0)
    with pytest.raises(CheckpointError):
        state_file.read_state(weights)


def test_a_manifest_links_no_file_outside_the_run(tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    victim.mkdir()
    manifest = save(run, 1, "last") / "MANIFEST.json"
    stated = json.loads(manifest.read_text())
    manifest.write_text(state_file.manifest_text(stated | {"weights": {"../../victim/best": 1}}))
    with pytest.raises(CheckpointError):
        checkpoint.recover(run, "digest")
    assert list(victim.iterdir()) == []


def test_pruning_keeps_the_newest_by_step_and_everything_that_is_linked(tmp_path: Path) -> None:
    for step in (2, 10, 9):  # written out of order: names decide, not times
        save(tmp_path, step, *(["best"] if step == 2 else []))
    checkpoint.prune(tmp_path, keep=2)
    assert [folder.name for folder in checkpoint.newest_first(tmp_path)] == ["step-10", "step-9"]
    assert json.loads(state_file.read_state(tmp_path / "weights" / "best.pt")["meta"]) == {"value": 2}


def test_after_newer_checkpoints_are_removed_the_weights_are_those_of_the_remaining_one(tmp_path: Path) -> None:
    save(tmp_path, 5, "last", "best")
    save(tmp_path, 9, "last")
    checkpoint.remove_newer(tmp_path, 5)
    assert checkpoint.recover(tmp_path, "digest") == (5, [])
    assert {kind: value(tmp_path / "weights" / f"{kind}.pt") for kind in ("last", "best")} == {"last": 5, "best": 5}
    checkpoint.check_weights(tmp_path, 5)


def test_where_all_checkpoints_were_removed_training_starts_again(tmp_path: Path) -> None:
    save(tmp_path, 9, "last")
    (tmp_path / "weights" / "last.json").write_text("{")  # also if the manifest is damaged
    checkpoint.remove_newer(tmp_path, -1)
    assert checkpoint.recover(tmp_path, "digest") == (-1, [])
    assert not list((tmp_path / "weights").iterdir())


def test_slim_weights_keep_what_is_asked_for_and_checkpoints_keep_all(tmp_path: Path) -> None:
    save(tmp_path, 1, "last", "best")
    newest = save(tmp_path, 2, "last")
    checkpoint.prune(tmp_path, keep=1)
    for _ in range(2):
        checkpoint.slim_weights(tmp_path, ["meta"])
        for kind, step in (("last", 2), ("best", 1)):
            assert state_file.read_state(tmp_path / "weights" / f"{kind}.pt") == {"meta": json.dumps({"value": step})}
        checkpoint.check_weights(tmp_path, 2)
    assert state_file.read_state(newest / "state.pt").keys() > {"meta"}
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [
        "best.json", "best.pt", "last.json", "last.pt"]


def test_a_crash_at_any_moment_of_slimming_leaves_valid_weights(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class CrashError(BaseException):
        pass

    def run(moment: int) -> int:
        """Crash before one file operation. Returns how many there were."""
        count, run_dir = 0, begin(tmp_path / f"run{moment}")
        originals = {(os, "open"): os.open, (Path, "replace"): Path.replace, (Path, "unlink"): Path.unlink,
                     (checkpoint, "atomic_write"): checkpoint.atomic_write}

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count >= moment:
                    raise CrashError
                return original(*args, **options)
            return call

        with monkeypatch.context() as patch:
            for (owner, name), original in originals.items():
                patch.setattr(owner, name, counted(original))
            with contextlib.suppress(CrashError):
                checkpoint.slim_weights(run_dir, ["meta"])
        for kind in ("last", "best"):
            assert "meta" in state_file.read_state(run_dir / "weights" / f"{kind}.pt")
        checkpoint.check_weights(run_dir, 2)
        checkpoint.slim_weights(run_dir, ["meta"])
        assert state_file.read_state(run_dir / "weights" / "best.pt").keys() == {"meta"}
        return count

    total = run(10**6)
    assert total > 10
    for moment in range(1, total + 1):
        run(moment)


@pytest.mark.parametrize("damage", [0, 1, 100, -1, "cut", "empty", "gone", "no manifest", "bad manifest"])
def test_a_damaged_checkpoint_is_skipped_with_a_reason(tmp_path: Path, damage: int | str) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    file, manifest = newest / "state.pt", newest / "MANIFEST.json"
    data = bytearray(file.read_bytes())
    if isinstance(damage, int):
        data[damage] ^= 1
        file.write_bytes(data)
    elif damage in ("cut", "empty"):
        file.write_bytes(data[:-1] if damage == "cut" else b"")
    elif damage == "gone":
        file.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text("{")
    newest_intact, problems = checkpoint.newest_verified(tmp_path)
    assert newest_intact is not None
    assert newest_intact.name == "step-1"
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
    assert state_file.verify_manifest(folder / "state.pt", folder / "MANIFEST.json")
    (folder / "MANIFEST.json").unlink()
    assert not torch.equal(state_file.read_state(folder / "state.pt")["model"]["w"], torch.full((100,), 1.0))


@pytest.mark.parametrize("moment", ["write", "manifest", "rename"])
def test_a_crash_while_saving_leaves_the_previous_checkpoint(
        tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, "last")
    original = checkpoint.atomic_write

    def crash(path: Path, data: str) -> None:
        if moment == "write" or (moment == "manifest" and path.name == "MANIFEST.json"):
            path.write_text(data[: len(data) // 2])
            raise OSError("no space left on device")
        original(path, data)

    monkeypatch.setattr(checkpoint, "atomic_write", crash)
    if moment == "rename":
        monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("interrupted")))
    with pytest.raises(OSError, match=r"no space|interrupted"):
        save(tmp_path, 2, "last")
    newest_intact, problems = checkpoint.newest_verified(tmp_path)
    assert newest_intact is not None
    assert newest_intact.name == "step-1"
    assert problems == []
    assert json.loads(state_file.read_state(tmp_path / "weights" / "last.pt")["meta"]) == {"value": 1}
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize("what", ["state.pt", "MANIFEST.json", "read", "list"])
def test_a_checkpoint_that_cannot_be_read_stops_the_start_and_nothing_is_renamed(
        tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path)
    newest = save(tmp_path, 3, "last")

    def refuse(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    if what in ("read", "list"):
        monkeypatch.setattr(*(os, "listdir") if what == "list" else (state_file.hashlib, "file_digest"), refuse)
    else:  # for root too
        (newest / what).unlink()
        (newest / what).mkdir()
    before = contents(tmp_path)
    with pytest.raises(CheckpointError):
        checkpoint.recover(tmp_path, "digest")
    assert contents(tmp_path) == before
    monkeypatch.undo()
    if what in ("read", "list"):
        assert checkpoint.recover(tmp_path, "digest") == (3, [])


def test_any_flipped_bit_of_the_newest_manifest_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    save(run, 25, "last", "best")
    manifest = (save(run, 50, "last") / "MANIFEST.json").read_bytes()
    for at in range(len(manifest)):
        bit = 2 * (at % 4)  # one bit of each byte: all of them take minutes
        flipped = bytearray(manifest)
        flipped[at] ^= 1 << bit
        shutil.copytree(run, copy)
        (copy / "checkpoints" / "step-50" / "MANIFEST.json").write_bytes(flipped)
        step, problems = checkpoint.recover(copy, "digest")
        assert (step, len(problems)) == (25, 1), (at, bit, flipped)
        assert shown(copy) == {"last": 25, "best": 25}, (at, bit)
        shutil.rmtree(copy)


def test_a_manifest_without_checksum_is_of_an_earlier_version(tmp_path: Path) -> None:
    run = begin(tmp_path)
    for manifest in (run / "checkpoints" / "step-2" / "MANIFEST.json", run / "weights" / "last.json"):
        content = json.loads(manifest.read_text()) | {"format": 1}
        del content["checksum"]
        manifest.unlink()
        manifest.write_text(json.dumps(content, indent=1))
    before = contents(run)
    assert checkpoint.recover(run, "digest") == (2, [])
    assert contents(run) == before


def test_a_save_does_not_make_a_removed_run_folder_again(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError):
        checkpoint.save_checkpoint(tmp_path / "run", {"meta": ""}, 2, "digest", ["last"])
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_a_newer_format_stops_the_start_although_there_is_an_older_one(tmp_path: Path) -> None:
    begin(tmp_path)
    write_later_format(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError):
        checkpoint.recover(tmp_path, "digest")
    assert contents(tmp_path) == before


def test_a_checkpoint_of_another_recipe_is_not_trained_on(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(CheckpointError):
        checkpoint.recover(tmp_path, "other")
    assert checkpoint.recover(tmp_path, "digest") == (2, [])


def test_training_starts_at_0_only_without_any_checkpoint_even_a_damaged_one(tmp_path: Path) -> None:
    assert checkpoint.recover(tmp_path, "digest") == (-1, [])
    (tmp_path / "checkpoints" / ".writing-step-1").mkdir(parents=True)  # killed in its first save
    assert checkpoint.recover(tmp_path, "digest") == (-1, [])
    assert os.listdir(tmp_path / "checkpoints") == []
    for step in (1, 2):
        (save(tmp_path, step, "last") / "state.pt").write_bytes(b"torn")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError):
        checkpoint.recover(tmp_path, "digest")
    assert contents(tmp_path) == before
    checkpoint.set_aside(tmp_path, newer_than=-1)
    with pytest.raises(CheckpointError):
        checkpoint.recover(tmp_path, "digest")


def test_a_run_whose_checkpoints_are_gone_does_not_start_again_at_0(tmp_path: Path) -> None:
    save(tmp_path, 1, "last")
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError):
        checkpoint.recover(tmp_path, "digest")
    shutil.rmtree(tmp_path / "weights")
    assert checkpoint.recover(tmp_path, "digest") == (-1, [])


def test_a_save_that_returns_late_leaves_the_next_save_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that hangs counts as failed after ten minutes, and the next one begins in the same process."""
    write, hangs, returns, is_writing = checkpoint.write_state, Event(), Event(), Event()

    def write_state(path: Path, content: dict[str, Any]) -> dict[str, Any]:
        written = write(path, content)
        if "step-1" in str(path):
            hangs.set()
            returns.wait(10)
        else:
            is_writing.set()
            first.join(10)  # the late save cleans up while the next one writes
        return written

    monkeypatch.setattr(checkpoint, "write_state", write_state)
    first = Thread(target=save, args=(tmp_path, 1, "last"))
    first.start()
    assert hangs.wait(10)
    second = Thread(target=save, args=(tmp_path, 2, "last"))
    second.start()
    assert is_writing.wait(10)
    returns.set()
    second.join(10)
    assert [value(folder / "state.pt") for folder in checkpoint.newest_first(tmp_path)] == [2, 1]
    assert shown(tmp_path) == {"last": 2}
