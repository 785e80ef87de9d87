"""The order of a comparison's trainings, and the claim that follows from their results."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import numpy as np
import pytest

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import NOT_FINITE
from ray_yolo.tune.claim import PairsClaim
from ray_yolo.tune.compare_ledger import Side, TrainedEvent
from ray_yolo.tune.pairs import (
    SIDES,
    PairDispatcher,
    PairSchedule,
    claim_from,
    compared_classes,
    compared_metrics,
    pair_of,
    pair_seed,
    training_folder,
)
from ray_yolo.tune.schedule import Outcome, Task
from ray_yolo.tune.sides import Recipes
from ray_yolo.tune.trials import overlay

A = Recipe(epochs=3, batch_size=8, seed=7)
B = overlay(A, {"lr0": 0.1, "epochs": 4, "model": "yolov8n"})


def fitness_of(task: Task) -> float:
    """The fitness of a simulated training, a function of its side and seed alone; B is better."""
    _, side = pair_of(task.trial)
    noise = np.random.default_rng([task.seed, SIDES.index(side)]).standard_normal()
    return 0.4 + 0.01 * noise + (0.08 if side == "B" else 0.0)


def make_schedule(results: Iterable[TrainedEvent] = (), pairs: int = 6, slots: int = 4
                  ) -> tuple[PairSchedule, list[TrainedEvent]]:
    written = list(results)
    known = {(result.pair, result.side): result for result in written}
    return PairSchedule(Recipes(A, B), pairs, written.append, known, limit=lambda: slots), written


def run(schedule: PairSchedule, slots: int, order: np.random.Generator, kill_after: int = 10**6) -> PairsClaim | None:
    """Train on slots whose trainings end in any order; None if killed after a number of results."""
    running: list[Task] = []
    for _ in range(1000):
        while (reply := schedule.next(lambda: True)) is not None:
            if isinstance(reply, PairsClaim):
                return reply
            running.append(reply)
        assert 1 <= len(running) <= slots
        task = running.pop(int(order.integers(len(running))))
        schedule.finish(task, Outcome(fitness=fitness_of(task)))
        kill_after -= 1
        if kill_after == 0:
            return None
    raise AssertionError("it does not end")


def test_a_pair_trains_both_sides_on_its_fresh_seed_and_each_with_its_own_settings() -> None:
    schedule, _ = make_schedule()
    tasks = list(itertools.islice(iter(lambda: schedule.next(lambda: True), None), 4))
    assert [pair_of(task.trial) for task in tasks] == [(1, "A"), (1, "B"), (2, "A"), (2, "B")]
    seeds = [task.seed for task in tasks]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert seeds[0] == pair_seed(7, 1) != pair_seed(8, 1)
    assert [task.until for task in tasks] == [3, 4, 3, 4]
    assert overlay(A, tasks[0].genes) == A
    assert overlay(A, tasks[1].genes).model_copy(update={"seed": 7}) == B
    assert [PairDispatcher.name(None, task) for task in tasks[:2]] == ["pair1-a", "pair1-b"]


def test_the_claim_depends_neither_on_slots_nor_on_the_order_of_ends_nor_on_kills() -> None:
    schedule, _ = make_schedule(slots=1)
    expected = run(schedule, 1, np.random.default_rng(0))
    assert expected is not None
    assert (expected.better, 3 <= expected.pairs < 6) == ("B", True)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        written: list[TrainedEvent] = []
        claim = None
        while claim is None:
            slots = int(rng.integers(1, 6))
            schedule, written = make_schedule(written, slots=slots)
            claim = run(schedule, slots, rng, kill_after=int(rng.integers(1, 4)))
        assert claim == expected
        keys = [(line.pair, line.side) for line in written]
        assert len(set(keys)) == len(keys)  # none was trained twice


def test_the_claim_of_a_prefix_stands_whatever_follows() -> None:
    results = trained({"A": [0.4, 0.41, 0.42, 0.9], "B": [0.5, 0.51, 0.52, 0.1]})
    assert claim_from(results).pairs == 3
    assert claim_from(results) == claim_from({key: line for key, line in results.items() if key[0] <= 3})


def test_without_a_difference_it_ends_after_the_pairs_and_goes_on_with_more() -> None:
    results = trained({"A": [0.4, 0.5, 0.45], "B": [0.44, 0.46, 0.45]})
    schedule, _ = make_schedule(results.values(), pairs=3)
    claim = schedule.next(lambda: True)
    assert isinstance(claim, PairsClaim)
    assert (claim.better, claim.pairs) == ("", 3)
    schedule, _ = make_schedule(results.values(), pairs=4)
    task = schedule.next(lambda: True)
    assert isinstance(task, Task)
    assert pair_of(task.trial) == (4, "A")


def test_no_new_pair_starts_after_the_time_but_a_begun_one_is_completed() -> None:
    schedule, _ = make_schedule()
    first = schedule.next(lambda: True)
    second = schedule.next(lambda: False)
    assert isinstance(first, Task)
    assert isinstance(second, Task)
    assert schedule.next(lambda: False) is None  # their results are missing
    for task in (first, second):
        schedule.finish(task, Outcome(fitness=0.4))
    claim = schedule.next(lambda: False)
    assert isinstance(claim, PairsClaim)
    assert (claim.better, claim.pairs) == ("", 1)


def test_a_diverged_training_counts_with_zero_and_any_other_failure_ends_the_comparison() -> None:
    schedule, written = make_schedule()
    task, other = schedule.next(lambda: True), schedule.next(lambda: True)
    assert isinstance(task, Task)
    assert isinstance(other, Task)
    schedule.finish(task, Outcome(reason=f"TrainingError: step 9: {NOT_FINITE} 10 times in a row"))
    assert (written[0].fitness, written[0].reason[:13]) == (None, "TrainingError")
    assert not schedule.error
    schedule.finish(other, Outcome(reason="OSError: no space left on device"))
    assert schedule.error == "pair1-b: OSError: no space left on device"
    assert len(written) == 1
    assert not isinstance(schedule.next(lambda: True), Task)
    assert claim_from(trained({"A": [None] * 3, "B": [0.5, 0.51, 0.52]})).failed == (3, 0)


def test_the_table_has_the_means_of_both_sides_and_leaves_out_what_a_side_lacks() -> None:
    results = {}
    for pair, (a, b) in enumerate([(0.2, 0.4), (0.4, 0.8)], 1):
        for side, value in (("A", a), ("B", b)):
            classes = {"cat": value, "dog": value / 2 if pair == 2 else None, "eel": None}
            results[pair, side] = TrainedEvent(pair=pair, side=side, seed=pair, fitness=value, classes=classes,
                                               metrics={"mAP50": 2 * value, "recall": None})
    rows = {row.name: row for row in (*compared_metrics(results, 2), *compared_classes(results, 2))}
    assert list(rows) == ["fitness", "mAP50", "cat", "dog"]
    assert (rows["cat"].a, rows["cat"].b, rows["cat"].difference) == pytest.approx((0.3, 0.6, 0.3))
    assert rows["cat"].error == pytest.approx(((0.02 + 0.08) / 2) ** 0.5)
    assert (rows["dog"].pairs, rows["dog"].difference, rows["dog"].error) == (1, pytest.approx(0.2), None)
    assert compared_metrics(results, 1)[0].a == pytest.approx(0.2)


def test_folders_are_named_by_pair_and_side() -> None:
    assert [training_folder(*pair_of(number)) for number in (0, 1, 2, 19)] == [
        "pair1-a", "pair1-b", "pair2-a", "pair10-b"]


def trained(fitness: Mapping[Side, list[float] | list[None]]) -> dict[tuple[int, Side], TrainedEvent]:
    return {(pair, side): TrainedEvent(pair=pair, side=side, seed=pair, fitness=value)
            for side, values in fitness.items() for pair, value in enumerate(values, 1)}
