"""The order of a comparison's trainings, and the claim that follows from their results."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import numpy as np
import pytest

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import TrainingError
from ray_yolo.tune.claim import PairsClaim
from ray_yolo.tune.compared import compared_classes, compared_metrics
from ray_yolo.tune.ledger_events import ClaimedEvent, FailedEvent, LedgerEvent
from ray_yolo.tune.pairs import (
    SIDES,
    PairSchedule,
    Side,
    claim_from,
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


def make_schedule(lines: Iterable[LedgerEvent] = (), slots: int = 4) -> tuple[PairSchedule, list[LedgerEvent]]:
    """A schedule that continues these lines, and all that it has written."""
    written = list(lines)
    schedule = PairSchedule(Recipes(A, B), written.append, lambda: slots)
    schedule.restore(list(written))
    return schedule, written


def run(schedule: PairSchedule, slots: int, order: np.random.Generator, kill_after: int = 10**6, pairs: int = 6
        ) -> PairsClaim | None:
    """Train on slots whose trainings end in any order; None if killed after a number of results."""
    running: list[Task] = []
    for _ in range(1000):
        while (reply := schedule.next(lambda: schedule.num_pairs < pairs)) is not None:
            if isinstance(reply, ClaimedEvent):
                assert isinstance(reply.claim, PairsClaim)
                return reply.claim
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


def test_the_ledger_depends_neither_on_slots_nor_on_ends_nor_on_kills() -> None:
    schedule, expected = make_schedule(slots=1)
    claim = run(schedule, 1, np.random.default_rng(0))
    assert claim is not None
    assert (claim.better, 3 <= claim.pairs < 6) == ("B", True)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        written: list[LedgerEvent] = []
        claim = None
        while claim is None:
            slots = int(rng.integers(1, 6))
            schedule, written = make_schedule(written, slots=slots)
            claim = run(schedule, slots, rng, kill_after=int(rng.integers(1, 4)))
        assert written == expected


def test_the_claim_of_a_prefix_stands_whatever_follows() -> None:
    results = trained({"A": [0.4, 0.41, 0.42, 0.41, 0.9], "B": [0.5, 0.51, 0.52, 0.51, 0.1]})
    assert claim_from(results).pairs == 4
    assert claim_from(results) == claim_from({key: line for key, line in results.items() if key[0] <= 4})


def test_without_a_difference_it_ends_after_the_pairs_and_goes_on_with_more() -> None:
    schedule, written = make_schedule()
    for fitness in (0.4, 0.44, 0.5, 0.46, 0.45, 0.45):
        task = schedule.next(lambda: schedule.num_pairs < 3)
        assert isinstance(task, Task)
        schedule.finish(task, Outcome(fitness=fitness))
    claimed = schedule.next(lambda: False)
    assert claimed == schedule.next(lambda: False) == written[-1]
    assert isinstance(claimed, ClaimedEvent)
    assert (claimed.claim.better, claimed.claim.pairs) == ("", 3)
    again, lines = make_schedule(written)
    assert again.next(lambda: False) == claimed
    assert lines == written  # the claim is not written again
    task = again.next(lambda: True)
    assert isinstance(task, Task)
    assert pair_of(task.trial) == (4, "A")
    assert again.verify([*written, written[-1]])  # a claim that stands twice follows from nothing


def test_a_line_that_does_not_follow_shows() -> None:
    schedule, written = make_schedule(slots=1)
    run(schedule, 1, np.random.default_rng(0))
    for number, change in ((0, {"seed": 1}), (1, {"trial": 2}), (2, {"epochs": 9}), (3, {"fitness": 0.9}),
                           (-1, {"claim": PairsClaim(pairs=3, difference=0.0)})):
        lines = list(written)
        lines[number] = lines[number].model_copy(update=change)
        assert len(PairSchedule(Recipes(A, B)).verify(lines)) == 1, change
    assert PairSchedule(Recipes(A, B)).verify(written) == []
    assert len(PairSchedule(Recipes(A, B)).verify([*written, written[-2]])) == 1


def test_no_new_pair_starts_after_the_time_but_a_begun_one_is_completed() -> None:
    schedule, _ = make_schedule()
    first = schedule.next(lambda: True)
    second = schedule.next(lambda: False)
    assert isinstance(first, Task)
    assert isinstance(second, Task)
    assert schedule.next(lambda: False) is None  # their results are missing
    for task in (first, second):
        schedule.finish(task, Outcome(fitness=0.4))
    claimed = schedule.next(lambda: False)
    assert isinstance(claimed, ClaimedEvent)
    assert (claimed.claim.better, claimed.claim.pairs) == ("", 1)


def test_a_diverged_training_counts_with_zero() -> None:
    schedule, written = make_schedule()
    task, other = schedule.next(lambda: True), schedule.next(lambda: True)
    assert isinstance(task, Task)
    assert isinstance(other, Task)
    schedule.finish(task, Outcome(reason="DivergedError: step 3", diverged=True))
    schedule.next(lambda: False)
    assert isinstance(written[0], FailedEvent)
    assert (written[0].trial, written[0].reason, written[0].diverged) == (0, "DivergedError: step 3", True)
    assert claim_from(trained({"A": [None] * 3, "B": [0.5, 0.51, 0.52]})).failed == (3, 0)


def test_another_failure_has_no_result() -> None:
    schedule, written = make_schedule()
    task = schedule.next(lambda: True)
    assert isinstance(task, Task)
    with pytest.raises(TrainingError):
        schedule.finish(task, Outcome(reason="OSError: loss or gradient not finite, says a disk"))
    assert not written
    assert schedule.next(lambda: True) == task  # it may be tried again


def test_the_table_has_the_means_of_both_sides_and_leaves_out_what_a_side_lacks() -> None:
    results = {}
    for pair, (a, b) in enumerate([(0.2, 0.4), (0.4, 0.8)], 1):
        for side, value in (("A", a), ("B", b)):
            classes = {"cat": value, "dog": value / 2 if pair == 2 else None, "eel": None}
            results[pair, side] = Outcome(fitness=value, classes=classes, metrics={"mAP50": 2 * value, "recall": None})
    rows = {row.name: row for row in (*compared_metrics(results, 2), *compared_classes(results, 2))}
    assert list(rows) == ["fitness", "mAP50", "cat", "dog"]
    assert (rows["cat"].a, rows["cat"].b, rows["cat"].difference) == pytest.approx((0.3, 0.6, 0.3))
    assert rows["cat"].error == pytest.approx(((0.02 + 0.08) / 2) ** 0.5)
    assert (rows["dog"].pairs, rows["dog"].difference, rows["dog"].error) == (1, pytest.approx(0.2), None)
    assert compared_metrics(results, 1)[0].a == pytest.approx(0.2)


def test_folders_are_named_by_pair_and_side() -> None:
    assert [training_folder(*pair_of(number)) for number in (0, 1, 2, 19)] == [
        "pair1-a", "pair1-b", "pair2-a", "pair10-b"]


def trained(fitness: Mapping[Side, list[float] | list[None]]) -> dict[tuple[int, Side], Outcome]:
    return {(pair, side): Outcome(fitness=value)
            for side, values in fitness.items() for pair, value in enumerate(values, 1)}
