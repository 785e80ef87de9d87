"""The YOLOv5 loss: boxes, objectness and classes of anchor-based predictions.

Measured as numerators and counts per level, so that whoever calls decides over which images a mean is taken.
Nothing here knows how many workers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ray_yolo.config.sections import LossConfig
from ray_yolo.models.criterion import LossSums
from ray_yolo.ops.assign import Assignment, assign
from ray_yolo.ops.boxes import complete_iou, corners

FOCAL_ALPHA = 0.25  # weight of positive targets under the focal option; negative ones have 1 - 0.25
TINY = 1e-7  # an exponent below 1 has no gradient at 0, which float32 reaches at a logit of 17


class AnchorHead(Protocol):
    """What the loss needs of a head; read at every call, because anchors may be refitted and moved."""

    anchors: Tensor  # (levels, anchors, 2) in cells


class AnchorLoss:
    """Per level: mean of 1 - CIoU over assigned predictions, mean cross-entropy of objectness over all, and mean
    cross-entropy of classes over assigned predictions x classes (none for a single class).

    The objectness target of an assigned prediction is its CIoU with the target, not below 0 and without gradient; the
    largest if several targets claim it; 0 for all others.
    """

    names: tuple[str, ...] = ("box", "obj", "cls")

    def __init__(self, head: AnchorHead, config: LossConfig, num_classes: int, imgsz: int) -> None:
        """A loss for this head.

        Args:
            imgsz: nominal side of the network input in pixels; objectness grows with its square.
        """
        self.head = head
        self.config = config
        self.num_classes = num_classes
        self.num_counts = num_levels = len(head.anchors)
        balance = (4.0, 1.0, 0.4) if num_levels == 3 else (4.0, 1.0, 0.25, 0.06, 0.02)[:num_levels]
        gains = torch.tensor((config.box, config.obj * (imgsz / 640) ** 2, config.cls * num_classes / 80))
        self._weights = gains[:, None] * (3 / num_levels) * torch.ones(3, num_levels)
        self._weights[1] *= torch.tensor(balance)

    def measure(self, levels: Sequence[Tensor], targets: Tensor, image_size: tuple[int, int]) -> LossSums:
        """Numerators and counts of a batch, in float32 whatever the precision of the predictions.

        Args:
            levels: raw predictions, one (B, anchors, h, w, 5 + classes) per level; B may be 0.
            targets: (n, 6) rows [image, class, x1, y1, x2, y2], pixels of the network input; n may be 0.
            image_size: (height, width) of the network input.

        Returns:
            Sums whose counts depend on targets alone, and whose numerators always reach the predictions' gradients.
        """
        with torch.autocast(targets.device.type, enabled=False):
            sums = [self._measure_level(level, anchors, targets.float(), image_size)
                    for level, anchors in zip(levels, self.head.anchors.float(), strict=True)]
        return LossSums(torch.stack([n for n, _ in sums], 1), torch.stack([c for _, c in sums], 1))

    def terms(self, numerators: Tensor, counts: Tensor, progress: float = 1.0) -> Tensor:
        """(3,) box, objectness and class terms: means per level (0 where the count is 0), weighted, summed."""
        self._weights = self._weights.to(numerators.device)
        return (numerators / counts.clamp(min=1) * self._weights).sum(1)

    def _measure_level(
        self, level: Tensor, anchors: Tensor, targets: Tensor, image_size: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        num_anchors, height, width, outputs = level.shape[1:]
        found = assign(targets, anchors, (height, width), image_size, self.config.anchor_t)
        if targets.device.type == "cpu":  # a GPU would be waited for; there, what is not valid is multiplied by 0
            found = found.kept()
        # With channels last this is a view, and so is its gradient: no copy of the predictions in either direction.
        flat = level.permute(0, 2, 3, 1, 4).reshape(-1, outputs)
        cell = ((found.image * height + found.row) * width + found.column) * num_anchors + found.anchor
        picked, objectness = flat[cell].float(), flat[:, 4].float()

        valid = found.valid.float()
        overlap = complete_iou(_decode(picked[:, :4], anchors[found.anchor]), corners(found.boxes))
        box = ((1 - overlap) * valid).sum()
        best = torch.zeros_like(objectness).scatter_reduce(0, cell, overlap.detach() * valid, "amax")
        obj = self._cross_entropy(objectness, best, self.config.obj_pw).sum()
        cls, num_scores = self._classes(picked[:, 5:], found, valid)
        num_valid = valid.sum()
        counts = torch.stack((num_valid, torch.full_like(num_valid, objectness.numel()), num_scores * num_valid))
        return torch.stack((box, obj, cls)), counts

    def _classes(self, logits: Tensor, found: Assignment, valid: Tensor) -> tuple[Tensor, int]:
        """Summed cross-entropy of class scores, and how many scores each assigned prediction has in it."""
        if self.num_classes == 1:
            return logits.new_zeros(()), 0
        half = self.config.label_smoothing / 2
        hit = found.classes[:, None] == torch.arange(self.num_classes, device=logits.device)
        loss = self._cross_entropy(logits, hit * (1 - 2 * half) + half, self.config.cls_pw)
        return (loss.sum(1) * valid).sum(), self.num_classes

    def _cross_entropy(self, logits: Tensor, targets: Tensor, positive_weight: float) -> Tensor:
        """Elementwise binary cross-entropy, focal if asked for (Lin et al. 2017, arXiv:1708.02002)."""
        weight = logits.new_full((1,), positive_weight)
        loss = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weight, reduction="none")
        if self.config.fl_gamma == 0:
            return loss
        chance = logits.sigmoid()
        miss = targets * (1 - chance) + (1 - targets) * chance
        alpha = targets * FOCAL_ALPHA + (1 - targets) * (1 - FOCAL_ALPHA)
        return loss * alpha * miss.clamp(min=TINY) ** self.config.fl_gamma


def build_loss(head: AnchorHead, loss: LossConfig, num_classes: int, imgsz: int) -> AnchorLoss:
    """The loss of a head under these gains."""
    return AnchorLoss(head, loss, num_classes, imgsz)


def _decode(raw: Tensor, anchors: Tensor) -> Tensor:
    """Raw predictions (k, 4) as xyxy boxes in cells, relative to their own cell."""
    doubled = 2 * raw.sigmoid()
    return corners(torch.cat((doubled[:, :2] - 0.5, doubled[:, 2:].square() * anchors), 1))
