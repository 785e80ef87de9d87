"""Matching and average precision as the obvious loops, for comparison."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torchvision.ops import box_iou

from ray_yolo.ops.average_precision import IOU_THRESHOLDS


def slow_match(detections: Tensor, classes: Tensor, boxes: Tensor) -> list[list[bool]]:
    """Threshold by threshold: pairs by IoU, each detection's first, then each label's best detection."""
    overlaps = box_iou(detections[:, :4], boxes).tolist()
    correct = [[False] * len(IOU_THRESHOLDS) for _ in detections]
    for level, threshold in enumerate(torch.tensor(IOU_THRESHOLDS).tolist()):
        pairs = [(-overlaps[d][b], b, d) for d in range(len(detections)) for b in range(len(boxes))
                 if overlaps[d][b] >= threshold and detections[d, 5] == classes[b]]
        claim: dict[int, int] = {}
        for _, label, detection in sorted(pairs):
            claim.setdefault(detection, label)
        taken: set[int] = set()
        for detection in sorted(claim, key=lambda d: (-float(detections[d, 4]), d)):
            correct[detection][level] = claim[detection] not in taken
            taken.add(claim[detection])
    return correct


def slow_area(hits: list[bool], num_labels: int) -> float:
    """101 recalls; at each the best precision at that recall or above, linear between the points of the curve."""
    points, right = [(0.0, 1.0)], 0
    for seen, hit in enumerate(hits, start=1):
        right += hit
        points.append((right / num_labels, right / seen))
    points.append((1.0, 0.0))
    best = [max(p for _, p in points[i:]) for i in range(len(points))]

    def value(recall: float) -> float:
        last = max(i for i, (r, _) in enumerate(points) if r <= recall)
        if last == len(points) - 1 or points[last][0] == recall:
            return best[last]
        (low, _), (high, _) = points[last], points[last + 1]
        return best[last] + (best[last + 1] - best[last]) * (recall - low) / (high - low)

    values = [value(i / 100) for i in range(101)]
    return sum((a + b) / 2 * 0.01 for a, b in pairwise(values))
