"""The page of a run: what its log and its folder hold, written when the log has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.core.events import ClassResult, WorkerEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.sinks.records import RunRecords
from ray_yolo.sinks.run_page import RunPage, run_page
from tests.support import run_log
from tests.support.pictures import smooth_picture, write_image

LOG = [run_log.run(), run_log.start(), run_log.step(1), *run_log.trained_epoch(0), run_log.end(2, "done")]


def test_a_page_has_the_result_and_each_picture_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "exp"
    run_log.write(folder / EVENTS_FILE, LOG)
    names = ["results.png", "PR_curve.png", "confusion_matrix.png", "labels.jpg", "val_batch0_pred.jpg",
             "train_batch0.jpg"]
    for name in names:
        write_image(folder / name, smooth_picture(20, 30))
    page = run_page(folder, read_events(folder / EVENTS_FILE))
    assert "<h1>exp</h1>" in page
    assert [name for name in names if f'alt="{name}"' not in page] == []
    assert "best epoch   1" in page


def test_a_page_has_the_hours_of_workers_by_market_type_from_the_whole_log(tmp_path: Path) -> None:
    worker = WorkerEvent(worker=0, node="n", pid=1, market_type="spot", time=0.0)
    start = run_log.start(members=(0,), num_workers=1, gpus=1, time=0.0)
    lines = [event.model_dump_json() for event in (worker, start, run_log.end(2).model_copy(update={"time": 9000.0}))]
    (tmp_path / EVENTS_FILE).write_text("\n".join(lines) + "\n")
    assert "<pre>2.50 GPU hours: 2.50 spot</pre>" in run_page(tmp_path, [])


def test_a_page_has_a_row_for_each_class_of_the_best_epoch(tmp_path: Path) -> None:
    """As the record process makes it: its events are without classes."""
    metrics = {"precision": 0.5, "recall": 0.5, "mAP50": 0.5, "mAP50-95": 0.25}
    classes = [ClassResult.model_validate({"name": name, "images": 8, "labels": labels, **metrics})
               for name, labels in (("circle", 31), ("square", 11))]
    run_log.write(tmp_path / EVENTS_FILE, [
        run_log.run(), run_log.dataset(val="d"), run_log.start(), run_log.epoch(0, per_class=classes, best=True),
        run_log.checkpoint(10), run_log.epoch(1, best=False), run_log.checkpoint(20), run_log.end(20, "done")])
    records = RunRecords(tmp_path, [RunPage(tmp_path)], pytest.fail)
    records.update(ended=True)
    rows = [line.split() for line in (tmp_path / "report.html").read_text().splitlines()]
    assert [row[:3] for row in rows if row[:1] in (["all"], ["circle"], ["square"]) and len(row) == 7] == [
        ["all", "80", "42"], ["circle", "8", "31"], ["square", "8", "11"]]


def test_the_page_is_written_at_the_end_and_again_for_a_later_picture(tmp_path: Path) -> None:
    run_log.write(tmp_path / EVENTS_FILE, LOG)
    events = read_events(tmp_path / EVENTS_FILE)
    record = RunPage(tmp_path)
    record.update(events, ended=False)
    assert not (tmp_path / "report.html").exists()
    record.update(events, ended=True)
    first = (tmp_path / "report.html").stat().st_mtime_ns
    record.update(events, ended=True)
    assert (tmp_path / "report.html").stat().st_mtime_ns == first
    write_image(tmp_path / "results.png", smooth_picture(20, 30))
    record.update(events, ended=True)
    assert 'alt="results.png"' in (tmp_path / "report.html").read_text()
