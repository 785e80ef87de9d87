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
from ray_yolo.models.criterion import LossSums
from ray_yolo.ops.assign import ONE_TO_MANY, AlignRule, align
from ray_yolo.ops.boxes import complete_iou, expected_boxes, flatten_levels, grid_points


class DistributionHead(Protocol):
    """What the loss needs of a head."""

    strides: tuple[int, ...]  # pixels per cell of each level
    bins: int  # outputs for each side's distance


class AnchorFreeLoss:
    """With w a point's target score (`ops.align`) and W the sum of all, at least 1:

        box = sum of (1 - CIoU) w / W,   cls = sum of cross-entropies of all class scores / W,
        dfl = sum of w x mean over the sides of -((l + 1 - d) log p_l + (d - l) log p_(l+1)) / W

    for a side at distance d of its point, in cells, between the bins l and l + 1.
    """

    names: tuple[str, ...] = ("box", "cls", "dfl")
    def __init__(self, head: DistributionHead, config: LossConfig) -> None:
        self.head = head
        self.rules: tuple[AlignRule, ...] = (ONE_TO_MANY,)  # of each set of predictions
        self.num_counts = 1
        self._gains = torch.tensor((config.box, config.cls, config.dfl))

    def measure(self, levels: Sequence[Tensor], targets: Tensor, image_size: tuple[int, int]) -> LossSums:
        """Numerators and counts of a batch, in float32 whatever the precision of the predictions.

        Args:
            levels: raw predictions, for each set one (B, 4 x bins + classes, h, w) per level; B may be 0.
            targets: (n, 6) rows [image, class, x1, y1, x2, y2], pixels of the network input; n may be 0.
            image_size: (height, width) of the network input.
        """
        count = len(levels) // len(self.rules)
        with torch.autocast(targets.device.type, enabled=False):
            sums = [self._measure_set(levels[number * count : (number + 1) * count], targets.float(), image_size, rule)
                    for number, rule in enumerate(self.rules)]
        return LossSums(torch.stack([numerators for numerators, _ in sums], 1),
                        torch.stack([weight.expand(3) for _, weight in sums], 1))

    def terms(self, numerators: Tensor, counts: Tensor, progress: float = 1.0) -> Tensor:
        """(3,) box, class and distance terms with their gains."""
        self._gains = self._gains.to(numerators.device)
        return (numerators / counts.clamp(min=1)).sum(1) * self._gains

    def _measure_set(self, levels: Sequence[Tensor], targets: Tensor, image_size: tuple[int, int], rule: AlignRule
                     ) -> tuple[Tensor, Tensor]:
        """Numerators (3,) of a set of predictions, and the sum of its weights."""
        distances, classes = flatten_levels(levels, self.head.bins)
        places, strides = grid_points(levels, self.head.strides)
        boxes = expected_boxes(distances, places, strides)
        label, weight = align(boxes.detach(), classes.detach().sigmoid(), places, targets, rule)
        truth = targets[label] if len(targets) else targets.new_zeros(*label.shape, 6)  # (B, N, 6)
        hit = truth[..., 1:2].long() == torch.arange(classes.shape[2], device=classes.device)
        cls = F.binary_cross_entropy_with_logits(classes, hit * weight[..., None], reduction="sum")
        sides = torch.cat((places - truth[..., 2:4], truth[..., 4:] - places), 2) / strides
        fields = (distances, boxes, truth[..., 2:], sides, strides.expand_as(weight[..., None]), weight)
        if weight.device.type != "cpu":  # to pick the assigned points would wait for it: the others have weight 0
            picked = [field.flatten(0, 1) for field in fields]
        else:
            picked = [field[weight > 0] for field in fields]
        distances, boxes, boxes_truth, sides, cells, weights = picked
        box = ((1 - complete_iou(boxes, boxes_truth)) * weights).sum()
        far = (self._distance_loss(distances, sides, cells, image_size) * weights).sum()
        return torch.stack((box, cls, far)), weight.sum()

    def _distance_loss(self, distances: Tensor, sides: Tensor, cells: Tensor, image_size: tuple[int, int]) -> Tensor:
        """(n,) cross-entropies of the distributions with the true distances `sides` (n, 4), in cells of the point."""
        sides = sides.clamp(0, self.head.bins - 1 - 0.01)
        low = sides.floor()
        chances = distances.log_softmax(2)
        below, above = (chances.gather(2, (low + step).long()[..., None])[..., 0] for step in (0, 1))
        return -((low + 1 - sides) * below + (sides - low) * above).mean(1)


class EndToEndLoss(AnchorFreeLoss):
    """The losses of both heads of `EndToEnd`, each with an assignment of its own: m one-to-many + (1 - m) one-to-one,
    m falling from 0.8 to 0.1 as training goes on. In place of dfl:

        l1 = sum of w x mean over the sides of |p - d| / side of the network input / W

    for a side predicted at p and true at d pixels from its point. Source: Wang et al. 2024 (arXiv:2405.14458).
    """

    names: tuple[str, ...] = ("box", "cls", "l1")

    def __init__(self, head: DistributionHead, config: LossConfig) -> None:
        super().__init__(head, config)
        floor = float(sorted(head.strides)[1])  # smaller labels would often have no point
        self.rules = (AlignRule(floor=floor), AlignRule(top=7, keep=1, floor=floor))
        self.num_counts = 2

    def terms(self, numerators: Tensor, counts: Tensor, progress: float = 1.0) -> Tensor:
        """(3,) terms with their gains."""
        many = 0.1 + 0.7 * (1 - progress)
        return super().terms(numerators * numerators.new_tensor((many, 1 - many)), counts, progress)

    def _distance_loss(self, distances: Tensor, sides: Tensor, cells: Tensor, image_size: tuple[int, int]) -> Tensor:
        height, width = image_size
        apart = (distances[..., 0] - sides).abs() * cells
        return (apart / apart.new_tensor((width, height, width, height))).mean(1)


def build_loss(head: DistributionHead, loss: LossConfig, num_classes: int, imgsz: int) -> AnchorFreeLoss:
    """The loss of a head under these gains."""
    return AnchorFreeLoss(head, loss)


def build_end_to_end_loss(head: DistributionHead, loss: LossConfig, num_classes: int, imgsz: int) -> EndToEndLoss:
    """The same for a pair of heads."""
    return EndToEndLoss(head, loss)
