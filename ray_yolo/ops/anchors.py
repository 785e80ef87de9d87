"""Anchor fitting: how well anchors fit the labels, and better ones. Sizes are (width, height), pixels of the input."""

from __future__ import annotations

import numpy as np

from ray_yolo.ops.seeding import Stream, generator

GOOD_RECALL = 0.98
_JITTER = 0.1
_MIN_SIDE_PX = 2.0
_MAX_LABELS = 5_000  # enough for a dozen anchors; more only cost time
_ROUNDS = 30
_MUTATIONS = 1000
_MUTATED_SHARE, _SIGMA = 0.9, 0.1


def best_ratios(sizes: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """Fit of the best anchor for each label: (n,) in 0..1 from sizes (n, 2) and anchors (k, 2).

    The fit of a pair is the smaller of min(r, 1/r) over both sides, r = label / anchor.
    """
    ratios = sizes[:, None] / anchors[None]  # (n, k, 2)
    return np.minimum(ratios, 1 / ratios).min(axis=2).max(axis=1)


def best_possible_recall(sizes: np.ndarray, anchors: np.ndarray, anchor_t: float) -> float:
    """Share of labels that are assigned to at least one anchor; 1 without labels."""
    return float((best_ratios(sizes, anchors) > 1 / anchor_t).mean()) if len(sizes) else 1.0


def fit_anchors(anchors: np.ndarray, sizes: np.ndarray, anchor_t: float, seed: int) -> np.ndarray | None:
    """Anchors with a higher best possible recall than the given ones, by ascending area, float64.

    The candidates are k-means centres of the labels, improved by 1000 random mutations.

    Args:
        anchors: (levels, anchors per level, 2) pixels.
        sizes: (n, 2) label sizes, scaled so that the image's long side equals the network input.
        anchor_t: largest ratio of sides between a label and its anchor.

    Returns:
        None if the recall of the given ones is above 0.98, or not improved.
    """
    sizes = sizes[(sizes > 0).all(axis=1)].astype(np.float64)
    rng = generator(Stream.ANCHORS, seed)
    sizes = sizes * rng.uniform(1 - _JITTER, 1 + _JITTER, (len(sizes), 1))
    own = anchors.reshape(-1, 2).astype(np.float64)
    recall = best_possible_recall(sizes, own, anchor_t)
    visible = sizes[(sizes >= _MIN_SIDE_PX).any(axis=1)]
    if recall > GOOD_RECALL or not len(visible):
        return None
    if len(visible) > _MAX_LABELS:
        visible = rng.choice(visible, _MAX_LABELS, replace=False)
    fitted = _mutate(visible, np.maximum(cluster(visible, len(own), rng), _MIN_SIDE_PX), anchor_t, rng)
    fitted = fitted[np.argsort(fitted.prod(axis=1), kind="stable")].round(2)
    return fitted.reshape(anchors.shape) if best_possible_recall(sizes, fitted, anchor_t) > recall else None


def cluster(points: np.ndarray, num_centres: int, rng: np.random.Generator) -> np.ndarray:
    """k-means centres (k, 2) of points (n, 2), with both axes normalised to unit standard deviation."""
    deviation = np.maximum(points.std(axis=0), 1e-9)
    white = points / deviation
    centres = rng.choice(white, num_centres, replace=len(white) < num_centres)
    for _ in range(_ROUNDS):
        nearest = np.square(white[:, None] - centres[None]).sum(axis=2).argmin(axis=1)
        for number in np.unique(nearest):  # a centre without points does not move
            centres[number] = white[nearest == number].mean(axis=0)
    return centres * deviation


def _mutate(sizes: np.ndarray, anchors: np.ndarray, anchor_t: float, rng: np.random.Generator) -> np.ndarray:
    """Hill climbing on the fitness: the mean fit of the labels, 0 for unassigned ones."""
    def measure(anchors: np.ndarray) -> float:
        fits = best_ratios(sizes, anchors)
        return float((fits * (fits > 1 / anchor_t)).mean())

    best, fitness = anchors, measure(anchors)
    for _ in range(_MUTATIONS):
        chosen = rng.random(best.shape) < _MUTATED_SHARE
        factors = np.clip(1 + chosen * rng.random() * rng.standard_normal(best.shape) * _SIGMA, 0.3, 3.0)
        child = np.maximum(best * factors, _MIN_SIDE_PX)
        if (score := measure(child)) > fitness:
            best, fitness = child, score
    return best
