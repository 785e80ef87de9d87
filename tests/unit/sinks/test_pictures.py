"""The pictures of a run: drawn if they are missing or older than what they show."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_yolo.config.recipe import resolve
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import EpochEvent, Event
from ray_yolo.data.index import read_splits
from ray_yolo.engine.evaluate import DETECTIONS_FILE
from ray_yolo.runs.run_record import RunRecord, write_record
from ray_yolo.sinks import pictures as pictures_module
from ray_yolo.sinks.pictures import LAST_PICTURE, Pictures, recorded_spec
from ray_yolo.sinks.results_csv import format_results
from ray_yolo.sinks.retry import RecordError
from tests.support import run_log
from tests.support.jobs import TINY, make_config

TABLE = np.array([[0, 1, 1, 20, 20, 0.9, 0, 1]], np.float32)
BEGUN = [run_log.run(), run_log.start(), run_log.step(1)]
TRAINED = [*BEGUN, *run_log.trained_epoch(0)]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder with its record, below the folder with its data set."""
    asked = make_config(tmp_path, 0).recipe
    recipe = resolve(asked, 1, gpu=False).model_copy(update={"data": "data/data.yaml"})  # relative to the command's
    _, train, _ = read_splits(asked)
    folder = tmp_path / "runs" / "train" / "exp"
    folder.mkdir(parents=True)
    write_record(folder, RunRecord(
        digest="d", asked=asked, recipe=recipe, architecture=TINY, anchors=None, num_parameters=1, names=train.names,
        labels=train.digest, command="train", provenance={}))
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that would draw; they leave empty files."""
    names: list[str] = []

    def record(name: str, files: Callable[..., list[Path]]) -> Callable[..., None]:
        def draw(*given: Any) -> None:
            names.append(name)
            for file in files(*given):
                file.write_text("drawn")
        return draw

    for name, files in (("draw_training", lambda *given: []), ("plot_labels", lambda *given: [given[1]]),
                        ("plot_results", lambda *given: [given[1]]),
                        ("draw_detections", lambda *given: [given[3] / LAST_PICTURE])):
        monkeypatch.setattr(pictures_module, name, record(name, files))
    return names


def later(events: list[Event]) -> list[Event]:
    """Events of the far future: what they change is newer than any file."""
    return [event.model_copy(update={"time": 1e11}) for event in events]


def test_what_training_sees_is_drawn_first_and_the_rest_when_there_is_something_new(
        run_dir: Path, tmp_path: Path, calls: list[str]) -> None:
    drawn = Pictures(run_dir, [tmp_path])
    drawn.update([run_log.run(), run_log.start()], ended=False)
    assert calls == []
    drawn.update(BEGUN, ended=False)
    assert calls == ["draw_training", "plot_labels"]
    np.save(run_dir / DETECTIONS_FILE, TABLE)
    drawn.update(TRAINED, ended=False)
    assert calls[2:] == ["plot_results", "draw_detections"]
    drawn.update(TRAINED, ended=True)
    Pictures(run_dir, [tmp_path]).update(TRAINED, ended=True)  # another process draws nothing twice
    assert len(calls) == 4
    drawn.update([*TRAINED, *later([run_log.epoch(1, best=False)])], ended=False)
    assert calls[4:] == ["plot_results"]
    os.utime(run_dir / DETECTIONS_FILE, (1e10, 1e10))
    drawn.update(TRAINED, ended=False)
    assert calls[5:] == ["draw_detections"]


def test_a_process_that_was_killed_before_the_last_picture_is_no_loss(
        run_dir: Path, tmp_path: Path, calls: list[str]) -> None:
    np.save(run_dir / DETECTIONS_FILE, TABLE)
    Pictures(run_dir, [tmp_path]).update(TRAINED, ended=True)
    (run_dir / LAST_PICTURE).unlink()
    Pictures(run_dir, [tmp_path]).update(TRAINED, ended=True)
    assert calls[4:] == ["draw_detections"]


def test_detections_that_are_still_being_written_are_drawn_later(
        run_dir: Path, tmp_path: Path, calls: list[str]) -> None:
    drawn, path = Pictures(run_dir, [tmp_path]), run_dir / DETECTIONS_FILE
    np.save(path, TABLE)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(RecordError):
        drawn.update(TRAINED, ended=False)
    assert "draw_detections" not in calls
    path.write_bytes(whole)
    drawn.update(TRAINED, ended=False)
    assert calls[-1] == "draw_detections"


def test_a_picture_that_fails_is_named_and_tried_again_and_the_others_are_drawn(
        run_dir: Path, tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("full")

    np.save(run_dir / DETECTIONS_FILE, TABLE)
    drawn = Pictures(run_dir, [tmp_path])
    with monkeypatch.context() as patch:
        patch.setattr(pictures_module, "plot_labels", refuse)
        with pytest.raises(RecordError):
            drawn.update(TRAINED, ended=True)
    assert {"plot_results", "draw_detections"} <= set(calls)
    drawn.update(TRAINED, ended=True)
    assert (run_dir / "labels.jpg").exists()


def test_epochs_that_a_restart_took_back_are_drawn_no_more_than_they_are_in_results_csv(
        run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    drawn: list[EpochEvent] = []
    taken_back = run_log.epoch(1, train={"box": 9.0, "obj": 9.0, "cls": 9.0})
    events = [*run_log.trained_epoch(0), taken_back, run_log.start(10), run_log.epoch(1), run_log.epoch(2)]
    monkeypatch.setattr(pictures_module, "plot_results", lambda rows, _: drawn.extend(rows))
    Pictures(run_dir, [tmp_path]).update(run_log.numbered(events), ended=False)
    assert [row.train["box"] for row in drawn] == [0.5, 0.5, 0.5]
    table = format_results(run_log.numbered(events)).splitlines()[1:]
    assert [float(row.split(",")[1]) for row in table] == [row.train["box"] for row in drawn]


def test_a_relative_data_set_is_found_from_the_command_or_above_the_run(run_dir: Path, tmp_path: Path) -> None:
    for folders in ([tmp_path], [Path("/nowhere"), *run_dir.parents]):
        spec = recorded_spec(run_dir, folders, None)
        assert (spec.recipe.data, len(spec.val)) == (str(tmp_path / "data" / "data.yaml"), 11)


@pytest.mark.parametrize("split", ["train", "val"])
def test_other_labels_are_not_drawn_as_those_of_the_training(
        run_dir: Path, tmp_path: Path, calls: list[str], split: str) -> None:
    """A table of detections names images by their numbers, which other validation images have now."""
    spec = recorded_spec(run_dir, [tmp_path], None)
    events = [run_log.dataset(val="of an earlier start"), run_log.dataset(train=spec.train.digest, val=spec.val.digest),
              *TRAINED]
    np.save(run_dir / DETECTIONS_FILE, TABLE)
    label = next((tmp_path / "data" / "labels" / split).glob("*.txt"))
    label.write_text("")
    with pytest.raises(InputError, match="labels have changed"):
        Pictures(run_dir, [tmp_path]).update(events, ended=True)
    assert calls == ["plot_results"]


@pytest.mark.parametrize("digest", [None, ""])
def test_an_older_log_that_states_no_labels_refuses_none(run_dir: Path, tmp_path: Path, digest: str | None) -> None:
    event = None if digest is None else run_log.dataset(val=digest)
    assert len(recorded_spec(run_dir, [tmp_path], event).val) == 11
