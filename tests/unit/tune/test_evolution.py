"""Proposals: YOLOv5's published rules, checked by their statistics, and the laws that make a sweep replayable."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_yolo.tune import evolution
from ray_yolo.tune.evolution import (
    Gene,
    Space,
    TrialRow,
    best_rows,
    can_move,
    grid_size,
    mutate,
    nearest,
    parent_weights,
)

WIDE = (Gene("a", low=0.0, high=1e6), Gene("b", low=0.0, high=1e6, gain=0.3), Gene("c", low=0.0, high=1e6, gain=0.0),
        Gene("zero", low=0.0, high=1e6))
PARENT = {"a": 1000.0, "b": 1000.0, "c": 1000.0, "zero": 0.0}
START = {"a": 0.5, "b": 10, "c": "x"}
MIXED = (Gene("a", low=0.01, high=0.9), Gene("b", "int", 0, 20), Gene("c", "choice", values=("x", "y", "z")))
SPACE = Space(MIXED, (START,))
KNOWN_CHILD = {'a': 0.25397, 'b': 3, 'c': 'x'}
KNOWN_DRAW = {'a': 0.31011, 'b': 2, 'c': 'x'}
ROWS = [TrialRow(n, {"a": 0.1 + 0.05 * n, "b": n, "c": "xyz"[n % 3]}, 0.1 * ((7 * n) % 11)) for n in range(9)]


def propose(*given):
    return evolution.propose(*given)[0]


def parents_of(*given):
    return evolution.propose(*given)[1]


def rng(number):
    return np.random.default_rng(number)


@pytest.fixture(scope="module")
def factors():
    """(children, genes) of 10,000 mutations, as multiples of the parent."""
    children = [mutate(WIDE[:3], {g.name: PARENT[g.name] for g in WIDE[:3]}, rng(n)) for n in range(10_000)]
    return np.array([[child[gene.name] / 1000.0 for gene in WIDE[:3]] for child in children])


class TestMutation:
    def test_four_genes_in_five_are_mutated(self, factors):
        # A child without any mutated gene is drawn again: of two genes that happens to 0.2 ** 2 of them.
        assert (factors[:, 0] != 1).mean() == pytest.approx(0.8 / (1 - 0.04), abs=0.015)
        assert (factors[:, 1] != 1).mean() == pytest.approx(0.8 / (1 - 0.04), abs=0.015)

    def test_a_factor_is_a_normal_draw_times_one_uniform_draw_times_a_fifth_of_the_gain(self, factors):
        for gene, gain in ((0, 1.0), (1, 0.3)):
            steps = factors[factors[:, gene] != 1, gene] - 1
            assert steps.mean() == pytest.approx(0, abs=0.005)
            assert steps.var() == pytest.approx((0.2 * gain) ** 2 / 3, rel=0.08)  # E[u^2] = 1/3
            # E[u^4] E[z^4] / (E[u^2] E[z^2])^2 = (1/5 x 3) / (1/3)^2: heavier tails than a normal's 3
            assert (steps ** 4).mean() / steps.var() ** 2 == pytest.approx(5.4, rel=0.2)

    def test_all_genes_of_a_child_share_one_uniform_draw(self, factors):
        both = factors[(factors[:, 0] != 1) & (factors[:, 1] != 1)]
        left, right = np.abs(both[:, 0] - 1), np.abs(both[:, 1] - 1)
        # With u common and z independent: corr = (E[u^2] - E[u]^2) E|z|^2 / (E[u^2] - E[u]^2 E|z|^2)
        absolute = 2 / math.pi
        expected = (1 / 3 - 1 / 4) * absolute / (1 / 3 - absolute / 4)
        assert np.corrcoef(left, right)[0, 1] == pytest.approx(expected, abs=0.04)

    def test_gain_zero_never_moves(self, factors):
        assert (factors[:, 2] == 1).all()

    def test_factors_are_clipped(self):
        genes = (Gene("a", low=0.0, high=1e6, gain=100.0),)
        found = np.array([mutate(genes, {"a": 1000.0}, rng(n))["a"] for n in range(2000)]) / 1000
        assert found.min() == 0.3
        assert found.max() == 3.0
        assert ((found > 0.3) & (found < 3.0)).any()

    def test_a_gene_at_zero_stays_at_zero(self):
        assert all(mutate(WIDE, PARENT, rng(n))["zero"] == 0 for n in range(200))

    def test_values_are_rounded_to_five_decimals(self):
        genes = (Gene("a", low=0.0, high=1.0),)
        values = [mutate(genes, {"a": 0.123456}, rng(n))["a"] for n in range(200)]
        assert all(round(value, 5) == value for value in values)
        assert len(set(values)) > 100

    @pytest.mark.parametrize(("value", "low", "high"), [(4e-6, 0.0, 1e-3), (4e-6, 1e-6, 1e-5), (8e-5, 0.0, 1.0)])
    def test_a_small_value_keeps_five_digits_and_is_not_lost(self, value, low, high):
        genes = (Gene("a", low=low, high=high),)
        values = {mutate(genes, {"a": value}, rng(n))["a"] for n in range(200)} - {low, high}
        assert len(values) > 100
        assert all(float(f"{child:.5g}") == child > 0 for child in values)

    def test_children_of_earlier_ledgers_have_five_decimals(self):
        genes = (Gene("a", low=0.0, high=1e-3),)
        values = {mutate(genes, {"a": 8e-5}, rng(n), is_fine=False)["a"] for n in range(200)}
        assert values == {round(value, 5) for value in values}
        assert len(values) < 10

    def test_genes_at_their_bounds_stay_inside(self):
        genes = (Gene("low", low=0.5, high=1.0), Gene("high", low=0.0, high=1.0), Gene("fine", low=1e-6, high=1e-5))
        parent = {"low": 0.5, "high": 1.0, "fine": 1e-6}
        children = [mutate(genes, parent, rng(n)) for n in range(2000)]
        assert all(gene.low <= child[gene.name] <= gene.high for child in children for gene in genes)
        assert {child["low"] > 0.5 for child in children} == {True, False}
        assert {child["high"] < 1.0 for child in children} == {True, False}

    def test_a_child_differs_from_its_parent(self):
        lonely = (Gene("a", low=0.0, high=1.0),)
        assert all(mutate(lonely, {"a": 1.0}, rng(n)) != {"a": 1.0} for n in range(500))

    def test_what_cannot_move_is_given_back(self):
        genes = (Gene("a", low=0.0, high=1.0), Gene("b", low=2.0, high=2.0), Gene("c", "choice", values=("x",)))
        parent = {"a": 0.0, "b": 2.0, "c": "x"}
        assert mutate(genes, parent, rng(0)) == parent
        assert not any(can_move(gene, parent[gene.name]) for gene in genes)
        assert can_move(genes[0], 0.5)

    def test_whole_numbers_move_without_bias_and_stay_whole(self):
        genes = (Gene("n", "int", 0, 1000), Gene("other", low=0.0, high=1.0))
        values = [mutate(genes, {"n": 3, "other": 0.5}, rng(n))["n"] for n in range(4000)]
        assert {type(value) for value in values} == {int}
        assert {2, 3, 4} <= set(values)
        assert np.mean(values) == pytest.approx(3, abs=0.03)
        ones = [mutate(genes, {"n": 1, "other": 0.5}, rng(n))["n"] for n in range(1000)]  # half a step is never rounded
        assert min(ones.count(0), ones.count(2)) > 15

    def test_a_choice_changes_in_one_child_of_ten(self):
        genes = (Gene("c", "choice", values=("x", "y", "z")), Gene("other", low=0.0, high=1.0))
        values = [mutate(genes, {"c": "x", "other": 0.5}, rng(n))["c"] for n in range(5000)]
        assert values.count("y") / 5000 == pytest.approx(0.05, abs=0.012)
        assert values.count("z") / 5000 == pytest.approx(0.05, abs=0.012)


class TestParents:
    def test_weights_are_the_distance_from_the_worst_and_a_little(self):
        rows = [TrialRow(0, {}, 0.5), TrialRow(1, {}, 0.3), TrialRow(2, {}, 0.2)]
        total = 0.3 + 0.1 + 3e-6
        assert parent_weights(rows) == pytest.approx([(0.3 + 1e-6) / total, (0.1 + 1e-6) / total, 1e-6 / total])

    def test_equal_rows_are_equally_likely(self):
        assert parent_weights([TrialRow(n, {}, 0.25) for n in range(4)]) == pytest.approx([0.25] * 4)

    def test_parents_are_the_five_best_in_proportion_to_their_weights(self):
        found = [parents_of(SPACE, 0, k, ROWS)[0] for k in range(1, 4001)]
        best = best_rows(ROWS, 5)
        shares = [found.count(row.trial) / 4000 for row in best]
        assert sum(shares) == 1
        assert shares == pytest.approx(list(parent_weights(best)), abs=0.03)

    def test_a_child_is_a_mutation_of_the_parent_it_names(self):
        frozen = replace(SPACE, genes=(replace(MIXED[0], gain=0.0), MIXED[1], replace(MIXED[2], gain=0.0)))
        for k in range(1, 50):
            (parent,) = parents_of(frozen, 3, k, ROWS)
            assert propose(frozen, 3, k, ROWS)["a"] == ROWS[parent].genes["a"]

    def test_failed_rows_are_never_parents(self):
        failed = [TrialRow(90 + n, START, value) for n, value in enumerate([None, math.nan, math.inf])]
        assert best_rows([*failed, *ROWS], 20) == best_rows(ROWS, 20)
        assert propose(SPACE, 0, 5, [*ROWS, *failed]) == propose(SPACE, 0, 5, ROWS)

    def test_a_row_that_was_trained_further_outranks_the_fitness_of_a_short_training(self):
        rows = [
            TrialRow(0, {}, 0.9, 1),
            TrialRow(1, {}, 0.3, 2),
            TrialRow(2, {}, None, 3),
            TrialRow(3, {}, 0.5, 2),
            TrialRow(4, {}, 0.1, 1),
        ]
        assert [row.trial for row in best_rows(rows, 5)] == [3, 1, 0, 4]

    def test_a_lower_rung_weighs_no_more_than_the_worst_of_a_higher_one(self):
        rows = [TrialRow(3, {}, 0.5, 2), TrialRow(1, {}, 0.3, 2), TrialRow(0, {}, 0.9, 1), TrialRow(4, {}, 0.1, 1)]
        total = 0.4 + 0.2 + 0.2 + 4e-6
        assert parent_weights(rows) == pytest.approx(
            [(0.4 + 1e-6) / total, (0.2 + 1e-6) / total, (0.2 + 1e-6) / total, 1e-6 / total])

    def test_a_short_trainings_luck_makes_it_no_parent(self):
        lucky = [TrialRow(20 + n, ROWS[0].genes, 9.0 + n, 1) for n in range(5)]
        whole = [row._replace(rung=2) for row in ROWS]
        for k in range(1, 50):
            assert propose(SPACE, 0, k, [*lucky, *whole]) == propose(SPACE, 0, k, ROWS)
            assert parents_of(SPACE, 0, k, [*lucky, *whole]) == parents_of(SPACE, 0, k, ROWS)

    def test_equal_fitness_ranks_by_number(self):
        assert [
            row.trial for row in best_rows([TrialRow(3, {}, 1.0), TrialRow(1, {}, 1.0), TrialRow(2, {}, 2.0)], 3)
        ] == [2, 1, 3]

    def test_without_rows_children_are_the_starts(self):
        frozen = replace(SPACE, genes=tuple(replace(gene, gain=gene.gain * (gene.name == "a")) for gene in MIXED))
        child = propose(frozen, 0, 1, [])
        assert (child["b"], child["c"]) == (START["b"], START["c"])
        assert child["a"] != START["a"]
        assert parents_of(SPACE, 0, 1, []) == ()

    def test_the_mean_parent_lies_between_the_best_by_weight(self):
        space = Space((Gene("a", low=0.0, high=10.0, gain=0.0), Gene("b", low=0.0, high=10.0)), ({"a": 1.0, "b": 1.0},),
                      parent="mean")
        rows = [
            TrialRow(0, {"a": 1.0, "b": 1.0}, 0.1),
            TrialRow(1, {"a": 4.0, "b": 1.0}, 0.4),
            TrialRow(2, {"a": 3.0, "b": 1.0}, 0.2),
        ]
        assert propose(space, 0, 3, rows)["a"] == pytest.approx((4.0 * 3 + 3.0 * 1) / 4, abs=1e-4)
        assert parents_of(space, 0, 3, rows) == (1, 2, 0)


class TestProposals:
    def test_the_first_trials_are_the_starts_unchanged(self):
        starts = ({"a": 0.123456789, "b": 3, "c": "z"}, START)
        space = replace(SPACE, starts=starts)
        assert [propose(space, 5, k, ROWS) for k in range(2)] == [dict(start) for start in starts]
        assert propose(replace(space, algorithm="random"), 5, 1, ROWS) == START

    @given(st.permutations(ROWS), st.integers(1, 1000))
    def test_the_order_of_rows_does_not_matter(self, rows, k):
        assert propose(SPACE, 0, k, rows) == propose(SPACE, 0, k, ROWS)

    @pytest.mark.parametrize("algorithm", ["evolve", "random"])
    def test_equal_arguments_give_equal_genes_and_others_give_others(self, algorithm):
        space = replace(SPACE, algorithm=algorithm)
        assert propose(space, 1, 7, ROWS) == propose(space, 1, 7, iter(ROWS))
        assert propose(space, 1, 7, ROWS) != propose(space, 2, 7, ROWS)
        assert propose(space, 1, 7, ROWS) != propose(space, 7, 1, ROWS)

    def test_known_values(self):
        """Pins the draws: a sweep begun with one version goes on with the next."""
        assert propose(SPACE, 0, 1, ROWS) == KNOWN_CHILD
        assert propose(replace(SPACE, algorithm="random"), 0, 1, ROWS) == KNOWN_DRAW

    @given(st.integers(0, 2**32 - 1), st.integers(0, 10_000))
    def test_random_draws_lie_inside(self, seed, k):
        space = replace(SPACE, algorithm="random", starts=())
        genes = propose(space, seed, k, [])
        assert 0.01 <= genes["a"] <= 0.9
        assert genes["b"] in range(21)
        assert genes["c"] in "xyz"

    def test_random_draws_are_uniform_or_uniform_in_the_logarithm(self):
        genes = (Gene("plain", low=2.0, high=6.0), Gene("log", low=1e-4, high=1.0, log=True), Gene("n", "int", 1, 4))
        draws = [propose(Space(genes, (), "random"), 0, k, []) for k in range(4000)]
        plain = np.array([draw["plain"] for draw in draws])
        log = np.log10([draw["log"] for draw in draws])
        assert np.quantile(plain, [0, 0.25, 0.5, 0.75, 1]) == pytest.approx([2, 3, 4, 5, 6], abs=0.12)
        assert np.quantile(log, [0, 0.25, 0.5, 0.75, 1]) == pytest.approx([-4, -3, -2, -1, 0], abs=0.12)
        shares = [sum(draw["n"] == n for draw in draws) / 4000 for n in range(1, 5)]
        assert shares == pytest.approx([0.25] * 4, abs=0.03)

    def test_the_first_point_of_a_grid_is_the_recipe_if_the_grid_has_it(self):
        genes = (Gene("n", "int", 1, 3), Gene("m", "choice", values=(5, 6)))
        in_order = [(1, 5), (1, 6), (2, 5), (2, 6), (3, 5), (3, 6)]
        for start, expected in (((2, 6), [(2, 6), *in_order[:3], *in_order[4:]]), ((1, 5), in_order),
                                ((3, 6), [(3, 6), *in_order[:5]]), ((2, 7), in_order)):
            space = Space(genes, (dict(zip("nm", start, strict=True)),), "grid")
            points = [tuple(propose(space, 0, k, ()).values()) for k in range(6)]
            assert points == expected

    def test_a_grid_has_every_point_once_and_ends(self):
        space = Space((Gene("n", "int", 1, 3), MIXED[2]), (START,), "grid")
        points = [propose(space, 9, k, ROWS) for k in range(grid_size(space.genes))]
        assert points[:4] == [{"n": 1, "c": "x"}, {"n": 1, "c": "y"}, {"n": 1, "c": "z"}, {"n": 2, "c": "x"}]
        assert len({tuple(point.values()) for point in points}) == len(points) == 9
        with pytest.raises(IndexError):
            propose(space, 9, 9, ROWS)

    def test_nearest_clips_rounds_and_falls_back(self):
        assert [nearest(MIXED[0], value) for value in (-1, 0.5, 7, None)] == [0.01, 0.5, 0.9, 0.01]
        assert [nearest(MIXED[1], value) for value in (2.6, 99)] == [3, 20]
        assert [nearest(MIXED[2], value) for value in ("y", "unknown")] == ["y", "x"]

    def test_evolution_climbs(self):
        """On a smooth hill, 300 children of the best reach the top from a poor start."""
        space = Space((Gene("a", low=0.001, high=1.0), Gene("b", low=0.001, high=1.0)), ({"a": 0.1, "b": 0.9},))
        rows = []
        for k in range(300):
            genes = propose(space, 0, k, rows)
            rows.append(TrialRow(k, genes, -math.log(genes["a"] / 0.4) ** 2 - math.log(genes["b"] / 0.3) ** 2))
        assert rows[0].fitness < -3
        assert best_rows(rows, 1)[0].fitness > -0.01


class TestRandomProposals:
    MIXED = replace(SPACE, random_first=3, random_share=0.4)

    def test_the_first_after_the_starts_are_as_random_search_draws_them(self):
        random = replace(SPACE, algorithm="random")
        first = len(SPACE.starts)
        for k in range(first, first + 3):
            assert propose(self.MIXED, 5, k, ROWS) == propose(random, 5, k, ROWS)
            assert parents_of(self.MIXED, 5, k, ROWS) == ()

    def test_of_the_later_ones_a_share_has_no_parents(self):
        orphans = [not parents_of(self.MIXED, 5, k, ROWS) for k in range(100, 1100)]
        assert 0.35 < sum(orphans) / 1000 < 0.45

    def test_a_child_is_one_of_its_recorded_parent(self):
        nearest = []
        for k in range(100, 200):
            if parents := parents_of(self.MIXED, 5, k, ROWS):
                child = propose(self.MIXED, 5, k, ROWS)
                nearest.append(any(child[gene.name] == row.genes[gene.name] for row in ROWS
                                   if row.trial in parents for gene in SPACE.genes))
        assert sum(nearest) > 40  # each gene stays as it is with probability 0.2

    def test_without_them_nothing_changes(self):
        assert propose(SPACE, 5, 50, ROWS) == propose(replace(SPACE, random_share=0.0), 5, 50, ROWS)
