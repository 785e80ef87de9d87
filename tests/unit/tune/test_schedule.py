"""The laws of a sweep's order: a function of space, seed, virtual slots and outcomes alone."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_yolo.core.errors import InputError
from ray_yolo.tune.claim import FORMER_LAW, LAW
from ray_yolo.tune.evolution import Gene, Space
from ray_yolo.tune.ledger_events import (
    ClaimedEvent,
    ClosedEvent,
    CountedEvent,
    FailedEvent,
    FinalistsEvent,
    ProposedEvent,
    ScheduledEvent,
)
from ray_yolo.tune.schedule import REDUCTION, Ending, Outcome, Schedule, Task, rungs_of

RUNGS = (3, 9)
SPACE = Space((Gene("a", low=0.01, high=1.0), Gene("b", "int", low=1, high=9), Gene("c", "choice", values=(1, 2))),
              ({"a": 0.3, "b": 3, "c": 1},), random_share=0.3)


def train(task, noise=0.1, fails=lambda task: False):
    """The outcome of a task: a function of its genes, seed and epochs."""
    if fails(task):
        return Outcome(reason="diverged")
    draw = np.random.default_rng([task.seed, task.until, hash(tuple(task.genes.values())) % 2**31]).standard_normal()
    fitness = (1 - abs(task.genes["a"] - 0.7)) * (0.5 + task.until / 18) * (1 + noise * draw)
    return Outcome(fitness=float(fitness), metrics={"mAP50": float(fitness)}, weights=f"{task.trial}-{task.until}")


def cost(genes):
    return 0.5 + genes["a"] * genes["c"]


def fails_often(task):
    return task.genes["b"] == 9


def run(schedule, trials, order=None, train=train, explore_until=None):
    """Drive a schedule to its end, outcomes in a random real order; returns how it ended."""
    tasks, order = [], order or random.Random(0)
    while True:
        explore = len(schedule.genes) < trials
        state = schedule.next(explore)
        if isinstance(state, ClaimedEvent):
            return state
        if isinstance(state, Task):
            tasks.append(state)
        elif tasks:
            task = tasks.pop(order.randrange(len(tasks)))
            schedule.finish(task, train(task))


def sweep(trials=30, slots=3, seed=0, order=None, train=train, lines=()):
    """The lines of a sweep, which continues from `lines`."""
    written = list(lines)
    schedule = Schedule(SPACE, seed, RUNGS, slots, cost, written.append)
    schedule.restore(lines)
    run(schedule, trials, order, train)
    return written


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(0, 3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_lines_do_not_depend_on_the_real_order(order, slots, seed, some_fail):
    def trained(task):
        return train(task, fails=fails_often if some_fail else lambda task: False)

    first = sweep(20, slots, seed, train=trained)
    assert sweep(20, slots, seed, random.Random(order), trained) == first


def test_a_sweep_continues_from_each_of_its_lines():
    whole = sweep(20)
    for count in range(len(whole)):
        assert sweep(20, lines=whole[:count]) == whole, count


def test_the_cost_of_a_trial_is_computed_once():
    asked = []
    schedule = Schedule(SPACE, 0, RUNGS, 3, lambda genes: asked.append(genes) or cost(genes))
    run(schedule, 20)
    assert asked == schedule.genes  # a real one validates a whole recipe
    assert schedule.costs == [cost(genes) for genes in schedule.genes]


def test_the_ledger_verifies_and_a_changed_line_does_not():
    lines = sweep(20)
    assert Schedule(SPACE, 0, RUNGS, 3, cost).verify(lines) == []
    for kind in (ProposedEvent, ScheduledEvent, CountedEvent):
        number = next(n for n, line in enumerate(lines) if n > 20 and isinstance(line, kind))
        change = {ProposedEvent: {"genes": {"a": 0.123, "b": 3, "c": 1}}, ScheduledEvent: {"end": 1e9},
                  CountedEvent: {"fitness": 9.0}}
        changed = [*lines[:number], lines[number].model_copy(update=change[kind]), *lines[number + 1:]]
        assert Schedule(SPACE, 0, RUNGS, 3, cost).verify(changed), kind
    with pytest.raises(InputError):
        Schedule(SPACE, 0, RUNGS, 3, cost).restore(lines[1:])


def run_by_process(law=LAW, slots=2, seed=0):
    """The lines of a sweep of the process over three rungs, of which the first one says nothing."""
    def unlike(task):
        return train(task) if task.until > 1 else Outcome(fitness=0.3 + task.trial % 5 / 10)

    lines = []
    schedule = Schedule(replace(SPACE, algorithm="gp"), seed, (1, 4, 9), slots, write=lines.append, law=law)
    run(schedule, 60, train=unlike)
    return lines


def test_a_proposal_trains_first_to_the_rung_that_its_line_names():
    lines = run_by_process()
    proposed = {line.trial: line for line in lines if isinstance(line, ProposedEvent)}
    first = {line.trial: line.until for line in lines if isinstance(line, ScheduledEvent) and line.why == "new"}
    assert {trial: (1, 4)[line.level] for trial, line in proposed.items()} == first
    assert {line.level for line in proposed.values() if line.how == "gp"} == {0, 1}  # the first ones know too little
    continued = {line.trial for line in lines if isinstance(line, ScheduledEvent) and line.why in ("best", "finish")}
    assert any(proposed[trial].level for trial in continued)  # one that has skipped a rung continues like the others


def test_the_first_rung_of_a_proposal_is_replayed_as_recorded_and_verified():
    lines = run_by_process()
    space = replace(SPACE, algorithm="gp")
    assert Schedule(space, 0, (1, 4, 9), 2).verify(lines) == []
    number = next(n for n, line in enumerate(lines) if isinstance(line, ProposedEvent) and line.level == 1)
    changed = [line.model_copy(update={"level": 0}) if n == number else line for n, line in enumerate(lines)]
    [problem] = Schedule(space, 0, (1, 4, 9), 2).verify(changed[:number + 1])
    assert "its first rung is 0, but 1 follows" in problem
    Schedule(space, 0, (1, 4, 9), 2).restore(changed[:number + 1])  # another processor may have rounded otherwise


def test_a_sweep_of_an_earlier_release_skips_no_rung():
    lines = run_by_process(FORMER_LAW)
    assert {line.level for line in lines if isinstance(line, ProposedEvent)} == {0}
    assert Schedule(replace(SPACE, algorithm="gp"), 0, (1, 4, 9), 2, law=FORMER_LAW).verify(lines) == []


def exploration(lines):
    decisions = [line for line in lines if isinstance(line, (ProposedEvent, ScheduledEvent))]
    return [line for line in decisions if not getattr(line, "closing", False)]


def test_eight_hours_and_eight_more_are_sixteen():
    first = sweep(16)
    trained = []

    def counting(task):
        trained.append((task.trial, task.seed, task.until))
        return train(task)

    both, once = sweep(32, lines=first, train=counting), sweep(32)
    assert sum(isinstance(line, ClaimedEvent) for line in both) == 2
    assert exploration(both) == exploration(once)
    seen = {(line.trial, line.seed, line.epochs) for line in first if isinstance(line, CountedEvent)}
    assert not seen & set(trained)
    assert both[-1] == once[-1]


def explored(lines):
    """The events of the exploration."""
    close = next(number for number, line in enumerate(lines) if isinstance(line, ClosedEvent))
    return lines[:close], lines[close:]


def test_so_many_trials_have_continued_at_any_time_and_each_was_the_best_paused():
    paused, reached, continued = {}, 0, 0
    before, _ = explored(sweep(60, slots=1))
    for line in before:
        if isinstance(line, CountedEvent) and line.epochs == 3 and line.trial:
            paused[line.trial] = line.fitness
            reached += 1
        elif isinstance(line, ScheduledEvent) and line.why == "best":
            assert paused.pop(line.trial) > max(paused.values())
            continued += 1
        elif isinstance(line, ProposedEvent):
            assert continued == reached // REDUCTION
    assert continued == 14  # of 59, without the default


def test_the_default_always_continues():
    lines = sweep(20, slots=1, train=lambda task: Outcome(fitness=0.1 if task.trial == 0 else 0.5))
    default = [line for line in lines if isinstance(line, ScheduledEvent) and (line.trial, line.seed) == (0, 0)]
    (line,) = (line for line in default if line.until == 9)
    assert line.why == "default"
    assert line.start == lines[1].end  # before any other training


def test_after_exploration_paused_trials_train_to_their_ends_in_the_time_of_one():
    before, after = explored(sweep(40, slots=3))
    (closed,) = (line for line in after if isinstance(line, ClosedEvent))
    assert closed.until == closed.at + 6
    finishing = [line for line in after if isinstance(line, ScheduledEvent) and line.why == "finish"]
    assert finishing
    assert all(line.until == 9 and line.end <= closed.until and line.closing for line in finishing)
    paused = {line.trial for line in before if isinstance(line, CountedEvent)} - {
        line.trial for line in before if isinstance(line, ScheduledEvent) and line.until == 9}
    left = paused - {line.trial for line in finishing}
    free = min(line.end for line in finishing)
    genes = {line.trial: line.genes for line in before if isinstance(line, ProposedEvent)}
    assert left
    assert all(free + 6 * cost(genes[trial]) > closed.until for trial in left)  # none of them fits


def test_less_time_to_finish_lets_fewer_trials_end():
    def finish(time):
        schedule, tasks, ended = Schedule(SPACE, 0, RUNGS, 2), [], 0
        while True:
            reply = schedule.next(len(schedule.genes) < 20, lambda: Ending(time))
            if isinstance(reply, ClaimedEvent):
                return schedule.closing_time(2), ended
            if isinstance(reply, Task):
                tasks.append(reply)
                ended += reply.until == 9 and reply.seed == 0
            else:
                schedule.finish(tasks[0], train(tasks[0]))
                tasks.append(tasks.pop(0))

    times = [finish(time) for time in (-5.0, 5.0, 6.0, 100.0)]
    assert [left for left, _ in times] == [(0, 0)] * 4
    ended = [number for _, number in times]
    assert ended[0] == ended[1] < ended[2] == ended[3]  # from 3 to 9 epochs


def test_the_candidate_wins_if_it_is_expected_to_be_better_though_its_runs_do_not_prove_it():
    def trained(task):  # the best a gains 0.014 over the default
        fitness = 0.5 + 0.02 * task.genes["a"]
        return Outcome(fitness=fitness * (1 + 0.001 * (-1) ** task.trial) * task.until / 9)

    lines = []
    over = run(Schedule(SPACE, 0, RUNGS, 1, write=lines.append), 20, train=trained)
    assert not over.claim.better
    assert over.winner
    assert over == lines[-1]


def test_the_next_of_equal_trainings_waits_for_one_result_alone():
    """Slots begin one after another, so that no training waits for all others to end."""
    schedule = Schedule(SPACE, 0, RUNGS, 4)
    first = [schedule.next() for _ in range(4)]
    assert schedule.next() is None
    for task in first:
        schedule.finish(task, train(task))
        assert isinstance(schedule.next(), Task)
        assert schedule.next() is None


def test_finalists_and_default_train_on_the_same_fresh_seeds():
    lines = sweep(60, slots=6)
    _, after = explored(lines)
    closed = next(line for line in after if isinstance(line, ClosedEvent))
    finalists = next(line for line in after if isinstance(line, FinalistsEvent))
    seeds = {}
    for line in after:
        if isinstance(line, ScheduledEvent) and line.seed:
            seeds.setdefault(line.trial, set()).add(line.seed)
    assert set(seeds) == {0, *finalists.trials}
    assert sum(map(len, seeds.values())) == closed.runs
    assert len({frozenset(seeds[trial]) for trial in finalists.trials}) == 1


def test_a_training_on_a_fresh_seed_that_diverges_counts_as_0():
    """Else only the lucky trainings of a recipe that often diverges would count."""
    def trained(task):
        if task.trial and task.seed % 2:
            return Outcome(reason="loss", diverged=True)
        return train(task)

    over = run(Schedule(SPACE, 0, RUNGS, 6), 60, train=trained)
    assert over.claim.runs == 2
    assert over.claim.diverged == (1, 0)
    assert not over.claim.better
    assert "; 1 training of it diverged, counted with a fitness of 0" in str(over.claim)
    former = run(Schedule(SPACE, 0, RUNGS, 6, law=FORMER_LAW), 60, train=trained)
    assert (former.claim.runs, former.claim.diverged) == (1, (0, 0))


def test_a_default_that_diverges_once_is_no_failed_default():
    """Its fresh seeds are compared, so a worse trial does not win without a word."""
    def trained(task):
        if (task.trial, task.seed, task.until) == (0, 0, 9):
            return Outcome(reason="loss", diverged=True)
        return Outcome(fitness=(0.3 if task.trial else 0.9) * (1 + 0.01 * (-1) ** task.seed) * task.until / 9)

    over = run(Schedule(SPACE, 0, RUNGS, 10), 12, train=trained)
    assert over.winner == 0
    assert over.claim.diverged == (0, 1)


def test_without_a_training_that_ends_the_default_is_kept():
    over = run(Schedule(SPACE, 0, RUNGS, 1), 5, train=lambda task: train(task, fails=lambda task: task.trial > 0))
    assert over.winner == 0
    assert over.claim.runs == 0
    over = run(Schedule(SPACE, 0, RUNGS, 1), 9, train=lambda task: train(task, fails=lambda task: task.trial == 0))
    assert over.winner > 0
    assert str(over).endswith("it is kept because the default failed")


@pytest.mark.parametrize(("rungs", "floor"), [(RUNGS, 0.04), ((9,), 0.0)])
def test_nothing_is_compared_where_no_training_rises_beyond_the_defaults_first_rung(rungs, floor):
    """Without rungs there is no curve, and 0.03 counts as learned."""
    def trained(task):
        return Outcome(fitness=0.02 if task.until == 3 else 0.03)

    over = run(Schedule(SPACE, 0, rungs, 1), 20, train=trained)
    assert (over.winner, over.claim.floor) == (0, floor)


def test_a_failed_trial_does_not_continue_and_equal_genes_are_not_trained_again():
    grid = Space((Gene("a", "choice", values=(0.2, 0.2, 0.9)), Gene("b", "int", low=8, high=9),
                  Gene("c", "choice", values=(1,))), (), "grid")
    trained, lines = [], []
    schedule = Schedule(grid, 0, RUNGS, 1, write=lines.append)

    def counting(task):
        trained.append((task.genes["a"], task.genes["b"], task.seed, task.until))
        return train(task, fails=fails_often)

    over = run(schedule, 100, train=counting)
    assert len(schedule.genes) == 6
    assert len(trained) == len(set(trained))
    failed = {line.trial for line in lines if isinstance(line, FailedEvent)}
    assert failed == {1, 3, 5}
    assert not [line for line in lines if isinstance(line, ScheduledEvent) and line.trial in failed and line.until == 9]
    assert schedule.genes[over.winner]["b"] == 8


@pytest.mark.parametrize("algorithm", ["gp", "evolve", "random"])
@pytest.mark.parametrize("rungs", [RUNGS, (9,)])
def test_exploration_ends_once_each_combination_of_a_finite_space_is_proposed(algorithm, rungs):
    space = Space((Gene("a", "choice", values=(0.2, 0.2, 0.9)), Gene("b", "int", low=1, high=2),
                   Gene("c", low=1.0, high=1.0)), ({"a": 0.2, "b": 1, "c": 1.0},), algorithm)
    lines = []
    schedule = Schedule(space, 0, rungs, 2, write=lines.append)
    run(schedule, 60)
    assert len(schedule.genes) < 60
    assert {(genes["a"], genes["b"]) for genes in schedule.genes} == {(0.2, 1), (0.2, 2), (0.9, 1), (0.9, 2)}
    assert schedule.genes[-1] not in schedule.genes[:-1]
    assert isinstance(schedule.next(True), ClaimedEvent)
    assert Schedule(space, 0, rungs, 2).verify(lines) == []
    again = Schedule(space, 0, rungs, 2)
    again.restore(lines)
    assert again.next(True) == lines[-1]


def test_rungs():
    assert rungs_of(60) == (7, 27, 60)
    assert rungs_of(27) == (3, 12, 27)
    assert rungs_of(4) == (1, 2, 4)
    assert rungs_of(2) == (1, 2)
    assert rungs_of(1) == (1,)
