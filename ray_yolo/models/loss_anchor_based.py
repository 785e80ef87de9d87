"""The YOLOv5 loss of the anchor-based head: boxes, objectness and classes, as sums that do not depend on the worker
count.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from ray_yolo.config.sections import LossConfig
from ray_yolo.models.criterion import LossSums
from ray_yolo.models.heads import Detect
from ray_yolo.ops.assign import Assignment, assign, selects_pairs
from ray_yolo.ops.boxes import complete_iou, corners

FOCAL_ALPHA = 0.25  # weight of positive targets with focal loss; that of negative ones is 1 - 0.25
TINY = 1e-7  # powers below 1 have no gradient at 0, which float32 reaches at a logit of 17


class AnchorLoss:
    """The terms of each level:

    | term | mean of | over |
    |---|---|---|
    | box | 1 - CIoU | assigned predictions |
    | obj | cross-entropy of objectness | all predictions |
    | cls | cross-entropy of classes | assigned predictions x classes (nothing with a single class) |

    The objectness target of an assigned prediction is its CIoU with the target, clamped at 0, without gradient, and the
    largest of several targets. It is 0 for other predictions.
    """

    names: tuple[str, ...] = ("box", "obj", "cls")

    def __init__(self, head: Detect, config: LossConfig, num_classes: int, imgsz: int) -> None:
        """`imgsz`: nominal side of the network input in pixels; the gain of objectness grows with its square."""
        self.head = head  # its anchors are read at every call, because they may be refitted or moved
        self.config = config
        self.num_classes = num_classes
        self.num_counts = num_levels = len(head.anchors)
        balance = (4.0, 1.0, 0.4) if num_levels == 3 else (4.0, 1.0, 0.25, 0.06, 0.02)[:num_levels]
        gains = torch.tensor((config.box, config.obj * (imgsz / 640) ** 2, config.cls * num_classes / 80))
        self._weights = gains[:, None] * (3 / num_levels) * torch.ones(3, num_levels)
        self._weights[1] *= torch.tensor(balance)
        self._grids: dict[tuple[tuple[int, ...], ...], Tensor] = {}  # grids by their shapes

    def measure(self, levels: Sequence[Tensor], targets: Tensor, image_size: tuple[int, int]) -> LossSums:
        """As `Criterion.measure`; `levels` are (B, anchors, h, w, 5 + classes)."""
        with torch.autocast(targets.device.type, enabled=False):
            return self._measure(levels, targets.float(), image_size)

    def terms(self, numerators: Tensor, counts: Tensor, progress: float = 1.0) -> Tensor:
        """(3,) box, objectness and class terms: means per level (0 where the count is 0), weighted, summed."""
        self._weights = self._weights.to(numerators.device)
        return (numerators / counts.clamp(min=1) * self._weights).sum(1)

    def _measure(self, levels: Sequence[Tensor], targets: Tensor, image_size: tuple[int, int]) -> LossSums:
        """All levels are computed together, and summed one by one."""
        grids = self._grids_of(levels)
        assignment = assign(targets, self.head.anchors.float(), grids, image_size, self.config.anchor_t)
        if selects_pairs(targets.device):  # on a GPU selection would synchronise; `valid` masks the others there
            assignment = assignment.kept()
        # With channels last the predictions and their gradient are views: no copy in either direction.
        flat = [level.permute(0, 2, 3, 1, 4).reshape(-1, level.shape[4]) for level in levels]
        own = assignment.prediction.split(assignment.sizes)
        picked = torch.cat([outputs[index] for outputs, index in zip(flat, own, strict=True)]).float()
        objectness = torch.cat([outputs[:, 4] for outputs in flat]).float()
        doubled = 2 * picked[:, :4].sigmoid()  # boxes in cells, relative to their own cell
        boxes = torch.cat((doubled[:, :2] - 0.5, doubled[:, 2:].square() * assignment.anchors), 1)

        valid = assignment.valid.float()
        overlap = complete_iou(corners(boxes), corners(assignment.boxes))
        box = (1 - overlap) * valid
        num_predictions = [len(outputs) for outputs in flat]
        firsts = accumulate(num_predictions[:-1], initial=0)  # each level's first place in `objectness`
        places = torch.cat([index + first for index, first in zip(own, firsts, strict=True)])
        best = torch.zeros_like(objectness).scatter_reduce(0, places, overlap.detach() * valid, "amax")
        obj = self._cross_entropy(objectness, best, self.config.obj_pw)
        cls, num_scores = self._class_loss(picked[:, 5:], assignment, valid)

        num_valid = _sums(valid, assignment.sizes)
        counts = torch.stack((num_valid, grids.prod(1) * (len(levels[0]) * levels[0].shape[1]), num_scores * num_valid))
        sums = torch.stack((_sums(box, assignment.sizes), _sums(obj, num_predictions), _sums(cls, assignment.sizes)))
        return LossSums(sums, counts)

    def _grids_of(self, levels: Sequence[Tensor]) -> Tensor:
        """(levels, 2) heights and widths, float32, on the device of the levels. Copied once for each shape."""
        shapes = tuple(tuple(level.shape[2:4]) for level in levels)
        device = levels[0].device
        if shapes not in self._grids or self._grids[shapes].device != device:
            self._grids[shapes] = torch.tensor(shapes, dtype=torch.float32).to(device, non_blocking=True)
        return self._grids[shapes]

    def _class_loss(self, logits: Tensor, assignment: Assignment, valid: Tensor) -> tuple[Tensor, int]:
        """(k,) summed cross-entropies of class scores, and the number of scores per assigned prediction."""
        if self.num_classes == 1:
            return torch.zeros_like(valid), 0
        half = self.config.label_smoothing / 2
        hit = assignment.classes[:, None] == torch.arange(self.num_classes, device=logits.device)
        loss = self._cross_entropy(logits, hit * (1 - 2 * half) + half, self.config.cls_pw)
        return loss.sum(1) * valid, self.num_classes

    def _cross_entropy(self, logits: Tensor, targets: Tensor, positive_weight: float) -> Tensor:
        """Elementwise binary cross-entropy, or focal loss with fl_gamma > 0 (Lin et al. 2017, arXiv:1708.02002)."""
        weight = logits.new_full((1,), positive_weight)
        loss = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weight, reduction="none")
        if self.config.fl_gamma == 0:
            return loss
        probability = logits.sigmoid()
        miss = targets * (1 - probability) + (1 - targets) * probability
        alpha = targets * FOCAL_ALPHA + (1 - targets) * (1 - FOCAL_ALPHA)
        return loss * alpha * miss.clamp(min=TINY) ** self.config.fl_gamma


def _sums(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """(levels,) sums of consecutive parts of these sizes."""
    return torch.stack([part.sum() for part in values.split(list(sizes))])
