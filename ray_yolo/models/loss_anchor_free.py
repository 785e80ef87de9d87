"""The losses of the anchor-free heads: boxes, classes and distances, as sums that do not depend on the worker count.

Sources: Li et al. 2020 (arXiv:2006.04388), Feng et al. 2021 (arXiv:2108.07755), Zheng et al. 2020 (arXiv:1911.08287),
Wang et al. 2024 (arXiv:2405.14458).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ray_yolo.config.sections import LossConfig
from ray_yolo.models.criterion import LossSums
from ray_yolo.models.heads import AnchorFree
from ray_yolo.ops.assign import AlignRule, align, selects_pairs
from ray_yolo.ops.boxes import complete_iou, expected_boxes, flatten_levels, grid_points


class AnchorFreeLoss:
    """With w the target score of a point (`ops.assign.align`) and W the sum of all, at least 1:

        box = sum of (1 - CIoU) w / W,   cls = sum of cross-entropies of all class scores / W,
        dfl = sum of w x mean over the sides of -((l + 1 - d) log p_l + (d - l) log p_(l+1)) / W

    for a side at distance d from its point, in cells, between the bins l and l + 1. With `small_labels`, sides below
    the second stride count as that long when candidates are chosen: without it most labels below 6 px have no point.
    """

    names: tuple[str, ...] = ("box", "cls", "dfl")

    def __init__(self, head: AnchorFree, config: LossConfig, *, small_labels: bool = False) -> None:
        self.head = head
        floor = float(sorted(head.strides)[:2][-1]) if small_labels else 0.0
        self.rules: tuple[AlignRule, ...] = (AlignRule(floor=floor),)  # one for each head
        self.num_counts = 1
        self._gains = torch.tensor((config.box, config.cls, config.dfl))

    def measure(self, levels: Sequence[Tensor], targets: Tensor, image_size: tuple[int, int]) -> LossSums:
        """As `Criterion.measure`; `levels` are (B, 4 x bins + classes, h, w), those of one head after the other."""
        levels_per_head = len(levels) // len(self.rules)
        numerators, counts = [], []
        with torch.autocast(targets.device.type, enabled=False):
            for number, rule in enumerate(self.rules):
                first = number * levels_per_head
                own = levels[first:first + levels_per_head]
                sums, weight = self._measure_head(own, targets.float(), image_size, rule)
                numerators.append(sums)
                counts.append(weight.expand(3))
        return LossSums(torch.stack(numerators, 1), torch.stack(counts, 1))

    def terms(self, numerators: Tensor, counts: Tensor, progress: float = 1.0) -> Tensor:
        """(3,) means of the three terms times gains, summed over heads."""
        self._gains = self._gains.to(numerators.device)
        return (numerators / counts.clamp(min=1)).sum(1) * self._gains

    def _measure_head(self, levels: Sequence[Tensor], targets: Tensor, image_size: tuple[int, int], rule: AlignRule
                      ) -> tuple[Tensor, Tensor]:
        """Numerators (3,) of a head, and the sum of its target scores: W before it is limited to at least 1."""
        distances, classes = flatten_levels(levels, self.head.bins)
        points, strides = grid_points(levels, self.head.strides)
        boxes = expected_boxes(distances, points, strides)
        label, weight = align(boxes.detach(), classes.detach().sigmoid(), points, targets, rule)
        truth = targets[label] if len(targets) else targets.new_zeros(*label.shape, 6)  # (B, N, 6)

        is_class = truth[..., 1:2].long() == torch.arange(classes.shape[2], device=classes.device)
        scores = is_class * weight[..., None]  # (B, N, classes): the target score at the label's class, else 0
        cls = F.binary_cross_entropy_with_logits(classes, scores, reduction="sum")

        left_and_top = points - truth[..., 2:4]
        right_and_bottom = truth[..., 4:] - points
        sides = torch.cat((left_and_top, right_and_bottom), 2) / strides  # (B, N, 4), in cells
        assigned = weight > 0

        def pick(values: Tensor) -> Tensor:
            """Values of the assigned points; on a GPU, where selection would synchronise, of all (weight 0)."""
            return values[assigned] if selects_pairs(values.device) else values.flatten(0, 1)

        weights = pick(weight)
        cell_sizes = pick(strides.expand_as(weight[..., None]))  # (n, 1), in pixels
        box = (1 - complete_iou(pick(boxes), pick(truth[..., 2:]))) * weights
        distance = self._distance_loss(pick(distances), pick(sides), cell_sizes, image_size) * weights
        return torch.stack((box.sum(), cls, distance.sum())), weight.sum()

    def _distance_loss(self, distances: Tensor, sides: Tensor, cell_sizes: Tensor, image_size: tuple[int, int]
                       ) -> Tensor:
        """(n,) cross-entropies of the distributions (n, 4, bins) with the true distances `sides` (n, 4), in cells."""
        sides = sides.clamp(0, self.head.bins - 1 - 0.01)  # so that there is a bin above
        low = sides.floor()
        logs = distances.log_softmax(2)
        log_low = logs.gather(2, low.long()[..., None])[..., 0]
        log_high = logs.gather(2, (low + 1).long()[..., None])[..., 0]
        weight_low = low + 1 - sides
        weight_high = sides - low
        return -(weight_low * log_low + weight_high * log_high).mean(1)


class EndToEndLoss(AnchorFreeLoss):
    """Loss of `EndToEnd`: m x one-to-many + (1 - m) x one-to-one, with an assignment for each head.

    m falls linearly from 0.8 to 0.1 with the progress of training. The third term is

        l1 = sum of w x mean over the sides of |p - d| / side of the network input / W

    for a side predicted at p and true at d pixels from its point.
    """

    names: tuple[str, ...] = ("box", "cls", "l1")

    def __init__(self, head: AnchorFree, config: LossConfig) -> None:
        super().__init__(head, config, small_labels=True)
        self.rules += (self.rules[0]._replace(top=7, keep=1),)
        self.num_counts = 2

    def terms(self, numerators: Tensor, counts: Tensor, progress: float = 1.0) -> Tensor:
        many = 0.1 + 0.7 * (1 - progress)
        shares = numerators.new_full((2,), 1 - many)  # filled there: a copy from the host would wait for a GPU
        shares[:1].fill_(many)
        return super().terms(numerators * shares, counts, progress)

    def _distance_loss(self, distances: Tensor, sides: Tensor, cell_sizes: Tensor, image_size: tuple[int, int]
                       ) -> Tensor:
        """(n,) mean errors of the distances, as shares of the network input."""
        height, width = image_size
        errors = (distances[..., 0] - sides).abs() * cell_sizes
        network_input = errors.new_full((4,), width)  # filled there, as the shares are
        network_input[1::2].fill_(height)
        return (errors / network_input).mean(1)
