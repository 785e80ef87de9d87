"""The pictures of a run, while it goes on, and however it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Pipe
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from ray_yolo.core.events import EpochEvent
from ray_yolo.engine.build import TrainSpec
from ray_yolo.engine.session import DETECTIONS_FILE
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.sinks import pictures as pictures_module
from ray_yolo.sinks.base import Sinks
from ray_yolo.sinks.pictures import PlotSink, PlotWorker, follow_training, start_process
from ray_yolo.sinks.results_csv import format_results
from tests.support import run_log
from tests.support.jobs import make_spec

TABLE = np.array([[0, 1, 1, 20, 20, 0.9, 0, 1]], np.float32)


def wait_until(condition: Callable[[], object], seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


@pytest.fixture
def spec(tmp_path: Path) -> TrainSpec:
    made = make_spec(tmp_path)
    run_log.write(made.run_dir / EVENTS_FILE, [run_log.run(), run_log.start()])
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the pictures that would be drawn."""
    names: list[str] = []

    def record(name: str, place: int) -> Callable[..., None]:
        def draw(*given: Any) -> None:
            names.append(name)
            if isinstance(given[place], Path):
                given[place].touch()
        return draw

    for name, place in (("draw_training", 0), ("plot_labels", 1), ("plot_results", 1), ("draw_detections", 0)):
        monkeypatch.setattr(pictures_module, name, record(name, place))
    return names


def test_what_training_sees_is_drawn_first_and_the_rest_when_there_is_something_new(
        spec: TrainSpec, calls: list[str]) -> None:
    drawn = PlotWorker(spec.run_dir, spec)
    drawn.update()
    assert calls == ["draw_training", "plot_labels"]
    drawn.update()
    run_log.write(spec.run_dir / EVENTS_FILE, [run_log.step(1)])
    drawn.update()
    assert len(calls) == 2
    np.save(spec.run_dir / DETECTIONS_FILE, TABLE)
    run_log.write(spec.run_dir / EVENTS_FILE, run_log.trained_epoch(0))
    drawn.update()
    assert calls[2:] == ["plot_results", "draw_detections"]
    run_log.write(spec.run_dir / EVENTS_FILE, [run_log.epoch(1, best=False)])
    drawn.update()
    assert calls[4:] == ["plot_results"]
    PlotWorker(spec.run_dir, spec).update()  # by the next start of the run
    assert calls[5:] == ["plot_results", "draw_detections"]


def test_detections_that_are_still_being_written_are_drawn_later(spec: TrainSpec, calls: list[str]) -> None:
    drawn, path = PlotWorker(spec.run_dir, spec), spec.run_dir / DETECTIONS_FILE
    np.save(path, TABLE)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    drawn.update()
    assert ("draw_detections" in calls, list(drawn.failed)) == (False, [DETECTIONS_FILE])
    path.write_bytes(whole)
    drawn.update()
    assert (calls[-1], drawn.failed) == ("draw_detections", {})


def test_epochs_that_a_restart_took_back_are_drawn_no_more_than_they_are_in_results_csv(
        spec: TrainSpec, monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    drawn: list[EpochEvent] = []
    taken_back = run_log.epoch(1, train={"box": 9.0, "obj": 9.0, "cls": 9.0})
    run_log.write(spec.run_dir / EVENTS_FILE, [
        *run_log.trained_epoch(0), taken_back, run_log.start(10), run_log.epoch(1), run_log.epoch(2)])
    monkeypatch.setattr(pictures_module, "plot_results", lambda rows, _: drawn.extend(rows))
    PlotWorker(spec.run_dir, spec).update()
    assert [row.train["box"] for row in drawn] == [0.5, 0.5, 0.5]
    table = format_results(read_events(spec.run_dir / EVENTS_FILE)).splitlines()[1:]
    assert [float(row.split(",")[1]) for row in table] == [row.train["box"] for row in drawn]


def test_what_could_not_be_drawn_is_one_warning(
    spec: TrainSpec, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("full")

    def here() -> tuple[Any, None]:
        ours, theirs = Pipe()
        Thread(target=follow_training, args=(theirs,), daemon=True).start()
        return ours, None

    warnings: list[str] = []
    monkeypatch.setattr(pictures_module, "start_process", here)
    monkeypatch.setattr(pictures_module, "plot_labels", refuse)
    pictures = PlotSink(spec.run_dir, spec, warnings.append)
    pictures.event(run_log.step(1))
    pictures.update()
    pictures.update(last=True)
    assert warnings == ["pictures that could not be drawn: labels.jpg (OSError: full)"]


def test_no_process_draws_before_the_first_step(spec: TrainSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its imports would take the seconds of the first step's."""
    monkeypatch.setattr(pictures_module, "start_process", pytest.fail)
    pictures = PlotSink(spec.run_dir, spec, pytest.fail)
    pictures.event(run_log.start())
    pictures.update()


def test_a_process_that_was_killed_is_reported_and_another_one_draws(
    spec: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_log.write(spec.run_dir / EVENTS_FILE, run_log.trained_epoch(0))
    started = []

    def start() -> Any:
        started.append(start_process())
        return started[-1]

    monkeypatch.setattr(pictures_module, "start_process", start)
    pictures = PlotSink(spec.run_dir, spec, pytest.fail)
    pictures.event(run_log.step(1))
    pictures.update()
    os.kill(started[0][1].pid, signal.SIGKILL)
    started[0][1].wait()
    with pytest.raises(ChildProcessError, match="has ended"):
        pictures.update(last=True)
    pictures.update(last=True)
    assert (spec.run_dir / "results.png").exists()
    assert (spec.run_dir / "train_batch2.jpg").exists()
    assert started[1][1].returncode == 0


@pytest.mark.timeout(900)  # it gives way to whatever else the machine does
def test_the_pictures_of_a_killed_driver_are_completed(spec: TrainSpec) -> None:
    """Ctrl-C, which goes to all processes of a terminal's group, does not reach the one that draws."""
    pipe, process = start_process()
    assert process
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
    pictures_module._set_priority(process.pid, "SCHED_OTHER", 0)  # a busy machine would leave it no time
    pipe.send((spec.run_dir, spec, None))
    wait_until(lambda: (spec.run_dir / "labels.jpg").exists())
    run_log.write(spec.run_dir / EVENTS_FILE, run_log.trained_epoch(0))
    wait_until(lambda: (spec.run_dir / "results.png").exists())  # while the training goes on
    np.save(spec.run_dir / DETECTIONS_FILE, TABLE)
    pipe.close()
    process.wait(200)
    assert {"confusion_matrix.png", "F1_curve.png", "val_batch0_pred.jpg"} <= {
        path.name for path in spec.run_dir.iterdir()}


def test_a_prompt_does_not_wait_for_the_last_pictures(spec: TrainSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    monkeypatch.setattr(pictures_module, "start_process", lambda: (ours, None))
    pictures, warnings = PlotSink(spec.run_dir, spec, pytest.fail), list[str]()
    sinks = Sinks(spec.run_dir / EVENTS_FILE, [pictures], warnings.append, interactive=True)
    start = time.monotonic()
    sinks.finish()
    assert time.monotonic() - start < 3
    assert pictures.is_abandoned
    assert warnings == [f"the last pictures are still being drawn into {spec.run_dir}"]
    assert theirs.recv()[0] == spec.run_dir
    assert theirs.recv() is None


def test_pictures_that_are_complete_before_the_driver_is_are_no_reason_to_leave_the_rest(
        spec: TrainSpec, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command does not wait for the pictures, and is still busy with other sinks when they are complete."""
    release, completed = Event(), list[Path]()
    processes: list[Thread] = []

    def here() -> tuple[Any, None]:
        ours, theirs = Pipe()
        processes.append(Thread(target=follow_training, args=(theirs,), daemon=True))
        processes[0].start()
        return ours, None

    monkeypatch.setattr(pictures_module, "start_process", here)
    monkeypatch.setattr(pictures_module, "plot_labels", lambda *_: release.wait(60))
    monkeypatch.setattr("ray_yolo.sinks.completion.complete", completed.append)
    pictures = PlotSink(spec.run_dir, spec, pytest.fail)
    Sinks(spec.run_dir / EVENTS_FILE, [pictures], lambda _: None, interactive=True).finish()
    assert pictures.is_abandoned
    release.set()
    processes[0].join(1)
    (spec.run_dir / "finished").touch()
    processes[0].join(60)
    assert completed == [spec.run_dir]


def test_what_the_driver_left_pending_is_delivered_after_the_pictures(
        spec: TrainSpec, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    delivered: list[tuple[Path, str]] = []
    completed: list[Path] = []
    monkeypatch.setattr("ray_yolo.sinks.completion.deliver_pending", lambda *run: delivered.append(run))
    monkeypatch.setattr("ray_yolo.sinks.completion.complete", completed.append)
    for finished in (False, True):
        if finished:
            (spec.run_dir / "finished").touch()
        ours, theirs = Pipe()
        ours.send((spec.run_dir, spec, "http://server"))
        ours.send(None)
        ours.close()
        follow_training(theirs)
        assert delivered == [(spec.run_dir, "http://server")] * finished
        assert completed == [spec.run_dir] * finished
    assert "draw_training" in calls
