"""How long a sweep takes, and when its exploration ends so that it ends in time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.events import DatasetEvent, Event, SplitCounts, WorkerEvent
from ray_yolo.runs.event_log import EventLog
from ray_yolo.tune.budget import (
    Budget,
    describe,
    most_trials,
    recorded_epoch_seconds,
    trained_spans,
)
from ray_yolo.tune.claim import Claim
from ray_yolo.tune.evolution import Gene, Genes, Space
from ray_yolo.tune.ledger_events import ClaimedEvent, LedgerEvent
from ray_yolo.tune.schedule import Outcome, Schedule, Task, rungs_of
from ray_yolo.tune.tuner import trials_ahead
from tests.support import run_log
from tests.support.schedules import RESOLVED, SPACE, open_ledger, outcome_of, sweep_of


def test_the_largest_sweep_that_ends_in_time(tmp_path: Path) -> None:
    begun = open_ledger(tmp_path / "ledger.jsonl").begun
    plan = most_trials(begun, 3600.0, 2.0, 2, 100_000)
    assert 0.85 * 3600 < plan.seconds(begun, 2.0, 2) < 3600
    assert most_trials(begun, 3600.0, 2.0, 2, 7).trials <= 7


def drive(budget: Budget, schedule: Schedule, now: list[float], seconds: Callable[[Genes], float], slots: int = 1,
          fitness: Callable[[Task], Outcome] = outcome_of, start: float = 0.0) -> float:
    """Slots that need so long for an epoch, and `start` for the start of a task. Returns when the sweep ends."""
    budget.schedule = schedule
    waiting, running = list[Task](), list[tuple[float, float, int, Task]]()
    trained = dict[tuple[int, int], int]()
    while not isinstance(reply := schedule.next(budget.explores, budget.ending), ClaimedEvent):
        if isinstance(reply, Task):
            waiting.append(reply)
            continue
        while waiting and len(running) < slots:
            task = waiting.pop(0)
            epochs = task.until - trained.get((task.trial, task.seed), 0)
            trained[task.trial, task.seed] = task.until
            took = start + epochs * seconds(task.genes)
            heapq.heappush(running, (now[0] + took, took, epochs, task))
        now[0], took, epochs, task = heapq.heappop(running)
        budget.measure(task.genes, epochs, took)
        schedule.finish(task, fitness(task))
    return now[0]


COSTLY = Space((Gene("imgsz", "choice", values=(64, 96, 128)), Gene("batch_size", "choice", values=(4, 16)),
                Gene("lr0", low=0.001, high=0.1)), ({"imgsz": 64, "batch_size": 16, "lr0": 0.01},), "gp")


def costly(genes: Genes) -> float:
    """Seconds of an epoch: the pixels are known beforehand, what a smaller batch costs is not."""
    return (int(genes["imgsz"]) / 64) ** 2 * {4: 1.6, 16: 1.0}[int(genes["batch_size"])]


@pytest.mark.parametrize(("slots", "trainings"), [(1, 30), (2, 15), (8, 10)])
@pytest.mark.parametrize("seed", range(3))
def test_a_sweep_ends_in_time_where_its_best_trials_cost_more(slots: int, trainings: int, seed: int) -> None:
    """With the former code, which reserved the base recipe's time for fresh seeds, it ended up to half too late."""
    recipe = RESOLVED.model_copy(update={"seed": seed, "imgsz": 64, "microbatch": 4})
    begun = sweep_of(space=COSTLY, recipe=recipe, rungs=rungs_of(9), virtual_slots=slots + trials_ahead(slots))

    def outcome(task: Task) -> Outcome:
        noise = random.Random(f"{task.trial} {task.seed} {task.until}").gauss(0, 0.03)
        better = int(task.genes["imgsz"]) / 128 + 0.2 * (task.genes["batch_size"] == 4)
        return Outcome(fitness=better * task.until / 9 * (1 + noise))

    limit, now = 9.0 * trainings, [0.0]
    budget = Budget(begun, 1000, limit / 3600, 0.0, 1.0, lambda: slots, lambda: now[0])
    lines: list[LedgerEvent] = []
    schedule = begun.schedule(write=lines.append)
    ended = drive(budget, schedule, now, costly, slots, outcome, start=0.5)
    assert ended <= limit
    claim = schedule.next(False)
    assert isinstance(claim, ClaimedEvent)
    assert isinstance(claim.claim, Claim)
    assert claim.claim.runs > 0
    assert begun.schedule().verify(lines) == []  # the same decisions follow without a clock


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("trainings", [3.3, 3.9, 6.9])
def test_a_sweep_of_whole_trainings_ends_in_time(slots: int, trainings: float) -> None:
    """The trial that is proposed next trains to its end, and may wait for those that are ahead on virtual slots."""
    begun = sweep_of(rungs=(9,), virtual_slots=slots + trials_ahead(slots))
    limit, now = 900.0 * trainings, [0.0]
    budget = Budget(begun, 1000, limit / 3600, 0.0, 100.0, lambda: slots, lambda: now[0])
    ended = drive(budget, begun.schedule(), now, lambda genes: 100.0, slots)
    assert limit - 900.0 <= ended <= limit


@pytest.mark.parametrize(("slots", "trainings"), [(3, 22), (4, 30)])
def test_fresh_seeds_beyond_the_virtual_slots_wait_for_those_before(slots: int, trainings: int) -> None:
    begun = sweep_of(rungs=rungs_of(9), virtual_slots=slots + trials_ahead(slots))
    limit, now = 900.0 * trainings, [0.0]
    budget = Budget(begun, 1000, limit / 3600, 0.0, 100.0, lambda: slots, lambda: now[0])
    ended = drive(budget, begun.schedule(), now, lambda genes: 100.0, slots)
    assert 0.9 * limit < ended <= limit


def test_a_short_first_task_after_a_restart_does_not_end_exploration(tmp_path: Path) -> None:
    """It contains the start of its workers: two epochs in ten seconds, where an epoch takes half a second."""
    ledger = open_ledger(tmp_path / "ledger.jsonl", virtual_slots=2)
    budget = Budget(ledger.begun, 1000, 0.1, 270.0, 0.5, lambda: 1, lambda: 0.0)
    budget.schedule = ledger.begun.schedule()
    budget.schedule.next()
    genes = SPACE.starts[0]
    budget.measure(genes, 2, 10.0)
    assert budget.explores()
    for _ in range(40):
        budget.measure(genes, 2, 10.0)
    assert budget.epoch_seconds == pytest.approx(5.0, rel=0.35)  # but where all tasks are slow, it follows
    assert not budget.explores()


def test_without_hours_it_ends_after_so_many_trials(tmp_path: Path) -> None:
    now = [0.0]
    begun = sweep_of(virtual_slots=2, rungs=rungs_of(9))
    budget = Budget(begun, 12, 0.0, 0.0, 5.0, lambda: 1, lambda: now[0])
    budget.schedule = schedule = begun.schedule()
    left = budget.seconds_left()
    took = drive(budget, schedule, now, lambda genes: 5.0)
    assert left == pytest.approx(took, rel=0.25)
    assert len(schedule.genes) == 12


def training(labels: str = "0123", model: str = "yolov5s") -> list[Event]:
    """A log of two commands of two workers each: 2 epochs in 10 s, and 1 epoch in 8 s, half of it on one worker."""
    counts = SplitCounts(images=1, boxes=1, per_class=(1,), empty_file=0, no_file=0, images_left_out=0,
                         rows_left_out=0, looked_for=(), digest=labels)
    data, worker = DatasetEvent(names=("a",), splits={"train": counts, "val": counts}), WorkerEvent(
        worker=0, node="a", pid=1)
    recipe = RESOLVED.model_copy(update={"model": model}).model_dump(mode="json")
    events = [run_log.run().model_copy(update={"recipe": recipe}), data, worker, run_log.start(num_workers=2),
              run_log.end(4, "stopped", epoch=1), data, worker, run_log.start(4, epoch=2, num_workers=2),
              run_log.start(5, epoch=2, num_workers=1), run_log.end(6, "done", epoch=2)]
    times = [0, 0, 1, 2, 11, 100, 100, 101, 104, 108]
    return [event.model_copy(update={"time": float(time)}) for event, time in zip(events, times, strict=True)]


def test_the_time_of_a_slot_is_that_of_its_workers() -> None:
    assert trained_spans(training(), workers=2) == [(2, 10.0), (1, 6.0)]
    assert trained_spans(training(), workers=1) == [(2, 19.0), (1, 11.0)]


@pytest.mark.parametrize(("labels", "model", "found"), [
    ("0123", "yolov5s", 16.0 / 3), ("4567", "yolov5s", None), ("0123", "yolov5n", None)])
def test_the_time_of_an_epoch_is_known_from_trainings_of_the_same_model_and_data(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: str, model: str, found: float | None) -> None:
    log = EventLog(tmp_path / "sweep" / "trials" / "trial0" / "events.jsonl")
    log.close()
    monkeypatch.setattr("ray_yolo.tune.budget.read_events", lambda path: training(labels, model))
    recipe: Recipe = RESOLVED.model_copy(update={"model": "/somewhere/yolov5s"})
    assert recorded_epoch_seconds(tmp_path, recipe, "0123", 2) == found
    assert recorded_epoch_seconds(tmp_path / "other", recipe, "0123", 2) is None


def test_a_start_says_what_it_will_do(tmp_path: Path) -> None:
    begun = open_ledger(tmp_path / "ledger.jsonl").begun
    text = "\n".join(describe(begun, 12, 0.0, 2, 2.0))
    assert "genes: lr0, augment.close_mosaic, optimizer.name" in text
    assert "ladder: 3 -> 9 epochs" in text
    assert "slots: 2 trials at a time (3 virtual)" in text
    assert "for 12 trials" in text
    assert "not known before the first trial" in describe(begun, 12, 0.0, 2, None)[-1]
    assert describe(begun, 100_000, 8.0, 2, 2.0)[-1] == "time: about 8:00:00 on this cluster"


@pytest.mark.parametrize(("algorithm", "rungs", "leaves_out"), [
    ("gp", (2, 6, 12), True), ("gp", (3, 9), False), ("evolve", (2, 6, 12), False)])
def test_a_plan_says_that_it_does_not_count_trials_that_leave_out_a_rung(algorithm, rungs, leaves_out) -> None:
    begun = sweep_of(space=replace(SPACE, algorithm=algorithm), rungs=rungs)
    assert describe(begun, 12, 0.0, 2, 2.0)[-1].startswith("not counted") == leaves_out


def test_a_plan_of_trials_and_hours_says_which_end_first(tmp_path: Path) -> None:
    begun = open_ledger(tmp_path / "ledger.jsonl").begun
    by_trials, by_hours = (describe(begun, 12, hours, 2, 2.0)[-3:] for hours in (8.0, 0.02))
    assert by_trials == ["budget: 12 trials, which end before 8 hours", *describe(begun, 12, 0.0, 2, 2.0)[-2:]]
    assert by_hours == ["budget: 0.02 hours, which end before 12 trials",
                        *describe(begun, 100_000, 0.02, 2, 2.0)[-2:]]


@pytest.mark.parametrize("seed", range(8))
def test_the_end_of_a_sweep_without_hours_follows_from_its_ledger(seed: int) -> None:
    """Also where trials that have no result yet cost more: they may become finalists."""
    recipe = RESOLVED.model_copy(update={"seed": seed, "imgsz": 64, "microbatch": 4})
    begun, now, lines = sweep_of(space=COSTLY, recipe=recipe, rungs=rungs_of(9), virtual_slots=4), [0.0], []
    budget = Budget(begun, 2 + seed, 0.0, 0.0, 1.0, lambda: 2, lambda: now[0])

    def outcome(task: Task) -> Outcome:
        return Outcome(fitness=int(task.genes["imgsz"]) / 128 * task.until / 9)

    drive(budget, begun.schedule(write=lines.append), now, costly, 2, outcome)
    assert begun.schedule().verify(lines) == []
