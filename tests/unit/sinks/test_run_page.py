"""The page of a run: what its log and its folder hold, written when the log has ended."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ray_yolo.config.recipe import Recipe
from ray_yolo.config.sections import OptimizerConfig
from ray_yolo.core.events import ClassResult, ShardEvent, WorkerEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.run_record import RunRecord, write_record
from ray_yolo.runs.run_state import read_state
from ray_yolo.sinks.records import RunRecords
from ray_yolo.sinks.run_page import RunPage, run_page
from tests.support import run_log
from tests.support.pictures import smooth_picture, write_image


def cells(row: str) -> list[str]:
    """The texts of a row of a table."""
    return re.findall(r"<td[^>]*>([^<]*)</td>", row)


LOG = [run_log.run(), run_log.start(), run_log.step(1), *run_log.trained_epoch(0), run_log.end(2, "done")]


def test_a_page_has_the_result_and_each_picture_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "exp"
    run_log.write(folder / EVENTS_FILE, LOG)
    names = ["results.png", "PR_curve.png", "confusion_matrix.png", "labels.jpg", "val_batch0_pred.jpg",
             "train_batch0.jpg"]
    for name in names:
        write_image(folder / name, smooth_picture(20, 30))
    page = run_page(folder, read_state(folder))
    assert "<h1>exp</h1>" in page
    assert [name for name in names if f'alt="{name}"' not in page] == []
    assert "<b>1 of 1</b><span>best epoch</span>" in page
    assert "<b>0.1250</b><span>mAP50</span>" in page


def test_a_page_has_the_hours_of_workers_by_market_type(tmp_path: Path) -> None:
    worker = WorkerEvent(worker=0, node="n", pid=1, market_type="spot", time=0.0)
    start = run_log.start(members=(0,), num_workers=1, gpus=1, time=0.0)
    lines = [event.model_dump_json() for event in (worker, start, run_log.end(2).model_copy(update={"time": 9000.0}))]
    (tmp_path / EVENTS_FILE).write_text("\n".join(lines) + "\n")
    page = run_page(tmp_path, read_state(tmp_path))
    assert "<td>2.50 GPU hours: 2.50 spot</td>" in page


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
    page = (tmp_path / "report.html").read_text()
    assert [cells(line) for line in page.splitlines() if line.startswith("<tr>") and line.count("<td") == 7] == [
        ["all", "80", "42", "0.5000", "0.2500", "0.1250", "0.0625"],
        ["circle", "8", "31", "0.5000", "0.5000", "0.5000", "0.2500"],
        ["square", "8", "11", "0.5000", "0.5000", "0.5000", "0.2500"]]


def test_settings_that_are_no_default_have_their_origin(tmp_path: Path) -> None:
    run_log.write(tmp_path / EVENTS_FILE, LOG)
    asked = Recipe(epochs=3, batch_size=8, optimizer=OptimizerConfig(lr0=0.1))
    write_record(tmp_path, RunRecord(
        digest="d", asked=asked, recipe=asked.model_copy(update={"microbatch": 4, "precision": "fp32"}),
        architecture=None, anchors=None, num_parameters=7, names=("circle",), labels="l", command="c", provenance={},
        origins={"epochs": "--epochs", "optimizer.lr0": "hyp.yaml:3"}))
    page = run_page(tmp_path, read_state(tmp_path))
    assert [cells(line) for line in page.splitlines() if line.startswith("<tr>") and line.count("<td") == 4] == [
        ["epochs", "3", "100", "--epochs"], ["batch_size", "8", "open", "given"],
        ["microbatch", "4", "open", "decided at the start"], ["precision", "fp32", "auto", "decided at the start"],
        ["optimizer.lr0", "0.1", "0.01", "hyp.yaml:3"]]


def test_the_parts_of_the_time_are_its_sum(tmp_path: Path) -> None:
    """One command of 100 s: an epoch of 60 s, 40 s of which are steps, in which the workers wait 4 and 8 s."""
    shards = [ShardEvent(epoch=0, step=10, worker=worker, images=40, wait_seconds=wait, seconds=seconds, node="n",
                         pid=1) for worker, wait, seconds in ((0, 4.0, 40.0), (1, 8.0, 38.0))]
    events = [run_log.run(), run_log.dataset(train="t"), run_log.start(), *shards, run_log.epoch(0, seconds=60.0),
              run_log.checkpoint(10), run_log.end(10)]
    times = [0.0, 0.0, 20.0, 80.0, 80.0, 80.0, 90.0, 100.0]
    lines = [event.model_copy(update={"seq": number, "time": time}).model_dump_json()
             for number, (event, time) in enumerate(zip(events, times, strict=True))]
    (tmp_path / EVENTS_FILE).write_text("\n".join(lines) + "\n")
    page = run_page(tmp_path, read_state(tmp_path))
    for name, text in (("steps", "0:00:34 (34 %)"), ("waiting for images", "0:00:06 (6 %)"),
                       ("validation and saves", "0:00:20 (20 %)"), ("start, end and interruptions", "0:00:40 (40 %)")):
        assert f"<tr><th>{name}</th><td>{text}</td></tr>" in page
    assert "<b>0:01:40</b><span>time</span>" in page
    assert "<tr><th>labels of train</th><td>digest t</td></tr>" in page
    assert "<tr><th>commit</th><td>abc123</td></tr>" in page


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
