"""Builds a detector from a table of rows; fusion for inference, parameter and FLOP counts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ray_yolo.config.model_facts import GRID
from ray_yolo.core.errors import ConfigError
from ray_yolo.models.blocks import Conv
from ray_yolo.models.heads import Anchors, Detect, Head
from ray_yolo.models.rows import MOST_CHANNELS, Row

PROBE_PX = 64  # side of the dummy image that determines channels and strides


def backbone_of(model: Detector) -> list[nn.Module]:
    """The layers before the first upsampling layer.

    Raises:
        ConfigError: if there is none.
    """
    layers = list(model.model)
    for number, layer in enumerate(layers):
        if isinstance(layer, nn.Upsample):
            return layers[:number]
    raise ConfigError("optimizer.backbone_lr: the model has no upsampling layer, which would end its backbone")


class Detector(nn.Module):
    """Layers in the order of their rows, named `model.0`, `model.1`, ...; the last is the head."""

    def __init__(self, rows: Sequence[Row], anchors_px: Anchors | None = None) -> None:
        """Build rows with their final channels, repeats and classes; the last is the head's.

        Args:
            anchors_px: of the head; None: squares, to be fitted.

        Raises:
            ConfigError: naming the row whose input does not fit.
        """
        super().__init__()
        self._sources = [_absolute(row, index) for index, row in enumerate(rows)]
        # An output is kept if another row than the next one takes it.
        self._kept = {source for row, sources in enumerate(self._sources) for source in sources if source != row - 1}
        self.model = nn.ModuleList()
        strides = self._assemble(rows)
        self.head.calibrate(strides, anchors_px)

    @property
    def head(self) -> Head:
        """The last layer."""
        return cast(Head, self.model[-1])

    @property
    def grid(self) -> int:
        """Image sides must be multiples of it: 32, or the largest stride."""
        return max(GRID, *self.head.strides)

    @property
    def num_classes(self) -> int:
        """Number of classes of the head."""
        return self.head.num_classes

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Raw predictions of images (B, 3, H, W) in 0..1; `head.forward` describes the tensors.

        H and W are multiples of the grid. Training and evaluation return the same form.
        """
        x, kept = images, dict[int, Tensor]()
        for index, (layer, sources) in enumerate(zip(self.model, self._sources, strict=True)):
            x = layer(*[x if source == index - 1 else kept[source] for source in sources])
            if index in self._kept:
                kept[index] = x
        return cast(tuple[Tensor, ...], x)

    @torch.no_grad()
    def _assemble(self, rows: Sequence[Row]) -> tuple[int, ...]:
        """Build each layer for the channels of its inputs, found with a dummy image; returns the head's strides."""
        outputs = [torch.zeros(1, 3, PROBE_PX, PROBE_PX)]  # outputs[i + 1] is that of row i
        for index, (row, sources) in enumerate(zip(rows, self._sources, strict=True)):
            inputs = [outputs[source + 1] for source in sources]
            try:
                layer = row.build([x.shape[1] for x in inputs]).eval()  # do not update BatchNorm statistics
                outputs.append(layer(*inputs))
            except (ArithmeticError, RuntimeError, ValueError, TypeError) as error:
                shapes = " and ".join(str(tuple(x.shape[1:])) for x in inputs)
                raise ConfigError(f"model row {index}, {row}: cannot take inputs of (channels, height, width) "
                                  f"{shapes}: {error}") from error
            self.model.append(layer)
        side, levels = PROBE_PX, outputs[-1]
        while min(level.shape[2] for level in levels) < 2:  # a single cell does not determine its stride
            side *= 2
            levels = self(torch.zeros(1, 3, side, side))
        self.train()
        return tuple(side // level.shape[2] for level in levels[: len(self._sources[-1])])


@dataclass(frozen=True)
class Architecture:
    """A model without its number of classes: a table of rows and the multiples of its size."""

    rows: tuple[Row, ...]
    anchors_px: Anchors | int | None  # each is (width, height); a number: each level has this many
    depth: float = 1.0
    width: float = 1.0
    most: int = MOST_CHANNELS  # limit of a row's channels before the width multiple

    @property
    def key(self) -> tuple[int, int]:
        """(rows, output channels of the first row): distinguishes most models before they are built."""
        first = self.rows[0].scaled(self.depth, self.width, self.most)
        return len(self.rows), first.channels or 0

    def build(self, num_classes: int, anchors_px: Anchors | None = None) -> Detector:
        """The model for this number of classes, with these anchors or else the table's own.

        Raises:
            ConfigError: if rows or anchors are incompatible.
        """
        *rows, head = self.rows
        if not _is_head(head) or any(_is_head(row) for row in rows):
            raise ConfigError("model: the last row must be Detect, and no other row")
        anchors = self.anchors_px if anchors_px is None else anchors_px
        head = head.with_arguments(num_classes=num_classes)
        if issubclass(head.block, Detect):
            assert anchors is not None, "a head with anchors has them in its table"
            count = anchors if isinstance(anchors, int) else _count_anchors(anchors, len(head.source))
            head = head.with_arguments(num_anchors=count)
        try:
            scaled = [row.scaled(self.depth, self.width, self.most) for row in rows]
        except ValidationError as error:
            raise ConfigError(f"model: depth multiple {self.depth} and width multiple {self.width} make a row too "
                              f"large: {error.errors()[0]['msg']}") from error
        return Detector([*scaled, head], None if isinstance(anchors, int) else anchors)


def _is_head(row: Row) -> bool:
    return issubclass(row.block, Head)


def _absolute(row: Row, index: int) -> tuple[int, ...]:
    """Sources of row `index` as indices; -1 is the image, allowed for the first row only."""
    sources = tuple(source if source >= 0 else index + source for source in row.source)
    lowest = -1 if index == 0 else 0
    if not sources or not all(lowest <= source < index for source in sources):
        raise ConfigError(f"model row {index}, {row}: its source is not an earlier row")
    return sources


def _count_anchors(anchors: Anchors, num_levels: int) -> int:
    """The number of anchors of each level. ConfigError unless it is the same on all levels, and every side above 0."""
    counts = {len(level) for level in anchors}
    if len(anchors) != num_levels or len(counts) != 1 or min(counts) == 0:
        raise ConfigError(f"anchors: {num_levels} levels with equal numbers of anchors are needed, but there are "
                          f"{', '.join(str(len(level)) for level in anchors)}")
    if any(side <= 0 for level in anchors for anchor in level for side in anchor):
        raise ConfigError("anchors: every width and height is a number of pixels above 0")
    return counts.pop()


def fuse(detector: Detector) -> Detector:
    """A copy for inference: BatchNorm folded into convolutions, parts that only training needs dropped.

    Its detections are equal up to rounding.
    """
    fused = copy.deepcopy(detector).eval()
    fused.head.lighten()
    for block in fused.modules():
        if isinstance(block, Conv) and isinstance(block.bn, nn.BatchNorm2d):
            block.conv, block.bn = fuse_conv_bn_eval(block.conv, block.bn), nn.Identity()
    return fused


def count_parameters(detector: nn.Module) -> int:
    """Number of parameters, without running statistics."""
    return sum(parameter.numel() for parameter in detector.parameters())


def gflops(detector: Detector, imgsz: int = 640) -> float:
    """Billions of operations for one square image: 2 x multiply-adds of the fused model, counted on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode  # a slow import that few processes need

    image = torch.empty(1, 3, imgsz, imgsz, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        fuse(detector).to("meta")(image)
    return float(counter.get_total_flops()) / 1e9
