"""A training and a sweep that were interrupted, for the tests of what is shown of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.config.recipe import Recipe
from ray_yolo.runs.run_record import RunRecord, SweepRecord, write_record
from ray_yolo.tune.evolution import Gene, Space
from ray_yolo.tune.ledger import Ledger
from ray_yolo.tune.ledger_events import CountedEvent, ScheduledEvent
from ray_yolo.tune.search import Search
from ray_yolo.tune.study import SweepEvent
from tests.support import run_log
from tests.support.schedules import propose

RECIPE = Recipe(epochs=3, batch_size=8, microbatch=4, precision="fp32")


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """A training that was interrupted in its second epoch."""
    folder = tmp_path / "exp"
    folder.mkdir()
    write_record(folder, RunRecord(digest="ab", asked=Recipe(), recipe=RECIPE, architecture=None, anchors=None,
                                   num_parameters=7, names=run_log.NAMES, labels="cd", command="x", provenance={}))
    run_log.write(folder / "events.jsonl", [
        run_log.run(), run_log.start(), run_log.step(10), *run_log.trained_epoch(0), run_log.step(15),
        run_log.end(15, "stopped", reason="interrupted")])
    return folder


@pytest.fixture
def sweep(tmp_path: Path, training: Path) -> Path:
    """A sweep that was killed in the second of its two trials."""
    folder = tmp_path / "sweep"
    folder.mkdir()
    write_record(folder, SweepRecord(digest="ab", space="space.yaml", trials=2))
    space = Space((Gene("lr0", low=0.01, high=0.1),), ({"lr0": 0.02},))
    ledger = Ledger(folder / "ledger.jsonl", SweepEvent(identity={"data set": "data"}, space=space, search=Search(),
                                                   recipe=RECIPE, rungs=(3,), virtual_slots=1))
    for number in range(2):
        propose(ledger)
        ledger.append(ScheduledEvent(trial=number, seed=0, until=3, start=0.0, end=3.0, why="new"))
    ledger.append(CountedEvent(trial=0, seed=0, epochs=3, fitness=0.25))
    ledger.close()
    (folder / "trials").mkdir()
    training.rename(folder / "trials" / "trial1")
    return folder
