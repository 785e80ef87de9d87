"""The virtual clock and the replayed surface, on curves made by formula."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ray_yolo.tune.evolution import Gene, Space, TrialRow, propose
from tests.benchmarks import evolve_simulation
from tests.benchmarks.evolve_simulation import CONTESTANTS, Contestant, Evolution, compare, simulate
from tests.benchmarks.evolve_table import Surface, coordinates, parse_table
from tests.benchmarks.record_curves import BASE, SPACE, configurations, format_table
from tests.benchmarks.synthetic_table import synthetic_table

FEW = {name: SPACE[name] for name in ("lr0", "momentum", "scale")}


@pytest.fixture(scope="module")
def recorded():
    """A small table, its formula and its surface."""
    content, landscape = synthetic_table(0, num_random=40, num_near=20, num_repeats=4, space=FEW, epochs=9, noise=0.01)
    return content, landscape, Surface(parse_table(content))


class Ramp:
    """Fitness is the gene times the share of the training; an epoch takes a second, a start none."""

    best = 1.0

    def __init__(self, epochs=4, noise=()):
        space = Space((Gene("a", low=0.0, high=1.0),), ({"a": 0.5},))
        self.table = SimpleNamespace(space=space, epochs=epochs, epoch_seconds=np.ones(epochs), start_seconds=0.0)
        self.noise = dict(noise)

    def curve(self, genes):
        return genes["a"] * np.arange(1, self.table.epochs + 1) / self.table.epochs

    def observe(self, genes, seed, trial):
        return self.curve(genes) + self.noise.get(trial, 0.0)


class Script:
    """Proposes fixed values, and records the results."""

    def __init__(self, *values):
        self.values = values
        self.results = []

    def suggest(self, trial):
        return {"a": self.values[trial % len(self.values)]}

    def finished(self, row):
        self.results.append((row.trial, row.fitness))


class StopBelow:
    """Stops at the first epoch below a limit."""

    def __init__(self, limit):
        self.limit = limit

    def goes_on(self, trial, epoch, fitness):
        return fitness >= self.limit


def contest(script, stopper=None, **more):
    return Contestant(lambda surface, seed: script, stopper and (lambda surface: stopper), **more)


class TestClock:
    def test_one_slot_trains_one_after_the_other(self):
        outcome = simulate(Ramp(), contest(Script(0.1, 0.2, 1.0)), 1, 0)
        assert outcome == (12.0, 3)  # three trainings of four epochs

    def test_two_slots_take_half_the_time(self):
        outcome = simulate(Ramp(), contest(Script(0.1, 0.2, 0.3, 1.0)), 2, 0)
        assert outcome == (8.0, 5)  # the fifth started when the third ended, at 8.0 too

    def test_sequential_has_one_slot_whatever_there_is(self):
        assert simulate(Ramp(), contest(Script(0.1, 1.0), sequential=True), 64, 0).seconds == 8.0

    def test_a_stopped_trial_frees_its_slot_at_once(self):
        script = Script(0.1, 1.0)
        assert simulate(Ramp(), contest(script, StopBelow(0.2)), 1, 0).seconds == 1 + 4
        assert script.results == [(0, 0.025), (1, 1.0)]

    def test_starting_takes_its_time(self):
        surface = Ramp()
        surface.table.start_seconds = 10.0
        assert simulate(surface, contest(Script(0.1, 1.0)), 1, 0).seconds == 28.0
        assert simulate(surface, contest(Script(0.1, 1.0)), 1, 0, 20.0).seconds == 48.0

    def test_luck_is_no_arrival_and_may_hide_one(self, monkeypatch):
        monkeypatch.setattr(evolve_simulation, "MAX_TRAININGS", 5)
        assert simulate(Ramp(), contest(Script(0.5, 1.0, 1.0)), 1, 0) == (8.0, 2)
        assert simulate(Ramp(noise={1: -0.5}), contest(Script(0.5, 1.0, 1.0)), 1, 0) == (12.0, 3)
        assert simulate(Ramp(noise={0: 1.0}), contest(Script(0.5, 1.0, 1.0)), 1, 0).seconds == math.inf

    def test_a_row_that_was_stopped_is_not_the_best_beside_one_that_was_not(self):
        lucky = Ramp(noise={0: 5.0})  # stopped by its true number, which is 0.025 there
        stop = type("Stop", (), {"goes_on": lambda self, trial, epoch, fitness: trial != 0})()
        assert simulate(lucky, contest(Script(0.1, 1.0), stop), 1, 0) == (5.0, 2)

    def test_a_search_that_never_arrives_ends_with_its_budget(self, monkeypatch):
        monkeypatch.setattr(evolve_simulation, "MAX_TRAININGS", 5)
        outcome = simulate(Ramp(), contest(Script(0.1)), 1, 0)
        assert (outcome.seconds, outcome.trials) == (math.inf, 6)

    def test_children_see_the_rows_that_have_finished_and_no_other(self):
        seen = []

        class Spy(Evolution):
            def suggest(self, trial):
                seen.append(tuple(row.trial for row in self.rows))
                return super().suggest(trial)

        surface = Ramp()
        spy = Contestant(lambda surface, seed: Spy(surface.table.space, seed))
        simulate(surface, spy, 2, 0)
        assert seen[:4] == [(), (), (0,), (0, 1)]


class TestSurface:
    def test_it_is_near_the_formula_between_the_recorded_rows(self, recorded):
        _, landscape, surface = recorded
        space = replace(surface.table.space, algorithm="random", starts=())
        places = [propose(space, 5, k, ()) for k in range(60)]
        expected = np.array([landscape.curve(genes) for genes in places])
        found = np.array([surface.curve(genes) for genes in places])
        assert np.sqrt(((found - expected)[:, -1] ** 2).mean()) < 0.03
        assert np.corrcoef(found[:, -1], expected[:, -1])[0, 1] > 0.95

    def test_it_goes_through_the_recorded_rows(self, recorded):
        _, _, surface = recorded
        errors = [np.abs(surface.curve(genes) - curve).max()
                  for genes, curve in zip(surface.table.genes, surface.table.curves, strict=True)]
        assert np.median(errors) < 0.01

    def test_the_best_is_near_the_formulas(self, recorded):
        _, landscape, surface = recorded
        assert surface.best == pytest.approx(landscape.top, rel=0.1)
        assert surface.best >= max(surface.curve(genes).max() for genes in surface.table.genes) - 1e-9

    def test_observations_scatter_as_the_repetitions_do(self, recorded):
        _, _, surface = recorded
        start = surface.table.space.starts[0]
        seen = np.array([surface.observe(start, 0, trial) for trial in range(2000)])
        repeats = surface.table.curves[:4]
        assert seen.mean(axis=0) == pytest.approx(surface.curve(start), rel=0.01)
        relative = seen.std(axis=0)[-1] / seen.mean(axis=0)[-1]
        assert relative == pytest.approx(repeats[:, -1].std(ddof=1) / repeats[:, -1].mean(), rel=0.1)

    def test_equal_keys_give_equal_observations(self, recorded):
        surface, genes = recorded[2], recorded[2].table.space.starts[0]
        assert (surface.observe(genes, 1, 2) == surface.observe(genes, 1, 2)).all()
        assert (surface.observe(genes, 1, 2) != surface.observe(genes, 2, 1)).any()

    def test_coordinates_are_the_unit_cube(self):
        genes = (Gene("log", low=0.01, high=1.0, log=True), Gene("plain", low=2.0, high=4.0),
                 Gene("c", "choice", values=("x", "y", "z")))
        assert coordinates(genes, {"log": 0.1, "plain": 2.5, "c": "y"}) == pytest.approx([0.5, 0.25, 0.5])

    def test_a_failed_row_has_fitness_zero(self, recorded):
        content = json.loads(json.dumps(recorded[0]))
        content["rows"][5] |= {"fitness": None, "seconds": None}
        assert (parse_table(content).curves[5] == 0).all()


class TestRecording:
    def test_at_most_two_hundred_trainings_the_start_first(self):
        space = parse_table(synthetic_table(0)[0]).space
        rows = list(configurations(space, 110, 80, 8))
        assert len(rows) == 198
        assert [seed for _, seed in rows[:9]] == [*range(8), 0]
        assert all(genes == dict(space.starts[0]) for genes, _ in rows[:8])
        assert len({tuple(genes.values()) for genes, _ in rows[8:]}) == 190

    def test_a_table_that_is_written_can_be_read(self):
        rows = [{"genes": {"lr0": 0.01}, "seed": 0, "fitness": [0.1, 0.2], "seconds": [1.0, 1.0], "start_seconds": 2.0},
                {"genes": {"lr0": 0.02}, "seed": 0, "fitness": None, "seconds": None, "failed": "x"}]
        content = json.loads(format_table(rows, BASE.model_copy(update={"epochs": 2})))
        table = parse_table(content)
        assert table.start_seconds == 2.0
        assert table.curves.tolist() == [[0.1, 0.2], [0.0, 0.0]]
        assert table.epoch_seconds.tolist() == [1.0, 1.0]


class TestContestants:
    def test_asha_is_rays(self):
        asha = evolve_simulation.Asha(18)
        first_rung = [asha.goes_on(trial, 2, fitness) for trial, fitness in ((0, 0.5), (1, 0.4), (2, 0.6))]
        assert first_rung == [True, False, True]
        assert asha.goes_on(2, 3, 0.0)  # between rungs

    def test_optuna_starts_where_all_start(self, recorded):
        space = recorded[2].table.space
        search = evolve_simulation.Optuna(space, 0)
        assert search.suggest(0) == pytest.approx(dict(space.starts[0]))
        for trial in range(1, 13):
            search.finished(TrialRow(trial - 1, {}, 0.1))
            genes = search.suggest(trial)
            assert all(gene.low <= genes[gene.name] <= gene.high for gene in space.genes)

    def test_more_slots_are_faster(self, recorded, monkeypatch):
        monkeypatch.setattr(evolve_simulation, "SLOTS", (1, 8))
        table = compare(recorded[2], range(3), ("sequential", "ours"))
        assert table["sequential"][1]["speedup"] == 1.0
        assert table["ours"][8]["speedup"] > table["ours"][1]["speedup"] > 0
        assert table["ours"][8]["speedup"] > 1.0

    def test_a_simulation_is_repeatable(self, recorded):
        first, again = (simulate(recorded[2], CONTESTANTS["ours"], 8, 3) for _ in range(2))
        assert first == again
