"""The Gaussian process over genes and rungs, and its proposals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_yolo.tune.evolution import Gene, draw
from ray_yolo.tune.surrogate import (
    MOST,
    Observation,
    decode,
    encode,
    fit_surrogate,
    noise_covariance,
    propose_place,
    select,
)

GENES = (Gene("a", low=0.001, high=1.0, log=True), Gene("b", "int", low=1, high=9), Gene("c", low=-1.0, high=1.0),
         Gene("d", "choice", values=("x", "y", "z")), Gene("e", low=2.0, high=2.0))


def value(genes, level=1):
    return (0.5 + level / 2) * np.exp(-(encode(GENES, genes)[0] - 0.7) ** 2 * 4 - genes["c"] ** 2)


def observations(count, rng):
    for number in range(count):
        genes = {gene.name: draw(gene, rng.random()) for gene in GENES}
        for level in range(1 + (number % 2)):
            yield Observation(encode(GENES, genes), level, value(genes, level) * (1 + 0.03 * rng.standard_normal()))


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=5, max_size=5))
def test_a_place_and_its_genes_are_the_same(chances):
    genes = {gene.name: draw(gene, chance) for gene, chance in zip(GENES, chances, strict=True)}
    again = decode(GENES, encode(GENES, genes))
    assert again == {name: pytest.approx(each, rel=1e-4, abs=1e-4) if isinstance(each, float) else each
                     for name, each in genes.items()}


@given(st.integers(0, 2**32), st.integers(2, 12), st.booleans())
@settings(max_examples=20, deadline=None)
def test_proposals_are_in_the_space_and_repeatable(seed, count, some_fail):
    seen = list(observations(count, np.random.default_rng(seed)))
    if some_fail:
        seen = [row._replace(fitness=None) if n % 3 == 1 else row for n, row in enumerate(seen)]
    first, again = (propose_place(fit_surrogate(seen, 2), GENES, np.array([seen[0].place]), seen[-1:],
                                  np.random.default_rng(seed)) for _ in range(2))
    assert first == again
    assert all(gene.low <= first[gene.name] <= gene.high for gene in GENES if gene.kind != "choice")
    assert isinstance(first["b"], int)
    assert first["d"] in ("x", "y", "z")


def test_it_knows_where_whole_trainings_are_good():
    rng = np.random.default_rng(0)
    surrogate = fit_surrogate(list(observations(40, rng)), 2)
    others = [{gene.name: draw(gene, rng.random()) for gene in GENES} for _ in range(100)]
    expected = surrogate.predict(np.array([encode(GENES, genes) for genes in others]))[0]
    assert np.corrcoef(expected, [value(genes) for genes in others])[0, 1] > 0.9
    assert 0.01 < surrogate.noise < 0.1


def test_the_gain_of_one_place_over_another_and_its_deviation():
    surrogate = fit_surrogate(list(observations(40, np.random.default_rng(0))), 2)
    good, poor = ({"a": a, "b": 5, "c": c, "d": "x", "e": 2.0} for a, c in ((0.1, 0.0), (0.01, 0.6)))
    gain, deviation = surrogate.gain(encode(GENES, good), encode(GENES, poor))
    assert gain == pytest.approx(value(good) - value(poor), abs=0.1)
    assert 0 < deviation < 0.1
    assert surrogate.gain(encode(GENES, poor), encode(GENES, good)) == pytest.approx((-gain, deviation))
    assert surrogate.gain(encode(GENES, good), encode(GENES, good)) == pytest.approx((0, 0), abs=1e-6)


def test_the_rungs_of_one_training_share_their_noise():
    points, levels = np.array([[0.2], [0.2], [0.5]]), np.array([0, 1, 1])
    covariance = [[0.04, 0.042, 0], [0.042, 0.09, 0], [0, 0, 0.09]]  # deviations 0.2 and 0.3, 0.7 in common
    assert noise_covariance(points, levels, np.array([0.04, 0.09])) == pytest.approx(np.array(covariance))


def test_it_avoids_what_failed_and_what_is_running():
    rng = np.random.default_rng(1)
    seen = list(observations(20, rng))
    surrogate, top = fit_surrogate(seen, 2), np.array([max(seen, key=lambda row: (row.level, row.fitness)).place])
    first = propose_place(surrogate, GENES, top, [], np.random.default_rng(0))
    busy = [Observation(encode(GENES, first), 1, None)]
    assert propose_place(surrogate, GENES, top, busy, np.random.default_rng(0)) != first
    place = encode(GENES, first)
    failed = fit_surrogate([*seen, *[Observation(place, 0, None)] * 3], 2)
    assert failed.predict(np.array([place]))[0] < surrogate.predict(np.array([place]))[0]


def test_the_process_keeps_the_default_and_the_best_results_however_many_come():
    default = Observation((0.5,), 1, 0.01)
    best = [Observation((0.9, number), 1, 0.9 + number / 100) for number in range(5)]
    failed = Observation((0.2,), 0, None)
    others = [Observation((0.1, number), 0, 0.5) for number in range(3 * MOST)]
    kept = select([default, *best, failed, *others])
    assert len(kept) == MOST
    assert kept[:6] == [default, *best]
    assert failed not in kept
    assert kept[-1] == others[-1]
    assert select(others[:MOST]) == others[:MOST]


def test_a_small_space_repeats_the_default_more_often_than_there_are_places():
    default = [Observation((0.5,), 1, 0.5)] * 150
    others = [Observation((0.25,), 1, 0.4)] * 100
    kept = select([*default, *others])
    assert len(kept) == MOST
    assert kept.count(default[0]) == kept.count(others[0]) == MOST // 2
