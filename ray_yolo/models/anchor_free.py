"""The anchor-free head: for each side of a box a distribution over distances, and a score for each class.

Sources: Ge et al. 2021 (YOLOX, arXiv:2107.08430) for decoupled branches, Li et al. 2020 (Generalized Focal Loss,
arXiv:2006.04388) for distances as distributions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ray_yolo.models.blocks import Conv
from ray_yolo.models.heads import Anchors, Predictions
from ray_yolo.ops.distances import BINS, expected_boxes, flatten_levels, grid_points


class AnchorFree(nn.Module):
    """Two branches per level: 4 x `BINS` logits of the distances left, top, right, bottom, and the classes' logits.

    `strides` are pixels per cell, set by `calibrate`.
    """

    def __init__(self, channels: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.strides: tuple[int, ...] = ()
        boxes, scores = max(BINS, channels[0] // 4, 4 * BINS), max(channels[0], min(num_classes, 100))
        self.cv2 = nn.ModuleList(_branch(c, boxes, 4 * BINS) for c in channels)
        self.cv3 = nn.ModuleList(_branch(c, scores, num_classes) for c in channels)
        self.dfl = nn.Module()
        self.dfl.conv = nn.Conv2d(BINS, 1, 1, bias=False).requires_grad_(False)  # the published files have it
        self.dfl.conv.weight.data[:] = torch.arange(BINS).view(1, BINS, 1, 1)

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        """Raw predictions (B, 4 x BINS + classes, h, w) per level."""
        return tuple(torch.cat((box(x), score(x)), 1)
                     for box, score, x in zip(self.cv2, self.cv3, features, strict=True))

    def calibrate(self, strides: tuple[int, ...], anchors_px: Anchors | None) -> None:
        """Set strides and the biases from which training starts: about 5 objects in an image of 640 pixels."""
        self.strides = strides
        with torch.no_grad():
            for box, score, stride in zip(self.cv2, self.cv3, strides, strict=True):
                cast(Tensor, cast(nn.Sequential, box)[-1].bias).fill_(1.0)
                cast(Tensor, cast(nn.Sequential, score)[-1].bias).fill_(
                    math.log(5 / self.num_classes / (640 / stride) ** 2))


def _branch(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(Conv(inputs, hidden, 3), Conv(hidden, hidden, 3), nn.Conv2d(hidden, outputs, 1))


def decode(head: AnchorFree, levels: Sequence[Tensor]) -> Predictions:
    """Predictions in words of the image, see `heads.Predictions`: a class's score is the sigmoid of its logit."""
    with torch.autocast(levels[0].device.type, enabled=False):
        distances, classes = flatten_levels(levels)
        boxes = expected_boxes(distances, *grid_points(levels, head.strides))
        return Predictions(boxes, classes.sigmoid())
