"""The state of a run: one value, from which all that is shown of it follows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ray_yolo.core.events import Event, StartEvent, StepEvent
from ray_yolo.runs.event_log import EVENTS_FILE, best_row, epoch_rows, last_of, measure_goodput, surviving
from ray_yolo.runs.run_state import read_state, state_of
from ray_yolo.runs.status import describe_run
from ray_yolo.runs.usage import measure_usage
from ray_yolo.sinks.base import without_classes
from ray_yolo.sinks.report import closing_message
from ray_yolo.sinks.run_page import run_page
from ray_yolo.tune.listing import summarise
from tests.support import run_log

EVENTS = st.one_of(
    st.builds(run_log.start, st.integers(0, 40), regrouped=st.booleans()),
    st.builds(run_log.step, st.integers(1, 40)),
    st.builds(run_log.epoch, st.integers(0, 3), best=st.booleans()),
    st.builds(run_log.checkpoint, st.integers(0, 40)),
    st.builds(run_log.end, st.integers(0, 40), st.sampled_from(["done", "stopped"])),
    st.just(run_log.dataset(val="d")))


@given(st.lists(EVENTS, max_size=30))
def test_the_state_of_a_log_in_one_pass_is_what_its_readers_find(story: Sequence[Event]) -> None:
    """`surviving` looks at a whole log from its end."""
    events = run_log.numbered(story)
    state, rows = state_of(iter(events)), epoch_rows(surviving(events))
    assert list(map(without_classes, state.rows)) == list(map(without_classes, rows))
    assert state.best == best_row(rows)
    assert (state.start, state.step) == (last_of(events, StartEvent), last_of(events, StepEvent))
    assert (state.goodput, state.usage) == (measure_goodput(events), measure_usage(events))


AGAIN = [
    run_log.run(), run_log.dataset(val="d"), run_log.start(), *run_log.trained_epoch(0), run_log.epoch(1),
    run_log.end(15, "stopped", reason="no memory"), run_log.dataset(val="d"), run_log.start(10)]
"""A training whose second epoch was not saved, and whose second command was killed before it ended again."""


def test_all_views_of_a_run_count_the_epochs_that_no_restart_has_voided(tmp_path: Path) -> None:
    run_log.write(tmp_path / EVENTS_FILE, AGAIN)
    (tmp_path / "finished").touch()
    row = summarise(tmp_path, "exp")
    assert (row.done, row.epochs, row.best) == (1, 3, 0.0625)
    assert "best epoch 1: mAP50 0.125, mAP50-95 0.0625" in describe_run(tmp_path)
    assert "best epoch   1  P 0.5" in closing_message(tmp_path, AGAIN)
    assert "<b>1 of 1</b><span>best epoch</span>" in run_page(tmp_path, read_state(tmp_path))


def test_the_end_of_an_earlier_command_is_not_that_of_the_last_one(tmp_path: Path) -> None:
    run_log.write(tmp_path / EVENTS_FILE, AGAIN)
    assert summarise(tmp_path, "exp").state == "interrupted"
    assert "interrupted after 1 epoch in 0:01:00; the same command continues" in closing_message(tmp_path, AGAIN)
    assert "16 for validation): interrupted</p>" in run_page(tmp_path, read_state(tmp_path))


def test_a_run_without_a_log_was_created(tmp_path: Path) -> None:
    assert (read_state(tmp_path), summarise(tmp_path, "exp").state) == (state_of([]), "created")
