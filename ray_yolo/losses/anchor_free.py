"""The loss of anchor-free predictions: classes, boxes, and the distributions of their sides' distances.

Measured as numerators and one count, so that whoever calls decides over which images a mean is taken. Nothing here
knows how many workers there are. Sources: Li et al. 2020 (arXiv:2006.04388), Feng et al. 2021 (arXiv:2108.07755), Zheng
et al. 2020 (arXiv:1911.08287).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ray_yolo.config.sections import LossConfig
from ray_yolo.losses.criterion import LossSums
from ray_yolo.ops.align import align
from ray_yolo.ops.boxes import BINS, complete_iou, expected_boxes, flatten_levels, grid_points


class Head(Protocol):
    """What the loss needs of a head."""

    strides: tuple[int, ...]  # pixels per cell of each level


class AnchorFreeLoss:
    """With w a point's target score (`ops.align`) and W the sum of all, at least 1:

        box = sum of (1 - CIoU) w / W,   cls = sum of cross-entropies of all class scores / W,
        dfl = sum of w x mean over the sides of -((l + 1 - d) log p_l + (d - l) log p_(l+1)) / W

    for a side at distance d of its point, in cells, between the bins l and l + 1.
    """

    names: tuple[str, ...] = ("box", "cls", "dfl")
    num_counts = 1

    def __init__(self, head: Head, config: LossConfig) -> None:
        self.head = head
        self._gains = torch.tensor((config.box, config.cls, config.dfl))

    def measure(self, levels: Sequence[Tensor], targets: Tensor, image_size: tuple[int, int]) -> LossSums:
        """Numerators and counts of a batch, in float32 whatever the precision of the predictions.

        Args:
            levels: raw predictions, one (B, 4 x BINS + classes, h, w) per level; B may be 0.
            targets: (n, 6) rows [image, class, x1, y1, x2, y2], pixels of the network input; n may be 0.
            image_size: (height, width) of the network input.
        """
        with torch.autocast(targets.device.type, enabled=False):
            distances, classes = flatten_levels(levels)
            places, strides = grid_points(levels, self.head.strides)
            targets = targets.float()
            boxes = expected_boxes(distances, places, strides)
            label, weight = align(boxes.detach(), classes.detach().sigmoid(), places, targets)
            truth = targets[label] if len(targets) else targets.new_zeros(*label.shape, 6)  # (B, N, 6)
            hit = truth[..., 1:2].long() == torch.arange(classes.shape[2], device=classes.device)
            cls = F.binary_cross_entropy_with_logits(classes, hit * weight[..., None], reduction="sum")
            box, dfl = self._regress(distances, boxes, truth[..., 2:], weight, places, strides)
        numerators = torch.stack((box, cls, dfl))[:, None]
        return LossSums(numerators, weight.sum().expand(3, 1))

    def terms(self, numerators: Tensor, counts: Tensor) -> Tensor:
        """(3,) box, class and distribution terms with their gains."""
        self._gains = self._gains.to(numerators.device)
        return (numerators / counts.clamp(min=1)).sum(1) * self._gains

    def _regress(self, distances: Tensor, boxes: Tensor, truth: Tensor, weight: Tensor, places: Tensor,
                 strides: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted sums of 1 - CIoU and of the distributions' cross-entropies over the assigned points."""
        sides = torch.cat((places - truth[..., :2], truth[..., 2:] - places), 2) / strides
        fields = (distances, boxes, truth, sides, weight)
        if weight.device.type != "cpu":  # to pick the assigned points would wait for it: the others have weight 0
            distances, boxes, truth, sides, weight = (field.flatten(0, 1) for field in fields)
        else:
            distances, boxes, truth, sides, weight = (field[weight > 0] for field in fields)
        box = ((1 - complete_iou(boxes, truth)) * weight).sum()
        sides = sides.clamp(0, BINS - 1 - 0.01)
        low = sides.floor()
        chances = distances.log_softmax(2)
        below, above = (chances.gather(2, (low + step).long()[..., None])[..., 0] for step in (0, 1))
        dfl = -((low + 1 - sides) * below + (sides - low) * above).mean(1)
        return box, (dfl * weight).sum()


def build_loss(head: Head, loss: LossConfig, num_classes: int, imgsz: int) -> AnchorFreeLoss:
    """The loss of a head under these gains."""
    return AnchorFreeLoss(head, loss)
