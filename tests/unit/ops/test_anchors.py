import numpy as np
import pytest

from ray_yolo.ops.anchors import best_possible_recall, best_ratios, cluster, fit_anchors

OWN = np.array([
    [[10, 13], [16, 30], [33, 23]], [[30, 61], [62, 45], [59, 119]], [[116, 90], [156, 198], [373, 326]]], float)


def test_the_fit_is_the_worse_sides_ratio_to_the_best_anchor() -> None:
    sizes, anchors = np.array([[10.0, 20], [40, 40]]), np.array([[10.0, 10], [20, 20]])
    assert best_ratios(sizes, anchors).tolist() == [0.5, 0.5]
    assert best_ratios(anchors, anchors).tolist() == [1, 1]


def test_recall_counts_labels_within_the_factor() -> None:
    anchors = np.array([[10.0, 10]])
    sizes = np.array([[39.0, 39], [41, 10], [2.6, 10], [2.4, 10]])
    assert best_possible_recall(sizes, anchors, 4.0) == 0.5
    assert best_possible_recall(np.zeros((0, 2)), anchors, 4.0) == 1.0


def test_anchors_that_reach_the_labels_are_kept() -> None:
    assert fit_anchors(OWN, OWN.reshape(-1, 2).repeat(10, axis=0), 4.0, 0) is None


@pytest.mark.parametrize("sizes", [np.zeros((0, 2)), np.zeros((5, 2)), np.full((5, 2), 1.0)])
def test_labels_too_small_to_see_change_nothing(sizes: np.ndarray) -> None:
    assert fit_anchors(OWN, sizes, 4.0, 0) is None


def test_labels_out_of_reach_get_anchors_of_their_own() -> None:
    sizes = np.random.default_rng(0).uniform([4, 1500], [8, 3000], (300, 2))
    found = fit_anchors(OWN, sizes, 4.0, 0)
    assert found is not None
    assert found.shape == OWN.shape
    assert best_possible_recall(sizes, OWN.reshape(-1, 2), 4.0) == 0
    assert best_possible_recall(sizes, found.reshape(-1, 2), 4.0) == 1
    assert (np.diff(found.reshape(-1, 2).prod(axis=1)) >= 0).all()


def test_the_same_seed_finds_the_same_anchors() -> None:
    sizes = np.random.default_rng(0).uniform([4, 1500], [8, 3000], (100, 2))
    first, second, other = (fit_anchors(OWN, sizes, 4.0, seed) for seed in (1, 1, 2))
    assert first is not None
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_fewer_labels_than_anchors_are_enough() -> None:
    found = fit_anchors(OWN, np.array([[3.0, 2000], [2000, 3]]), 4.0, 0)
    assert found is not None
    assert best_possible_recall(np.array([[3.0, 2000], [2000, 3]]), found.reshape(-1, 2), 4.0) == 1


def test_clusters_are_found_where_the_points_are() -> None:
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.normal(centre, 1, (50, 2)) for centre in ((10, 200), (100, 20), (300, 300))])
    centres = cluster(points, 3, np.random.default_rng(3))
    assert np.allclose(centres[np.argsort(centres[:, 0])], [[10, 200], [100, 20], [300, 300]], atol=1)


def test_new_anchors_reach_more_labels_and_are_never_below_two_pixels() -> None:
    for seed in range(4):
        sizes = np.exp(np.random.default_rng(seed).uniform(0, 7, (40, 2)))
        found = fit_anchors(OWN, sizes, 2.0, seed)
        assert found is not None, seed
        assert (found >= 2).all(), seed
        before, after = (best_possible_recall(sizes, anchors.reshape(-1, 2), 2.0) for anchors in (OWN, found))
        assert after > before, seed
