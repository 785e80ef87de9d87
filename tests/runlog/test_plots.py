"""The pictures that a run is left with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_yolo.engine.session import DETECTIONS_FILE
from ray_yolo.events import Event
from ray_yolo.runlog import plots
from ray_yolo.runlog.event_log import EVENTS_FILE, read_events
from ray_yolo.runlog.plots import draw_plots
from ray_yolo.runlog.results_files import format_results
from ray_yolo.runtime.trainer import fit
from tests.support import run_log
from tests.support.jobs import make_config, make_job

PICTURES = {"plot_results": ["results.png"], "plot_labels": ["labels.jpg"],
            "plot_pictures": ["train_batch0.jpg", "train_batch1.jpg", "train_batch2.jpg"],
            "plot_all_curves": ["PR_curve.png"], "plot_confusion": ["confusion_matrix.png"],
            "plot_truth_and_detections": ["val_batch0_pred.jpg", "val_batch1_pred.jpg"]}
TOLD = {"PR_curve.png": "curves", "confusion_matrix.png": "confusion matrices"}


@pytest.mark.parametrize("first", [0, 1])
def test_pictures_that_cannot_be_drawn_are_named_and_the_others_are_drawn(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no ink")

    job, broken = make_job(tmp_path), list(PICTURES)[first::2]
    run_log.write(job.run_dir / EVENTS_FILE, [run_log.run(), *run_log.trained_epoch(0)])
    np.save(job.run_dir / DETECTIONS_FILE, np.array([[0, 1, 1, 20, 20, 0.9, 0, *[1] * 10]], np.float32))
    for function in broken:
        monkeypatch.setattr(plots, function, refuse)
    lacking = [name for function in broken for name in PICTURES[function]]
    assert draw_plots(job.run_dir, job) == [f"{TOLD.get(name, name)} (ValueError: no ink)" for name in lacking]
    drawn = [name for names in PICTURES.values() for name in names if (job.run_dir / name).exists()]
    assert sorted(drawn + lacking) == sorted(name for names in PICTURES.values() for name in names)


def test_what_could_not_be_drawn_is_one_warning_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_yolo.runlog.plots.draw_plots", lambda *_: ["labels.jpg (OSError: full)", "curves"])
    result = fit(make_config(tmp_path, 0, {"noplots": False}, epochs=1), quiet=True)
    assert run_log.messages(result.run_dir) == ["pictures that could not be drawn: labels.jpg (OSError: full), curves"]


@pytest.mark.parametrize("end", [[], [run_log.end(10, "failed")], [run_log.end(10), run_log.start(10)]])
def test_of_a_training_that_has_not_come_to_its_end_nothing_is_drawn(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: list[Event]) -> None:
    monkeypatch.setattr("ray_yolo.runlog.plots.draw_plots", lambda *_: pytest.fail("drawn"))
    pictures = plots.Pictures(tmp_path, make_job(tmp_path), pytest.fail)
    for event in [run_log.run(), run_log.start(), *run_log.trained_epoch(0), *end]:
        pictures.event(event)
    pictures.finish()


def test_epochs_that_a_restart_took_back_are_drawn_no_more_than_they_are_in_results_csv(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, drawn = make_job(tmp_path), []
    taken_back = run_log.epoch(1, train={"box": 9.0, "obj": 9.0, "cls": 9.0})
    run_log.write(job.run_dir / EVENTS_FILE, [
        run_log.run(), *run_log.trained_epoch(0), taken_back, run_log.start(10), run_log.epoch(1), run_log.epoch(2)])
    monkeypatch.setattr(plots, "plot_results", lambda rows, _: drawn.extend(rows))
    failed = draw_plots(job.run_dir, job)
    assert [row.train["box"] for row in drawn] == [0.5, 0.5, 0.5]
    assert failed == []
    table = format_results(read_events(job.run_dir / EVENTS_FILE)).splitlines()[1:]
    assert [float(row.split(",")[1]) for row in table] == [row.train["box"] for row in drawn]
