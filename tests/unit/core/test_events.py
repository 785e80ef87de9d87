"""Events outlive the program that wrote them, and are immutable."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from ray_yolo.core.events import (
    AnyEvent,
    BalanceEvent,
    ClassResult,
    DatasetEvent,
    EpochEvent,
    Event,
    FailureEvent,
    Frozen,
    PlacementEvent,
    ResourcesEvent,
    ShardEvent,
    SplitCounts,
    StacksEvent,
    StepEvent,
    Summary,
    WarningEvent,
    WorkerEvent,
    parse_event,
)
from ray_yolo.runs.event_log import EventLog, read_events, read_lines
from tests.support import run_log

TYPES = get_args(get_args(AnyEvent)[0])
COUNTS = SplitCounts(images=3, boxes=2, per_class=(2, 0), empty_file=1, no_file=0, images_left_out=0, rows_left_out=1,
                     looked_for=("/d/labels/*.txt",))
EXAMPLES: list[Event] = [
    run_log.run(), DatasetEvent(names=run_log.NAMES, splits={"train": COUNTS, "val": COUNTS}),
    ResourcesEvent(cpus=4, threads=3, loader_processes=1, cache="ram", reasons=("4 CPUs free for 1 worker",)),
    PlacementEvent(group="ab12"), WorkerEvent(worker=1, node="left", pid=7), run_log.start(5, terms=("box", "dfl")),
    BalanceEvent(step=20, from_step=23, microbatches=(3, 1), seconds=(0.04, 0.125)),
    run_log.step(1), ShardEvent(worker=1, epoch=0, step=10, images=40, wait_seconds=0.5, seconds=9.0, node="a", pid=7),
    run_log.epoch(0), run_log.epoch(1, val=None, metrics=None, per_class=[], fitness=None, best=False),
    run_log.checkpoint(10), WarningEvent(message="slow"), WarningEvent(message="slow", worker=3),
    FailureEvent(worker=0, traceback="one\ntwo"), StacksEvent(worker=0, stacks="MainThread:\n"),
    run_log.end(30, best_epoch=2, best_fitness=0.5, stopped_early=True)]
SUMMARY = Summary(step=3, epoch=0, best_epoch=0, best_fitness=0.1, stopped_early=False, stopped=False, last_epoch=None)


def parsed(line: dict[str, object]) -> Event | None:
    return parse_event(json.dumps({"seq": 0, "time": 1.0, **line}).encode())


def test_every_type_has_an_example_here() -> None:
    assert {type(event) for event in EXAMPLES} == set(TYPES)
    assert len({event.type for event in EXAMPLES}) == len(TYPES)


def test_an_event_comes_back_from_a_log_as_it_was(tmp_path: Path) -> None:
    for number, event in enumerate(EXAMPLES):
        log = EventLog(tmp_path / f"{number}.jsonl")
        log.append(run_log.start())
        log.append(event)
        _, back = read_events(log.path)
        assert type(back) is type(event), event.type
        assert back.seq == 1, event.type
        assert back.time > 1e9, event.type
        assert back.fields == event.fields, event.type


def test_a_number_that_is_not_finite_is_null_in_the_log_and_comes_back_as_none(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.append(run_log.step(1, loss=[math.nan, math.inf, 1.5], gradient_norm=-math.inf))
    log.append(run_log.epoch(0, train={"box": math.nan, "obj": 0.5, "cls": 0.5}, fitness=math.nan))
    assert [line["loss"] for line in read_lines(log.path)[:1]] == [[None, None, 1.5]]
    assert "NaN" not in log.path.read_text()
    step, epoch = read_events(log.path)
    assert isinstance(step, StepEvent)
    assert (step.loss, step.gradient_norm) == ((None, None, 1.5), None)
    assert isinstance(epoch, EpochEvent)
    assert (epoch.train, epoch.fitness) == ({"box": None, "obj": 0.5, "cls": 0.5}, None)


def change(value: Frozen, name: str) -> str:
    """What is said against setting a field; empty if it can be set."""
    try:
        setattr(value, name, getattr(value, name))
    except ValidationError as error:
        return str(error)
    return ""


def test_a_value_cannot_be_changed() -> None:
    for value in (*EXAMPLES, COUNTS, SUMMARY, run_log.epoch(0).per_class[0]):
        for name in type(value).model_fields:
            assert "frozen" in change(value, name), (type(value).__name__, name)


def test_a_type_that_is_not_known_is_passed_over(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.append(run_log.start())
    log.append_line("weather", mood="fair", step=3)
    log.append(run_log.step(1))
    assert [(event.seq, event.type) for event in read_events(log.path)] == [(0, "start"), (2, "step")]


def test_a_field_that_is_not_known_is_passed_over() -> None:
    assert parsed({"type": "warning", "message": "slow", "mood": "fair"}) == WarningEvent(
        seq=0, time=1.0, message="slow")
    results = [{**row.model_dump(), "mood": "fair"} for row in run_log.epoch(0).per_class]
    event = parsed({"type": "epoch", **run_log.epoch(0).fields, "per_class": results})
    assert isinstance(event, EpochEvent)
    assert event.per_class == run_log.epoch(0).per_class


def test_what_is_no_event_is_none() -> None:
    for line in (b"", b"[1]", b"no json", b'{"seq": 0}', b'{"seq": 0, "type": "step"}', b"\xff\xfe",
                 b'{"seq": 0, "time": 1.0, "type": "warning", "mess'):
        assert parse_event(line) is None, line


def test_metrics_of_a_class_have_the_names_that_logs_have(tmp_path: Path) -> None:
    run_log.write(tmp_path / "events.jsonl", [run_log.epoch(0)])
    [line] = read_lines(tmp_path / "events.jsonl")
    for row in line["per_class"]:
        result = ClassResult.model_validate(row)
        assert (result.map50, result.map50_95) == (row["mAP50"], row["mAP50-95"]) == (0.125, 0.0625)
