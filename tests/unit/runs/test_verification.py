"""Runs that are sound, damaged, equal and different."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints import state_file
from ray_yolo.cli import verify
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import CheckpointEvent
from ray_yolo.runs.event_log import EVENTS_FILE, EventLog
from ray_yolo.runs.run_record import write_record
from ray_yolo.runs.verification import check_files, compare_runs
from tests.support.messages.runs import record_of


def state(weight: float, step: int) -> dict:
    model = {"a.weight": torch.ones(2, 3), "b.bias": torch.tensor([weight, 1.0])}
    return {"meta": json.dumps({"seconds": weight}), "model": model,
            "optimizer": {"0": {"step": torch.tensor(float(step))}}}


def make(folder: Path, weights: dict[int, float], kept: int = 9) -> Path:
    """A run that has saved a weight at each step."""
    log = EventLog(str(folder / EVENTS_FILE))
    for step, weight in weights.items():
        path = checkpoint.save_checkpoint(folder, state(weight, step), step, "recipe", ["last"])
        checkpoint.prune(folder, kept)
        log.append(CheckpointEvent(step=step, epoch=0, path=str(path), kinds=("last",),
                                   digest=state_file.digest(state(weight, step))))
    log.close()
    write_record(folder, record_of(Recipe()))
    return folder


@pytest.fixture
def uninterrupted(tmp_path: Path) -> Path:
    return make(tmp_path / "calm", {2: 0.5, 4: 0.25, 6: 0.125})


def test_sound_files_are_listed_one_by_one(uninterrupted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify([str(uninterrupted)]) == 0
    assert capsys.readouterr().out.split() == [
        "run.json", "ok", "events.jsonl", "ok",
        "checkpoints/step-6/state.pt", "ok", "checkpoints/step-4/state.pt", "ok", "checkpoints/step-2/state.pt", "ok",
        "weights/last.pt", "ok"]


def test_a_flipped_byte_is_found(uninterrupted: Path) -> None:
    path = uninterrupted / "checkpoints" / "step-4" / "state.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert verify([str(uninterrupted)]) == 3
    assert [found.what for found in check_files(uninterrupted) if found.problem] == ["checkpoints/step-4/state.pt"]


@pytest.mark.parametrize("names", [["weights/last.pt"], ["checkpoints/step-4/state.pt"], ["run.json"],
                                   ["events.jsonl"], ["run.json", "events.jsonl"]])
def test_a_missing_file_is_found(uninterrupted: Path, names: list[str]) -> None:
    for name in names:
        (uninterrupted / name).unlink()
    assert verify([str(uninterrupted)]) == 3
    assert [found.what for found in check_files(uninterrupted) if found.problem] == names


def test_weights_without_their_run_are_checked_alone(uninterrupted: Path) -> None:
    for name in ("run.json", "events.jsonl"):
        (uninterrupted / name).unlink()
    shutil.rmtree(uninterrupted / "checkpoints")
    assert check_files(uninterrupted) == [("weights/last.pt", None)]


@pytest.mark.parametrize("name", ["weights/last.pt", "checkpoints/step-4/state.pt"])
def test_one_file_is_checked_against_its_manifest(
    uninterrupted: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert verify([str(uninterrupted / name)]) == 0
    assert capsys.readouterr().out.split() == [Path(name).name, "ok"]
    (uninterrupted / name).write_bytes(b"torn")
    assert verify([str(uninterrupted / name)]) == 3


def test_two_files_are_not_compared_and_the_help_promises_none(
        uninterrupted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(uninterrupted / "weights" / "last.pt")
    with pytest.raises(InputError):
        verify([file, file])
    with pytest.raises(SystemExit):
        verify(["--help"])
    about_other = capsys.readouterr().out.partition("\n  other ")[2].partition("options:")[0]
    assert " ".join(about_other.split()) == "folder or address of another run or sweep"


def test_equal_runs_are_compared_at_every_step_that_both_have_saved(uninterrupted: Path, tmp_path: Path) -> None:
    """Also where a checkpoint is gone, and whatever else they say of themselves."""
    other = make(tmp_path / "other", {4: 0.25, 6: 0.125, 8: 0.0}, kept=1)
    assert compare_runs(uninterrupted, other) == [("step 4", None), ("step 6", None)]


def test_the_first_step_and_the_first_tensor_that_differ_are_named(uninterrupted: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", {2: 0.5, 4: 0.26, 6: 0.13})
    assert compare_runs(uninterrupted, other) == [
        ("step 2", None),
        ("step 4", "model.b.bias differs in 1 of 2 numbers"),
    ]
    gone = make(tmp_path / "gone", {4: 0.26, 6: 0.13}, kept=1)
    assert compare_runs(uninterrupted, gone)[-1].problem.startswith("different tensors (the files are gone")


@pytest.mark.parametrize(("weights", "code"), [
    ({2: 0.5, 4: 0.25, 6: 0.125}, 0),
    ({2: 0.5, 4: 0.5, 6: 0.125}, 1),
    ({2: 0.5, 4: 0.5}, 1),  # it differs, however far it got
    ({2: 0.5, 4: 0.25}, 125),  # equal as far as it got
    ({3: 0.5}, 125),
])
def test_the_exit_codes_are_those_that_git_bisect_reads(
        uninterrupted: Path, tmp_path: Path, weights: dict[int, float], code: int) -> None:
    other = make(tmp_path / "other", weights)
    assert verify([str(uninterrupted), str(other), "--exit-code"]) == code


def test_what_cannot_be_read_is_skipped_by_git_bisect(
        uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify([str(uninterrupted), str(tmp_path / "missing"), "--exit-code"]) == 125
    assert "missing" in capsys.readouterr().err
    other = make(tmp_path / "other", {2: 0.5, 4: 0.25, 6: 0.125})
    (uninterrupted / "checkpoints" / "step-4" / "state.pt").write_bytes(b"")
    assert verify([str(uninterrupted), str(other), "--exit-code"]) == 125
    with pytest.raises(SystemExit) as stop:
        verify([str(uninterrupted), "--exit-code"])
    assert stop.value.code == 2
