"""Every sink of a driver has a thread with a guard of its own: what one raises is a warning, and no more."""

from __future__ import annotations

import gc
import io
from pathlib import Path

import pytest

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.events import ClassResult, Event, WarningEvent
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runtime.prometheus import RayMetrics
from ray_yolo.sinks.callbacks import Callbacks
from ray_yolo.sinks.console import Console
from ray_yolo.sinks.records import RunRecords
from tests.support import run_log


def class_results() -> int:
    """How many there are in memory."""
    gc.collect()
    return sum(isinstance(each, ClassResult) for each in gc.get_objects())


class TestHistory:
    def test_nothing_keeps_the_numbers_of_each_class_or_what_it_does_not_need(self, tmp_path: Path) -> None:
        """1,203 classes over 300 epochs would be 425 MB for each."""
        sinks = [Console(tmp_path, io.StringIO()), RayMetrics(tmp_path), Callbacks({}, tmp_path, Recipe(), pytest.fail)]
        before = class_results()
        events: list[Event] = [run_log.start(), run_log.end(60)]
        for number in range(20):
            events[-1:-1] = [run_log.step(3 * number + step) for step in (1, 2, 3)]
            events[-1:-1] = [*run_log.trained_epoch(number), WarningEvent(message="odd")]
        run_log.write(tmp_path / EVENTS_FILE, events)
        records = RunRecords(tmp_path, [], pytest.fail)
        records.read()
        for sink in sinks:
            for event in events:
                sink.event(event.model_copy(deep=True))
            if isinstance(sink, (Console, Callbacks)):
                sink.update()
        assert len(records.events) == 82
        assert len(sinks[1].history.events) == 61
        del event, events
        assert class_results() == before
