"""TensorBoard's files hold the durable epochs, each point once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from ray_yolo.core.events import ANCHOR_TERMS, Event
from ray_yolo.runtime.trainer import fit
from ray_yolo.sinks.metric_names import metrics
from ray_yolo.sinks.tensorboard import TensorBoard
from tests.support import run_log
from tests.support.jobs import make_config

TWO = [*run_log.trained_epoch(0), *run_log.trained_epoch(1)]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    files = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = files.Tags()["scalars"]
    # files of one second are read in the order of their names, the tenth of a process before its ninth: hence sorted
    return {tag: sorted((point.step, round(point.value, 6)) for point in files.Scalars(tag)) for tag in tags}


def notify(board: TensorBoard, events: Sequence[Event], ended: bool = False) -> None:
    board.update(run_log.numbered(events), ended)


def write(folder: Path, events: Sequence[Event]) -> dict[str, list[tuple[int, float]]]:
    """The points in the folder of a record of these events."""
    notify(TensorBoard(folder), events, ended=True)
    return scalars(folder)


def test_tags_are_mlflows_and_steps_are_epochs(tmp_path: Path) -> None:
    found = write(tmp_path, TWO)
    assert set(found) == {metric.name for metric in metrics(ANCHOR_TERMS)}
    assert found["metrics/mAP50"] == [(1, 0.125), (2, 1.125)]


def test_only_durable_epochs_are_written(tmp_path: Path) -> None:
    assert write(tmp_path, [*run_log.trained_epoch(0), run_log.epoch(1)])["train/box_loss"] == [(1, 0.5)]


def test_nothing_is_written_before_there_is_an_epoch(tmp_path: Path) -> None:
    assert write(tmp_path, [run_log.start(), run_log.epoch(0)]) == {}
    assert list(tmp_path.iterdir()) == []


def test_growing_logs_and_new_starts_repeat_no_point(tmp_path: Path) -> None:
    story = [*TWO, *run_log.trained_epoch(2)]
    for length in (2, 2, 4, 6):
        board = TensorBoard(tmp_path)
        notify(board, story[:length - 1])
        notify(board, story[:length])
        notify(board, story[:length], ended=True)
    # files of one second are read in the order of their names, in which the tenth comes before the ninth
    assert sorted(step for step, _ in scalars(tmp_path)["x/lr2"]) == [1, 2, 3]


def test_a_writer_that_fails_in_the_middle_is_made_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = SummaryWriter.add_scalar
    left = iter(range(20))

    def fail_once(self: SummaryWriter, *args: Any, **kwargs: Any) -> None:
        if next(left, None) == 17:
            self.flush()
            raise OSError("no space left")
        add(self, *args, **kwargs)

    monkeypatch.setattr(SummaryWriter, "add_scalar", fail_once)
    board = TensorBoard(tmp_path)
    with pytest.raises(OSError, match="no space"):
        notify(board, TWO)
    notify(board, TWO, ended=True)
    assert all([step for step, _ in points] == [1, 2] for points in scalars(tmp_path).values())


def test_points_that_a_failing_writer_lost_are_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no space left")

    board = TensorBoard(tmp_path)
    notify(board, TWO[:2])
    with monkeypatch.context() as patch:
        patch.setattr(SummaryWriter, "add_scalar", lambda *_, **__: None)
        patch.setattr(SummaryWriter, "flush", refuse)
        with pytest.raises(OSError, match="no space"):
            notify(board, TWO)
    notify(board, TWO, ended=True)
    assert scalars(tmp_path)["train/box_loss"] == [(1, 0.5), (2, 0.5)]


def test_what_was_not_measured_has_no_point(tmp_path: Path) -> None:
    found = write(tmp_path, [run_log.epoch(0, metrics=None, val={"box": None, "obj": 0.5, "cls": 0.5}),
                             run_log.checkpoint(10)])
    assert "metrics/recall" not in found
    assert "val/box_loss" not in found
    assert not any(math.isnan(value) for points in found.values() for _, value in points)


def test_a_training_without_tensorboard_writes_all_but_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                 ) -> None:
    monkeypatch.setattr("ray_yolo.sinks.tensorboard.find_spec", lambda name: None)
    result = fit(make_config(tmp_path, 0, epochs=1), quiet=True)
    assert (result.run_dir / "results.csv").exists()
    assert not list(result.run_dir.glob("events.out.tfevents.*"))
    assert not run_log.messages(result.run_dir)


def test_complete_files_get_no_further_one(tmp_path: Path) -> None:
    write(tmp_path, TWO)
    files = sorted(tmp_path.iterdir())
    write(tmp_path, TWO)
    assert sorted(tmp_path.iterdir()) == files
