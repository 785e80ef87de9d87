"""Search spaces: what may be written, what it becomes, and the message of each mistake."""

import functools
import math

from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ray_yolo.cli import parse_train
from ray_yolo.config.recipe import Recipe, resolve
from ray_yolo.config.settings import config_fields
from ray_yolo.core.errors import ConfigError
from ray_yolo.tune.evolution import TrialRow, grid_size, propose
from ray_yolo.tune.ledger_events import ClaimedEvent, CountedEvent, ProposedEvent
from ray_yolo.tune.schedule import Outcome, Schedule, Task
from ray_yolo.tune.space import ENTANGLED, NOT_SEARCHED, read_space
from ray_yolo.tune.trials import overlay, train_command

POOL = sorted({*range(-1, 20), *range(32, 1000, 32), *(n / 10 for n in range(1, 30)), *(10.0**n for n in range(-6, 7)),
               0.999999, 0.05, 45.0, 179.5, 2.0**17, 2.0**40, 2.0**60, 1e300})
BASES = [Recipe(), Recipe(epochs=30, batch_size=16, microbatch=4, imgsz=96), Recipe(batch_size=8, microbatch=1),
         Recipe(exact=True, epochs=3), Recipe(batch_size=16, microbatch=16, sync_bn=True, changes="9: lr0=0.1")]


@st.composite
def entries(draw, base, path):
    """Something to search a field by, of values that the field takes one by one."""
    good = good_values(BASES.index(base), path)
    numbers = [value for value in good if type(value) in (int, float)]
    ranges = [] if len(numbers) < 2 else [
        st.lists(st.sampled_from(numbers), min_size=2, max_size=2, unique=True).map(sorted)]
    logs = [each.map(lambda ends: [*ends, "log"]) for each in ranges]
    whole = [each.map(lambda ends: {"type": "int", "low": ends[0], "high": ends[1]}) for each in ranges]
    choices = [st.lists(st.sampled_from(good), min_size=1, max_size=4).map(
        lambda values: {"type": "choice", "values": values})] if good else []
    return draw(st.one_of(*ranges, *logs, *whole, *choices, st.just([0, 1])))


@functools.cache
def good_values(number, path):
    words = [*config_fields(Recipe)[path].choices, True, False, "auto", "yolov5n", "5: lr0=0.02", "40: mosaic=0"]
    return [value for value in (*POOL, *words) if makes_recipe(BASES[number], path, value)]


def makes_recipe(base, path, value):
    try:
        return bool(overlay(base, {path: value}))
    except ValidationError:
        return False


@st.composite
def accepted_spaces(draw, algorithms=("evolve", "random", "grid", "gp")):
    """A recipe and a space that is accepted for it."""
    base = draw(st.sampled_from(BASES))
    # what is checked together comes together
    paths = draw(st.lists(st.one_of(st.sampled_from(sorted(config_fields(Recipe))), st.sampled_from(ENTANGLED)),
                          min_size=1, max_size=4, unique=True))
    data = {path: draw(entries(base, path)) for path in paths}
    algorithm = draw(st.sampled_from(algorithms))
    parent = draw(st.sampled_from(["single", "mean"]))
    try:
        return base, read_space({"search": {"algorithm": algorithm, "parent": parent}, **data}, base).space
    except ConfigError:
        reject()


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(accepted_spaces(), st.integers(0, 2**32 - 1))
def test_no_proposal_of_an_accepted_space_fails_for_its_values(accepted, seed):
    """Laid over the recipe as a sweep has it, with everything decided; and its command can be written."""
    base, space = accepted
    resolved, rows = resolve(base, 1, gpu=False), []
    for number in range(min(16, grid_size(space.genes) if space.algorithm == "grid" else 16)):
        genes, _ = propose(space, seed, number, rows)
        recipe = overlay(resolved, genes)
        rows.append(TrialRow(number, genes, (number * 7 % 11) / 10, number % 3))
    assert parse_train(train_command(recipe)[3:]).config.recipe == recipe


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(accepted_spaces(["gp"]), st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(2, 11))
def test_each_trial_of_the_default_search_is_a_valid_comparable_recipe(
        accepted, seed, slots, fails_each):
    base, space = accepted
    resolved, lines = resolve(base, 1, gpu=False), []
    schedule = Schedule(space, seed, (3, 9), slots, write=lines.append)
    tasks = []
    while not isinstance(reply := schedule.next(lambda: len(schedule.genes) < 20), ClaimedEvent):
        if isinstance(reply, Task):
            tasks.append(reply)
            continue
        task = tasks.pop()
        fitness = (task.trial * 7 + task.seed + task.until) % 11 / 10
        schedule.finish(task, Outcome(reason="diverged") if task.trial % fails_each == 1 else Outcome(fitness=fitness))
    for genes in schedule.genes:
        recipe = overlay(resolved, genes)
        assert parse_train(train_command(recipe)[3:]).config.recipe == recipe
        assert not [name for name in (*NOT_SEARCHED, "objective") if getattr(recipe, name) != getattr(resolved, name)]
    # Chance decides between process and evolution: a short sweep may have proposals of one only.
    assert {line.how for line in lines if isinstance(line, ProposedEvent)} <= {"start", "random", "evolve", "gp"}
    assert all(math.isfinite(line.fitness) for line in lines if isinstance(line, CountedEvent))
