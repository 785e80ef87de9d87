"""The heads, with anchors and without: raw predictions per level, and their meaning as boxes.

The second: Ge et al. 2021 (YOLOX, arXiv:2107.08430), Li et al. 2020 (Generalized Focal Loss, arXiv:2006.04388).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from ray_yolo.models.blocks import Conv
from ray_yolo.ops.boxes import BINS, corners, expected_boxes, flatten_levels, grid_cells, grid_points

Anchors = Sequence[Sequence[Sequence[float]]]  # per level, per anchor: (width, height) in pixels


class Predictions(NamedTuple):
    """What a network says of images, whatever its head."""

    boxes: Tensor  # (B, N, 4) float32, xyxy in pixels of the network input
    scores: Tensor  # (B, N, classes) float32 in 0..1


class Head(Protocol):
    """The last layer of a detector: what all families' heads have."""

    num_classes: int
    strides: tuple[int, ...]  # pixels per cell of each level

    def calibrate(self, strides: tuple[int, ...], anchors_px: Anchors | None) -> None:
        """Set strides, anchors if it has them, and the biases from which training starts."""


class Detect(nn.Module):
    """The head with anchors: one 1x1 convolution per level, to num_anchors x (5 + num_classes) channels.

    `anchors` (levels, anchors, 2) are in cells of their level; they and the strides are set by `calibrate`.
    """

    anchors: Tensor

    def __init__(self, channels: Sequence[int], num_classes: int, num_anchors: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.num_anchors = num_anchors
        self.strides: tuple[int, ...] = ()
        self.m = nn.ModuleList(nn.Conv2d(c, num_anchors * (5 + num_classes), 1) for c in channels)
        self.register_buffer("anchors", torch.zeros(len(channels), num_anchors, 2))

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        """Raw predictions (B, anchors, h, w, 5 + classes) per level: [tx, ty, tw, th, objectness, classes...].

        They are views in the memory order of the features: with channels last, (B, h, w, anchors, 5 + classes).
        """
        outputs = [convolve(x) for convolve, x in zip(self.m, features, strict=True)]
        return tuple(y.unflatten(1, (self.num_anchors, -1)).permute(0, 1, 3, 4, 2) for y in outputs)

    def calibrate(self, strides: tuple[int, ...], anchors_px: Anchors | None) -> None:
        """Set strides, anchors (None: squares) and the biases from which training starts.

        At the start about 8 objects are expected in an image of 640 pixels, and each class with probability
        0.6 / num_classes, so that the first steps are not spent on learning that most cells are empty.
        """
        self.strides = strides
        set_anchors(self, square_anchors(strides, self.num_anchors) if anchors_px is None else anchors_px)
        with torch.no_grad():
            for convolve, stride in zip(self.m, strides, strict=True):
                bias = cast(Tensor, convolve.bias).view(self.num_anchors, -1)
                bias[:, 4] += math.log(8 / (640 / stride) ** 2)
                bias[:, 5:] += math.log(0.6 / (self.num_classes - 0.99999))


def set_anchors(head: Detect, anchors_px: Anchors) -> None:
    """Give a head anchors in pixels; levels in the opposite order to the strides are turned around."""
    areas = [sum(width * height for width, height in level) / len(level) for level in anchors_px]
    if (areas[-1] - areas[0]) * (head.strides[-1] - head.strides[0]) < 0:
        anchors_px = anchors_px[::-1]
    in_cells = [[(width / stride, height / stride) for width, height in level]
                for level, stride in zip(anchors_px, head.strides, strict=True)]
    head.anchors.copy_(torch.tensor(in_cells))


def square_anchors(strides: Sequence[int], num_anchors: int) -> Anchors:
    """Anchors to start a fit from: on every level squares between 2 and 8 cells in geometric steps."""
    cells = [2 * 4 ** ((i + 0.5) / num_anchors) for i in range(num_anchors)]
    return [[(size * stride, size * stride) for size in cells] for stride in strides]


def decode_anchors(head: Detect, levels: Sequence[Tensor]) -> Predictions:
    """Predictions in words of the image: with s = sigmoid, cell (cx, cy) and anchor (aw, ah) in cells,

        x = 2 s(tx) - 0.5 + cx,   y = 2 s(ty) - 0.5 + cy,   w = (2 s(tw))^2 aw,   h = (2 s(th))^2 ah,

    and the score of a class is its own chance times that of an object.
    N runs over levels, anchors, rows, columns.
    """
    boxes, scores = [], []
    with torch.autocast(levels[0].device.type, enabled=False):
        for level, anchors, stride in zip(levels, head.anchors, head.strides, strict=True):
            chances = level.float().sigmoid()
            centre = (2 * chances[..., :2] - 0.5 + grid_cells(level)) * stride
            size = (2 * chances[..., 2:4]).square() * anchors.float()[:, None, None] * stride
            boxes.append(corners(torch.cat((centre, size), 4)).flatten(1, 3))
            scores.append((chances[..., 4:5] * chances[..., 5:]).flatten(1, 3))
    return Predictions(torch.cat(boxes, 1), torch.cat(scores, 1))


class AnchorFree(nn.Module):
    """Two branches per level: 4 x `BINS` logits of the distances left, top, right, bottom, and the classes' logits."""

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
        for box, score, stride in zip(self.cv2, self.cv3, strides, strict=True):
            for branch, bias in ((box, 1.0), (score, math.log(5 / self.num_classes / (640 / stride) ** 2))):
                nn.init.constant_(cast(Tensor, cast(nn.Sequential, branch)[-1].bias), bias)


def _branch(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(Conv(inputs, hidden, 3), Conv(hidden, hidden, 3), nn.Conv2d(hidden, outputs, 1))


def decode_distances(head: AnchorFree, levels: Sequence[Tensor]) -> Predictions:
    """Predictions of `AnchorFree` in words of the image: a class's score is the sigmoid of its logit."""
    with torch.autocast(levels[0].device.type, enabled=False):
        distances, classes = flatten_levels(levels)
        return Predictions(expected_boxes(distances, *grid_points(levels, head.strides)), classes.sigmoid())
