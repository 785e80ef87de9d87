"""The anchor-based head: raw predictions per level, and their meaning as boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from ray_yolo.ops.boxes import corners

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
    """One 1x1 convolution per level, to num_anchors x (5 + num_classes) channels.

    `anchors` (levels, anchors, 2) are in cells of their level; `strides` are pixels per cell. Both are set by
    `calibrate`, once the strides are known.
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


def decode(head: Detect, levels: Sequence[Tensor]) -> Predictions:
    """Predictions in words of the image: with s = sigmoid, cell (cx, cy) and anchor (aw, ah) in cells,

        x = 2 s(tx) - 0.5 + cx,   y = 2 s(ty) - 0.5 + cy,   w = (2 s(tw))^2 aw,   h = (2 s(th))^2 ah,

    and the score of a class is its own chance times that of an object.

    Args:
        levels: raw predictions of `Detect`, one (B, anchors, h, w, 5 + classes) per level; N runs over levels, anchors,
            rows, columns.
    """
    with torch.autocast(levels[0].device.type, enabled=False):
        decoded = [_decode_level(level.float(), anchors.float(), stride)
                   for level, anchors, stride in zip(levels, head.anchors, head.strides, strict=True)]
    return Predictions(torch.cat([boxes for boxes, _ in decoded], 1), torch.cat([scores for _, scores in decoded], 1))


def _decode_level(level: Tensor, anchors: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    height, width = level.shape[2:4]
    rows, columns = torch.arange(height, device=level.device), torch.arange(width, device=level.device)
    cells = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), 2)  # (h, w, 2) as (x, y)
    chances = level.sigmoid()
    centre = (2 * chances[..., :2] - 0.5 + cells) * stride
    size = (2 * chances[..., 2:4]).square() * anchors[:, None, None] * stride
    scores = chances[..., 4:5] * chances[..., 5:]
    return corners(torch.cat((centre, size), 4)).flatten(1, 3), scores.flatten(1, 3)
