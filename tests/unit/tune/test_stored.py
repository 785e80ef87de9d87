"""Sweeps whose runs lie in a store: what is there before anything follows from it, and who goes on with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_yolo import cli
from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.core.events import CheckpointEvent, EndEvent, Event, parse_event
from ray_yolo.runs.event_log import EVENTS_FILE, EventLog
from ray_yolo.runs.remote_run import RemoteRun, read_log
from ray_yolo.runs.run_dir import Run, begin_run, find_run
from ray_yolo.runs.run_record import LEDGER_FILE, RunRecord, SweepRecord
from ray_yolo.sinks.run_logger import finalize_abandoned_run
from ray_yolo.storage import lease
from ray_yolo.storage.store import FolderStore, Store
from ray_yolo.tune.evolution import Gene, Space
from ray_yolo.tune.files import keep_best
from ray_yolo.tune.ledger import Ledger
from ray_yolo.tune.ledger_events import ScheduledEvent
from ray_yolo.tune.search import Search
from ray_yolo.tune.study import SweepEvent
from tests.support import checkpoints, run_log
from tests.support.schedules import propose

RECIPE = Recipe(epochs=2)
SWEEP = SweepEvent(identity={"data set": "0", "base recipe": "0"}, search=Search(), recipe=RECIPE, rungs=(2,),
              space=Space((Gene("lr0", low=0.001, high=0.1),), ({"lr0": 0.01},)), virtual_slots=1)
Start = Callable[..., tuple[Run, Ledger]]


@pytest.fixture
def bucket(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "bucket" / "runs/evolve/exp")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """The sweep of a command on a machine."""
    monkeypatch.setattr(lease, "EXPIRES", 0.5)
    monkeypatch.setattr(lease, "RENEWS", 0.1)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.1)
    opened: list[Run] = []

    def start(machine: str = "one") -> tuple[Run, Ledger]:
        monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / machine))
        where = Placement(storage_path=f"file://{tmp_path}/bucket", project="runs/evolve")
        run = find_run(RECIPE, where, lambda folder: False) or begin_run(
            where, SweepRecord(digest=recipe_digest(RECIPE), space="quick", trials=3))
        opened.append(run)
        return run, Ledger(run.folder / LEDGER_FILE, SWEEP, run.remote)

    yield start
    for run in opened:
        die(run)


def stored(run: Run) -> RemoteRun:
    assert run.remote
    return run.remote


def die(run: Run) -> None:
    """As kill -9 does it."""
    run.lock.close()
    stored(run)._lease._stop.set()
    stored(run)._lease._thread.join()


def train(sweep: Run, name: str, value: float, *, ends: bool = True) -> Path:
    """A trial's run, in the store. Returns its folder."""
    placement = Placement(storage_path=stored(sweep).address.removesuffix("/runs/evolve/exp"),
                          project="runs/evolve/exp/trials", name=name)
    run = begin_run(placement, RunRecord(
        digest="0", asked=RECIPE, recipe=RECIPE, architecture=None, anchors=None, num_parameters=1, names=("a",),
        labels="", command="", provenance={}))
    log = EventLog(run.folder / EVENTS_FILE)
    saved = run_log.checkpoint(10).model_copy(update={"digest": "ab"})
    for event in (run_log.run(), run_log.start(), run_log.epoch(0), saved):
        log.append(event)
    log.close()
    stored(run).checkpoints.put(checkpoints.save(run.folder, 10, "last", "best", value=value), 1)
    if ends:
        run.finish()
    run.release()
    return run.folder


def scheduled(trial: int) -> ScheduledEvent:
    return ScheduledEvent(trial=trial, seed=0, until=2, start=0.0, end=2.0, why="new")


def test_storage_that_is_away_costs_a_warning_and_no_line(start: Start, bucket: FolderStore,
                                                          monkeypatch: pytest.MonkeyPatch,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise OSError("SlowDown")

    _, ledger = start()
    with monkeypatch.context() as away:
        away.setattr(FolderStore, "put_if", refuse)
        propose(ledger)
    assert "SlowDown" in caplog.text
    ledger.append(scheduled(0))
    assert read_log(bucket) == ledger.path.read_bytes()


def test_a_trial_that_was_killed_for_good_has_its_end_in_the_store(start: Start, bucket: FolderStore) -> None:
    run, _ = start()
    folder = train(run, "trial0", 1, ends=False)
    finalize_abandoned_run(folder)
    events = logged(bucket, "trial0")
    assert isinstance(events[-1], EndEvent)


def test_commands_that_look_at_a_sweep_take_its_address(start: Start, bucket: FolderStore, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    run, ledger = start()
    ledger.begun.schedule(write=ledger.append).next()
    train(run, "trial0", 1, ends=False)
    address = f"file://{tmp_path}/bucket/runs/evolve/exp"
    assert cli.status([address]) == 0
    first, trial, *_ = capsys.readouterr().out.splitlines()
    assert first == f"{address}: searching; 1 trial, 0 trained to the end"
    assert trial.startswith(f"  {address}/trials/trial0: interrupted")
    keep_best(run.folder, [run.folder / "trials" / "trial0"])
    run.finish()
    run.release()
    assert cli.verify([address]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{name:<30} ok" for name in ("ledger.jsonl", "run.json", "weights/best.pt", "weights/last.pt")]
    assert cli.status([address]) == 0
    assert capsys.readouterr().out.startswith(f"{address}: finished; ")
    (run.folder / "mlflow.json").write_text('{"run_id": "0", "uri": "http://127.0.0.1:9"}')
    bucket.put("mlflow.json", run.folder / "mlflow.json")
    assert cli.sync([address]) == 3  # that server is away
    assert "MLflow at http://127.0.0.1:9: " in capsys.readouterr().err


def logged(sweep: Store, name: str) -> list[Event]:
    """The events of a trial."""
    lines = b"".join(sweep.get(f"trials/{name}/log/{entry.name}").data for entry in sweep.list(f"trials/{name}/log/"))
    return [event for line in lines.splitlines() if (event := parse_event(line))]


def saved(events: list[Event]) -> dict[int, str]:
    """The digest of the weights by step."""
    return {event.step: event.digest for event in run_log.only(CheckpointEvent, events)}
