"""What `status` says of a training, from its folder alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_yolo.core.errors import InputError
from ray_yolo.core.events import BalanceEvent, ShardEvent, WarningEvent, WorkerEvent
from ray_yolo.core.structures import WorkerStatus
from ray_yolo.runs import status
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.folders import lock_file
from ray_yolo.runs.status import describe_run, write_members, write_startup
from tests.support import run_log

WORKERS = [WorkerEvent(worker=number, node=f"n{number}", pid=40 + number) for number in range(2)]
TRAINING = [run_log.run(), *WORKERS, run_log.start(), *(run_log.step(number) for number in range(1, 8))]


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A run folder that a driver holds."""
    with (tmp_path / ".lock").open("a") as lock:
        assert lock_file(lock)
        yield tmp_path


def test_a_training_is_shown_with_its_newest_step_and_its_workers(held: Path) -> None:
    run_log.write(held / EVENTS_FILE, [*TRAINING, WarningEvent(message="slow storage", worker=1)])
    first, progress, *workers, warning = describe_run(held)
    assert first == f"{held}: training"
    assert progress.startswith("epoch 1 of 3, step 7, 100 images/s, ")
    assert workers == ["worker 0 on n0, process 40", "worker 1 on n1, process 41"]
    assert warning.endswith("worker 1: slow storage")


def test_the_shards_of_this_group_of_workers_are_shown_if_they_are_balanced(held: Path) -> None:
    balance = BalanceEvent(step=5, from_step=8, microbatches=(3, 1), seconds=(0.04, 0.1251))
    run_log.write(held / EVENTS_FILE, [*TRAINING, balance])
    line = "from step 8 on, workers compute 3, 1 microbatches per step (seconds each: 0.04, 0.125)"
    assert describe_run(held)[2] == line
    run_log.write(held / EVENTS_FILE, [*TRAINING, balance, run_log.start(7, regrouped=True)])
    assert line not in describe_run(held)


def test_shares_of_work_are_those_of_the_last_epoch(held: Path) -> None:
    """An idle worker of a warm-up is visible: it computed none of the images."""
    def shard(worker: int, epoch: int, images: int) -> ShardEvent:
        return ShardEvent(worker=worker, epoch=epoch, step=7, images=images, wait_seconds=0.0, seconds=1.0, node="n0",
                          pid=40 + worker)

    run_log.write(held / EVENTS_FILE, [*TRAINING, shard(0, 0, 100), shard(1, 0, 105), shard(1, 1, 0), shard(0, 1, 205)])
    assert describe_run(held)[2] == "images of epoch 2 by worker: 100, 0 %"


def test_workers_are_shown_in_their_last_reported_state(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_log.write(held / EVENTS_FILE, TRAINING)
    write_members(held, [
        WorkerStatus(worker=0, node="n0", pid=40, phase="exchanging", step=7, seconds=11.8, waits=True),
        WorkerStatus(worker=1, node="node1", pid=41, phase="loading", step=7, seconds=12.3, waits=False)])
    assert describe_run(held)[2:] == [
        "worker  node   process  phase       step  for",
        "     0  n0          40  exchanging     7  12 s",
        "     1  node1       41  loading        7  12 s  (1 wait for it)"]
    write_members(held, [])
    assert describe_run(held)[2:] == ["no worker trains now"]  # those whose begin is in the log have ended
    later = time.time() + 11
    monkeypatch.setattr(status.time, "time", lambda: later)
    assert describe_run(held)[2:] == ["worker 0 on n0, process 40", "worker 1 on n1, process 41"]


@pytest.mark.parametrize(("events", "state"), [
    (TRAINING, "interrupted (no process trains it); the same command continues it"),
    ([*TRAINING, run_log.end(7, "stopped", reason="interrupted")],
     "stopped (interrupted); the same command continues it"),
    ([*TRAINING, run_log.end(7, "failed", reason="no memory")], "failed (no memory); the same command continues it"),
])
def test_a_training_without_a_process_has_a_final_state(tmp_path: Path, events: list[object], state: str) -> None:
    run_log.write(tmp_path / EVENTS_FILE, events)
    assert describe_run(tmp_path)[0] == f"{tmp_path}: {state}"
    (tmp_path / "finished").touch()
    assert describe_run(tmp_path)[0] == f"{tmp_path}: finished"


def test_a_finished_run_has_its_best_epoch_and_files(tmp_path: Path) -> None:
    run_log.write(tmp_path / EVENTS_FILE, [*TRAINING, *run_log.trained_epoch(0), run_log.epoch(1, best=False)])
    for name in ("weights/best.pt", "report.html", "finished"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert describe_run(tmp_path)[2:5] == [
        "best epoch 1: mAP50 0.125, mAP50-95 0.0625", f"{tmp_path}/weights/best.pt", f"{tmp_path}/report.html"]


def test_the_cost_of_interruptions_is_shown(tmp_path: Path) -> None:
    run_log.write(tmp_path / EVENTS_FILE, [*TRAINING, run_log.start(5, regrouped=True), run_log.step(6)])
    assert any(line.startswith("0 restarts, 1 regrouping: 2 steps done twice") for line in describe_run(tmp_path))


def test_the_hours_of_workers_are_shown_by_market_type(tmp_path: Path) -> None:
    events = [WorkerEvent(worker=0, node="n0", pid=1, market_type="spot"), WorkerEvent(worker=1, node="n1", pid=1),
              run_log.start(members=(0, 1), gpus=1), run_log.end(5).model_copy(update={"time": 7200.0})]
    (tmp_path / EVENTS_FILE).write_text("".join(event.model_dump_json() + "\n" for event in events))
    assert "4.00 GPU hours: 2.00 spot, 2.00 unknown" in describe_run(tmp_path)


def test_a_folder_without_a_run_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        describe_run(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("again", [False, True])
def test_a_start_is_shown_with_its_phase_and_what_it_waits_for(
        held: Path, monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    run_log.write(held / EVENTS_FILE, TRAINING if again else TRAINING[:1])
    wait = "waiting for 2 workers of 1 CPU (0 are free), until they are free; other jobs on this cluster: a.py: 2 CPU"
    write_startup(held, "starting workers: 0 of 2 up", 41.8, wait)
    lines = describe_run(held)
    assert lines[:2] == [f"{held}: starting: starting workers: 0 of 2 up, 42 s", wait]
    assert not any("process" in line for line in lines)  # those of an earlier start
    later = time.time() + 11  # the start was killed
    monkeypatch.setattr(status.time, "time", lambda: later)
    assert describe_run(held)[0] == f"{held}: {'training' if again else 'starting'}"


@pytest.mark.parametrize(("seconds", "words"), [
    (0.4, "0 s ago"), (-4.0, "0 s ago"), (7200.0, "2 hours ago"),
    (-170211.0, "170211 s ahead of this machine's clock")])
def test_a_time_of_another_machines_clock_is_never_negative(seconds: float, words: str) -> None:
    assert status._ago(seconds) == words
