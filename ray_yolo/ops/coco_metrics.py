"""The twelve metrics of the COCO protocol, as pycocotools computes them.

Matching depends only on the order of scores within an image and class. All images and classes are therefore matched in
parallel, one rank of detections after the other. Only pairs that overlap by half take part. This needs a few array
passes instead of a loop over images, classes, areas and thresholds.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ray_yolo.ops.average_precision import RECALLS, Floats, Ints

Bools = NDArray[np.bool_]

THRESHOLDS = np.linspace(0.5, 0.95, 10)
AREAS = ((0.0, 1e10), (0.0, 32.0**2), (32.0**2, 96.0**2), (96.0**2, 1e10))  # all, small, medium, large; square pixels
LIMITS = (1, 10, 100)  # detections per image and class
PAIRS_AT_ONCE = 1 << 18  # limits the memory of overlaps, which then fit in the CPU cache


class Detected(NamedTuple):
    """The detections of a dataset, in any order; ties of scores within an image keep their order."""

    images: Ints  # (n,) numbers of the images, from 0
    classes: Ints  # (n,)
    scores: Floats  # (n,)
    boxes: Floats  # (n, 4) xyxy


class Labelled(NamedTuple):
    """The labels of a dataset."""

    images: Ints  # (m,)
    classes: Ints  # (m,)
    boxes: Floats  # (m, 4) xyxy
    areas: Floats  # (m,) from the annotation file, else of the boxes; for the classes small, medium and large
    crowd: Bools  # (m,) regions in which detections are ignored


class CocoMetrics(NamedTuple):
    """Average precision and average recall; -1 without labels in the area range."""

    ap: float
    ap50: float
    ap75: float
    ap_small: float
    ap_medium: float
    ap_large: float
    ar1: float
    ar10: float
    ar100: float
    ar_small: float
    ar_medium: float
    ar_large: float


class _Pairs(NamedTuple):
    """Pairs of a detection and a label of the same image and class that overlap by the lowest threshold.

    Sorted by detection, then by rising overlap, then by label.
    """

    rows: Ints  # (p,) of the detections
    labels: Ints  # (p,)
    overlaps: Floats  # (p,)


class _Matches(NamedTuple):
    """Results of the detections that occur in a pair."""

    rows: Ints  # (k,) rising
    matched: Bools  # (k, areas, thresholds) matched a label
    counted: Bools  # (k, areas, thresholds) matched a label that is not ignored


def coco_metrics(found: Detected, truth: Labelled) -> CocoMetrics:
    """The twelve COCO metrics of a dataset: IoU 0.50:0.05:0.95, four areas, 1, 10 and 100 detections per class."""
    # A group is an image and a class. Labels are sorted by group, detections by group and falling score.
    num_images = 1 + max(int(found.images.max(initial=0)), int(truth.images.max(initial=0)))
    label_groups = truth.classes * num_images + truth.images
    order = label_groups.argsort(kind="stable")
    truth = Labelled._make(column[order] for column in truth)
    label_groups = label_groups[order]

    groups = found.classes * num_images + found.images
    order = np.lexsort((-found.scores, groups))
    rank = _rank(groups[order])
    within_limit = rank < LIMITS[-1]
    order, rank = order[within_limit], rank[within_limit]
    found = Detected._make(column[order] for column in found)
    groups = groups[order]

    ignored = truth.crowd[:, None] | _outside(truth.areas)
    matches = _match(_pairs(found, truth, groups, label_groups), groups, truth.crowd, ignored)
    return _summary(found, rank, matches, truth.classes, ~ignored)


def _rank(groups: Ints) -> Ints:
    """Position of each entry among its equal neighbours: 0, 1, 2, ..."""
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    return np.arange(len(groups)) - np.repeat(starts, np.diff(starts, append=len(groups)))


def _outside(areas: Floats) -> Bools:
    """(n, areas): whether an area is outside each range."""
    low, high = np.array(AREAS).T
    return (areas[:, None] < low) | (areas[:, None] > high)


def _box_areas(boxes: Floats) -> Floats:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def _overlaps(a: Floats, b: Floats, crowd: Bools) -> Floats:
    """IoU of pairs of boxes; for a crowd region the share of `a` that is inside."""
    sides = np.minimum(a[:, 2:], b[:, 2:]) - np.maximum(a[:, :2], b[:, :2])
    both = np.where((sides > 0).all(axis=1), sides[:, 0] * sides[:, 1], 0.0)
    either = _box_areas(a) + np.where(crowd, 0.0, _box_areas(b) - both)
    return np.divide(both, either, out=both, where=both > 0)


def _pairs(found: Detected, truth: Labelled, groups: Ints, label_groups: Ints) -> _Pairs:
    """The pairs of all detections and labels, each with the number of its group."""
    first = np.searchsorted(label_groups, groups)  # for each detection, its group's first label
    counts = np.searchsorted(label_groups, groups, side="right") - first  # and the number of its group's labels
    with_labels = np.flatnonzero(counts)
    parts = []
    for part in np.array_split(with_labels, 1 + int(counts.sum()) // PAIRS_AT_ONCE):
        rows = np.repeat(part, counts[part])
        labels = first[rows] + _rank(rows)
        overlaps = _overlaps(found.boxes[rows], truth.boxes[labels], truth.crowd[labels])
        near = overlaps >= THRESHOLDS[0]
        parts.append(_Pairs(rows[near], labels[near], overlaps[near]))
    pairs = _Pairs._make(np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((pairs.labels, pairs.overlaps, pairs.rows))
    return _Pairs._make(column[order] for column in pairs)


def _match(pairs: _Pairs, groups: Ints, crowd: Bools, ignored: Bools) -> _Matches:
    """Match every detection, best score first, with the free label that it overlaps most.

    Ignored labels come last; crowd regions are matched any number of times. In each iteration an image and class has at
    most one detection, so there are no conflicts.
    """
    rows, which = np.unique(pairs.rows, return_inverse=True)
    turns = _rank(groups[rows])[which]
    order = turns.argsort(kind="stable")
    labels, which = pairs.labels[order], which[order]
    reaches = pairs.overlaps[order, None, None] >= THRESHOLDS  # (p, 1, thresholds)
    matched = np.zeros((len(rows), len(AREAS), len(THRESHOLDS)), dtype=np.bool_)
    counted = matched.copy()
    free = np.ones((len(crowd), *matched.shape[1:]), dtype=np.bool_)
    starts = np.flatnonzero(np.diff(turns[order], prepend=-1)).tolist()
    for start, end in pairwise([*starts, len(order)]):
        label, detection = labels[start:end], which[start:end]
        num = end - start
        # Later pairs of a detection overlap more, so the pair of highest value is its match. The value is the pair's
        # position in this turn, plus `num` if the label is not ignored; -1 if it cannot match.
        position = np.arange(num)[:, None, None] + num * ~ignored[label, :, None]
        value = np.where(reaches[start:end] & (free[label] | crowd[label, None, None]), position, -1)
        firsts = np.flatnonzero(np.diff(detection, prepend=-1))
        best = np.maximum.reduceat(value, firsts, axis=0)  # (detections of the turn, areas, thresholds)
        matched[detection[firsts]] = best >= 0
        counted[detection[firsts]] = best >= num
        hit = np.nonzero(best >= 0)
        free[label[best[hit] % num], hit[1], hit[2]] = False
    return _Matches(rows, matched, counted)


def _summary(found: Detected, rank: Ints, matches: _Matches, true_classes: Ints, counting: Bools) -> CocoMetrics:
    """The means over classes and thresholds.

    Args:
        rank: (n,) position of each detection in its group, from 0, best score first.
        counting: (m, areas), whether a label counts in an area.
    """
    classes = np.unique(true_classes)
    precision = np.full((len(classes), len(AREAS), len(THRESHOLDS)), np.nan)
    recall = np.full((len(LIMITS), len(classes), len(AREAS), len(THRESHOLDS)), np.nan)
    inside = ~_outside(_box_areas(found.boxes))
    for index, number in enumerate(classes):
        low, high = np.searchsorted(found.classes, [number, number + 1])
        part = slice(*np.searchsorted(matches.rows, [low, high]))
        order = (-found.scores[low:high]).argsort(kind="stable")
        position = order.argsort()[matches.rows[part] - low]
        by_score = position.argsort()
        num_labels = counting[true_classes == number].sum(axis=0)
        for area in np.flatnonzero(num_labels):
            matched, counted = matches.matched[part, area], matches.counted[part, area]
            seen = inside[low:high, area][order]
            precision[index, area] = _precision(
                matched[by_score], counted[by_score], seen, position[by_score], int(num_labels[area]))
            for level, limit in enumerate(LIMITS):
                right = counted[rank[matches.rows[part]] < limit].sum(axis=0)
                recall[level, index, area] = right / num_labels[area]
    return CocoMetrics(
        ap=_mean(precision[:, 0]),
        ap50=_mean(precision[:, 0, 0]),
        ap75=_mean(precision[:, 0, 5]),
        ap_small=_mean(precision[:, 1]),
        ap_medium=_mean(precision[:, 2]),
        ap_large=_mean(precision[:, 3]),
        ar1=_mean(recall[0, :, 0]),
        ar10=_mean(recall[1, :, 0]),
        ar100=_mean(recall[2, :, 0]),
        ar_small=_mean(recall[2, :, 1]),
        ar_medium=_mean(recall[2, :, 2]),
        ar_large=_mean(recall[2, :, 3]),
    )


def _precision(matched: Bools, counted: Bools, inside: Bools, position: Ints, num_labels: int) -> Floats:
    """(thresholds,) mean over 101 recalls of the highest precision at that recall or above, for one class and area.

    Only true positives, which all occur in pairs, can be corners of the curve. Of the other detections, only the number
    matters. An unmatched detection is a false positive if its area is `inside`; a detection with an ignored label is
    left out.

    Args:
        matched, counted: (k, thresholds) of the detections in pairs, by falling score.
        inside: (n,) of all detections of the class, by falling score.
        position: (k,) positions of the k detections among the n.
    """
    if not len(matched):
        return np.zeros(len(THRESHOLDS))
    own = inside[position, None]
    seen = inside.cumsum()[position, None] + np.where(matched, counted.astype(np.int64) - own, 0).cumsum(axis=0)
    right = counted.cumsum(axis=0)
    precision = np.divide(right, seen, out=np.zeros(right.shape), where=counted)
    highest = np.maximum.accumulate(precision[::-1])[::-1]
    means = []
    for level in range(len(THRESHOLDS)):
        at = np.searchsorted(right[:, level] / num_labels, RECALLS)
        means.append(highest[at[at < len(highest)], level].sum() / len(RECALLS))
    return np.array(means)


def _mean(values: Floats) -> float:
    """Mean of the defined values; -1, as in the protocol, if there are none."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else -1.0
