"""The heads: raw predictions per level, and their decoding to boxes and scores.

Sources of the anchor-free heads: Ge et al. 2021 (YOLOX, arXiv:2107.08430), Li et al. 2020 (Generalized Focal Loss,
arXiv:2006.04388), Wang et al. 2024 (YOLOv10, arXiv:2405.14458).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ray_yolo.core.errors import ConfigError
from ray_yolo.models.blocks import Channels, Conv, Count
from ray_yolo.ops.boxes import BINS, corners, expected_boxes, flatten_levels, grid_cells, grid_points

Anchors = Sequence[Sequence[Sequence[float]]]  # each anchor of each level is (width, height) in pixels


class Predictions(NamedTuple):
    """Decoded predictions of any head."""

    boxes: Tensor  # (B, N, 4) float32, xyxy in pixels of the network input
    scores: Tensor  # (B, N, classes) float32 in 0..1


class Head(nn.Module):
    """The last layer of a detector: the interface of all families' heads."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.strides: tuple[int, ...] = ()  # pixels per cell of each level

    def calibrate(self, strides: tuple[int, ...], anchors_px: Anchors | None) -> None:
        """Set strides, anchors (if any) and the initial biases."""
        self.strides = strides

    def lighten(self) -> None:
        """Drop the parts that only training needs; most heads have none."""

    def class_layers(self) -> dict[str, nn.Conv2d]:
        """The convolutions whose outputs are class scores, by their name in the head. None: classes are fixed."""
        return {}

    def class_outputs(self, classes: Sequence[int], num_classes: int | None = None) -> list[int]:
        """Output channels of a class layer that belong to these classes, in this order, or to no class.

        Args:
            num_classes: of the layer; None: those of this head.
        """
        return list(classes)

    @torch.no_grad()
    def select_classes(self, classes: Sequence[int]) -> None:
        """Keep only these classes, in this order: class i of the head becomes its former class `classes[i]`.

        Raises:
            ConfigError: if the head does not name its class layers.
        """
        layers, outputs = self.class_layers(), self.class_outputs(classes)
        if not layers:
            raise ConfigError(f"model: the classes of a {type(self).__name__} head cannot be matched by name; give the "
                              "data set and the weights the same order of classes")
        for layer in layers.values():
            assert layer.bias is not None, "class layers have a bias"
            layer.weight = nn.Parameter(layer.weight[outputs].clone(), layer.weight.requires_grad)
            layer.bias = nn.Parameter(layer.bias[outputs].clone(), layer.bias.requires_grad)
            layer.out_channels = len(outputs)
        self.num_classes = len(classes)


class Detect(Head):
    """The anchor-based head: one 1x1 convolution per level, to num_anchors x (5 + num_classes) channels.

    `anchors` (levels, anchors, 2) are in cells of their level; `calibrate` sets them and the strides.
    """

    anchors: Tensor

    def __init__(self, inputs: Sequence[int], num_classes: Channels = 80, num_anchors: Count = 3) -> None:
        super().__init__(num_classes)
        self.num_anchors = num_anchors
        self.m = nn.ModuleList(nn.Conv2d(channels, num_anchors * (5 + num_classes), 1) for channels in inputs)
        self.register_buffer("anchors", torch.zeros(len(inputs), num_anchors, 2))

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        """Raw predictions (B, anchors, h, w, 5 + classes) per level: [tx, ty, tw, th, objectness, classes...].

        They are views in the memory order of the features: with channels last, (B, h, w, anchors, 5 + classes).
        """
        outputs = [convolve(x) for convolve, x in zip(self.m, features, strict=True)]
        return tuple(y.unflatten(1, (self.num_anchors, -1)).permute(0, 1, 3, 4, 2) for y in outputs)

    def calibrate(self, strides: tuple[int, ...], anchors_px: Anchors | None) -> None:
        """Set strides, anchors (None: squares) and the initial biases.

        Biases start at a prior of 8 objects per 640-pixel image and a probability of 0.6 / num_classes per class. The
        first steps are then not spent on learning that most cells are empty.
        """
        super().calibrate(strides, anchors_px)
        set_anchors(self, square_anchors(strides, self.num_anchors) if anchors_px is None else anchors_px)
        with torch.no_grad():
            for convolve, stride in zip(self.m, strides, strict=True):
                bias = cast(Tensor, convolve.bias).view(self.num_anchors, -1)
                bias[:, 4] += math.log(8 / (640 / stride) ** 2)
                bias[:, 5:] += math.log(0.6 / (self.num_classes - 0.99999))

    def class_layers(self) -> dict[str, nn.Conv2d]:
        """One convolution per level."""
        return {f"m.{level}": cast(nn.Conv2d, layer) for level, layer in enumerate(self.m)}

    def class_outputs(self, classes: Sequence[int], num_classes: int | None = None) -> list[int]:
        """For each anchor, the box, the objectness and these classes."""
        fields = [*range(5), *(5 + number for number in classes)]
        width = 5 + (self.num_classes if num_classes is None else num_classes)
        return [anchor * width + field for anchor in range(self.num_anchors) for field in fields]


def set_anchors(head: Detect, anchors_px: Anchors) -> None:
    """Set a head's anchors in pixels; levels in the opposite order of the strides are reversed."""
    areas = [sum(width * height for width, height in level) / len(level) for level in anchors_px]
    if (areas[-1] - areas[0]) * (head.strides[-1] - head.strides[0]) < 0:
        anchors_px = anchors_px[::-1]
    strides = torch.tensor(head.strides)[:, None, None]  # (levels, 1, 1)
    head.anchors.copy_(torch.tensor(anchors_px, dtype=torch.float64) / strides)


def square_anchors(strides: Sequence[int], num_anchors: int) -> Anchors:
    """Initial anchors for a fit: squares between 2 and 8 cells in geometric steps on every level."""
    cells = [2 * 4 ** ((i + 0.5) / num_anchors) for i in range(num_anchors)]
    return [[(size * stride, size * stride) for size in cells] for stride in strides]


def decode_anchors(head: Detect, levels: Sequence[Tensor]) -> Predictions:
    """Decoded predictions of `Detect`: with s = sigmoid, cell (cx, cy) and anchor (aw, ah) in cells,

        x = 2 s(tx) - 0.5 + cx,   y = 2 s(ty) - 0.5 + cy,   w = (2 s(tw))^2 aw,   h = (2 s(th))^2 ah,

    and the score of a class is its probability times the objectness. The order of N is levels, anchors, rows, columns.
    """
    boxes, scores = [], []
    with torch.autocast(levels[0].device.type, enabled=False):
        for level, anchors, stride in zip(levels, head.anchors, head.strides, strict=True):
            outputs = level.float().sigmoid()
            centre = (2 * outputs[..., :2] - 0.5 + grid_cells(level)) * stride
            size = (2 * outputs[..., 2:4]).square() * anchors.float()[:, None, None] * stride
            boxes.append(corners(torch.cat((centre, size), 4)).flatten(1, 3))
            scores.append((outputs[..., 4:5] * outputs[..., 5:]).flatten(1, 3))
    return Predictions(torch.cat(boxes, 1), torch.cat(scores, 1))


class AnchorFree(Head):
    """Two branches per level: 4 x `bins` outputs for the distances left, top, right, bottom, and the class logits."""

    bins = BINS
    box_bias = 1.0  # initial bias of the box branch

    def __init__(self, inputs: Sequence[int], num_classes: Channels = 80) -> None:
        super().__init__(num_classes)
        boxes = max(16, inputs[0] // 4, 4 * self.bins)  # hidden channels of the box branches
        scores = max(inputs[0], min(num_classes, 100))  # hidden channels of the class branches
        self.cv2 = nn.ModuleList(_branch(channels, boxes, 4 * self.bins) for channels in inputs)
        self.cv3 = nn.ModuleList(self._class_branch(channels, scores, num_classes) for channels in inputs)
        if self.bins > 1:  # a constant that published files contain
            self.dfl = nn.Module()
            self.dfl.conv = nn.Conv2d(self.bins, 1, 1, bias=False).requires_grad_(False)
            self.dfl.conv.weight.data[:] = torch.arange(self.bins).view(1, self.bins, 1, 1)

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        """Raw predictions (B, 4 x bins + classes, h, w) per level."""
        return _join(self.cv2, self.cv3, features)

    def calibrate(self, strides: tuple[int, ...], anchors_px: Anchors | None) -> None:
        """Set strides and the initial biases: a prior of 5 objects per 640-pixel image."""
        super().calibrate(strides, anchors_px)
        for box, score, stride in zip(self.cv2, self.cv3, strides, strict=True):
            cells = (640 / stride) ** 2
            _set_last_bias(box, self.box_bias)
            _set_last_bias(score, math.log(5 / self.num_classes / cells))

    def class_layers(self) -> dict[str, nn.Conv2d]:
        """The last convolution of each class branch."""
        return _last_layers("cv3", self.cv3)

    def _class_branch(self, inputs: int, hidden: int, outputs: int) -> nn.Sequential:
        return _branch(inputs, hidden, outputs)


class LightAnchorFree(AnchorFree):
    """The same with depth-wise convolutions in the class branches."""

    def _class_branch(self, inputs: int, hidden: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Sequential(Conv(inputs, inputs, 3, groups=inputs), Conv(inputs, hidden)),
                             nn.Sequential(Conv(hidden, hidden, 3, groups=hidden), Conv(hidden, hidden)),
                             nn.Conv2d(hidden, outputs, 1))


class EndToEnd(LightAnchorFree):
    """A one-to-many head and a one-to-one head, both with one bin and equal at the start (Wang et al. 2024).

    Only the first passes gradients to the backbone. The detections of the second need no suppression.
    """

    bins = 1
    box_bias = 2.0  # boxes of 4 x 4 cells

    def __init__(self, inputs: Sequence[int], num_classes: Channels = 80) -> None:
        super().__init__(inputs, num_classes)
        self.one2one_cv2, self.one2one_cv3 = copy.deepcopy(self.cv2), copy.deepcopy(self.cv3)
        self.is_light = False

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        """Raw predictions (B, 4 + classes, h, w): all levels one-to-many, then all levels one-to-one."""
        one_to_one = _join(self.one2one_cv2, self.one2one_cv3, [x.detach() for x in features])
        return one_to_one if self.is_light else (*_join(self.cv2, self.cv3, features), *one_to_one)

    def calibrate(self, strides: tuple[int, ...], anchors_px: Anchors | None) -> None:
        """Set strides and the initial biases of both heads."""
        super().calibrate(strides, anchors_px)
        for first, second in ((self.cv2, self.one2one_cv2), (self.cv3, self.one2one_cv3)):
            second.load_state_dict(first.state_dict())

    def class_layers(self) -> dict[str, nn.Conv2d]:
        """Those of both heads."""
        return super().class_layers() | _last_layers("one2one_cv3", self.one2one_cv3)

    def lighten(self) -> None:
        """Drop the one-to-many head; `forward` then returns the one-to-one levels only."""
        self.is_light = True
        del self.cv2, self.cv3


def _set_last_bias(branch: nn.Module, value: float) -> None:
    last = cast(nn.Sequential, branch)[-1]
    nn.init.constant_(cast(Tensor, last.bias), value)


def _join(boxes: nn.ModuleList, scores: nn.ModuleList, features: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The concatenated outputs of both branches of each level."""
    levels = []
    for box, score, x in zip(boxes, scores, features, strict=True):
        levels.append(torch.cat((box(x), score(x)), 1))
    return tuple(levels)


def _last_layers(name: str, branches: nn.ModuleList) -> dict[str, nn.Conv2d]:
    """The last convolution of each branch, by its name in the head."""
    layers: dict[str, nn.Conv2d] = {}
    for level, branch in enumerate(branches):
        sequence = cast(nn.Sequential, branch)
        layers[f"{name}.{level}.{len(sequence) - 1}"] = cast(nn.Conv2d, sequence[-1])
    return layers


def _branch(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(Conv(inputs, hidden, 3), Conv(hidden, hidden, 3), nn.Conv2d(hidden, outputs, 1))


def decode_distances(head: AnchorFree, levels: Sequence[Tensor]) -> Predictions:
    """Decoded predictions of `AnchorFree`; of `EndToEnd` those of the one-to-one head, whose levels come last."""
    levels = levels[-len(head.strides):]
    with torch.autocast(levels[0].device.type, enabled=False):
        distances, classes = flatten_levels(levels, head.bins)
        return Predictions(expected_boxes(distances, *grid_points(levels, head.strides)), classes.sigmoid())
