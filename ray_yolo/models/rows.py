"""The rows of a model table: where a layer's input comes from, which block it is, how wide, how often repeated.

In a table, channels and repeats are those before the multiples of a model size. Rows are values: validated where they
are written, comparable, printable.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import nn

from ray_yolo.models import blocks
from ray_yolo.models.anchor_free import AnchorFree
from ray_yolo.models.heads import Detect

# The bounds only keep a slip of the pen from asking for more memory than there is.
Channels = Annotated[int, Field(ge=1, le=2**15)]
Count = Annotated[int, Field(ge=1, le=1000)]
Kernel = Annotated[int, Field(ge=1, le=127)]
Padding = Annotated[int, Field(ge=0, le=127)]
STRICT = ConfigDict(strict=True)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Row(ABC):
    """One layer. `source` are rows by index; a negative one counts back from this row (-1: the row before)."""

    source: tuple[int, ...] = (-1,)

    @abstractmethod
    def build(self, channels: Sequence[int]) -> nn.Module:
        """The layer, for inputs of so many channels."""

    def scaled(self, depth: float, width: float, most: int = 2**15) -> Self:
        """The row of a model size."""
        return self


@dataclass(frozen=True, config=STRICT)
class WideRow(Row):
    """A row that sets the number of channels. Repeated, it is a sequence of blocks."""

    channels: Channels
    repeats: Count = field(default=1, kw_only=True)

    @abstractmethod
    def block(self, channels: int) -> nn.Module:
        """One repeat, for an input of so many channels."""

    def build(self, channels: Sequence[int]) -> nn.Module:
        first, *others = [self.block(channels[0] if i == 0 else self.channels) for i in range(self.repeats)]
        return nn.Sequential(first, *others) if others else first

    def scaled(self, depth: float, width: float, most: int = 2**15) -> Self:
        """min(channels, most) x width, rounded up to a multiple of 8; repeats above one become max(round(repeats x
        depth), 1)."""
        repeats = max(round(self.repeats * depth), 1) if self.repeats > 1 else 1
        return replace(self, channels=math.ceil(min(self.channels, most) * width / 8) * 8, repeats=repeats)


@dataclass(frozen=True, config=STRICT)
class ConvRow(WideRow):
    """Convolution; padding None: half the kernel."""

    kernel: Kernel = 1
    stride: Kernel = 1
    padding: Padding | None = None
    groups: Channels = 1

    def block(self, channels: int) -> nn.Module:
        return blocks.Conv(channels, self.channels, self.kernel, self.stride, self.padding, self.groups)


@dataclass(frozen=True, config=STRICT)
class DWConvRow(WideRow):
    """Depth-wise convolution: as many groups as input and output channels allow."""

    kernel: Kernel = 1
    stride: Kernel = 1

    def block(self, channels: int) -> nn.Module:
        groups = math.gcd(channels, self.channels)
        return blocks.Conv(channels, self.channels, self.kernel, self.stride, groups=groups)


@dataclass(frozen=True, config=STRICT)
class BottleneckRow(WideRow):
    """Bottlenecks of half width inside."""

    shortcut: bool = True

    def block(self, channels: int) -> nn.Module:
        return blocks.Bottleneck(channels, self.channels, self.shortcut)


@dataclass(frozen=True, config=STRICT)
class C3Row(WideRow):
    """Repeats are bottlenecks inside the block."""

    shortcut: bool = True

    def block(self, channels: int) -> nn.Module:
        return blocks.C3(channels, self.channels, self.repeats, self.shortcut)

    def build(self, channels: Sequence[int]) -> nn.Module:
        return self.block(channels[0])


@dataclass(frozen=True, config=STRICT)
class C2fRow(C3Row):
    """Repeats are bottlenecks inside the block."""

    def block(self, channels: int) -> nn.Module:
        return blocks.C2f(channels, self.channels, self.repeats, self.shortcut)


@dataclass(frozen=True, config=STRICT)
class SPPRow(WideRow):
    """Max-pools of these sizes side by side."""

    kernels: tuple[Kernel, ...] = (5, 9, 13)

    def block(self, channels: int) -> nn.Module:
        return blocks.SPP(channels, self.channels, self.kernels)


@dataclass(frozen=True, config=STRICT)
class SPPFRow(WideRow):
    """Three max-pools of this size in a chain."""

    kernel: Kernel = 5

    def block(self, channels: int) -> nn.Module:
        return blocks.SPPF(channels, self.channels, self.kernel)


@dataclass(frozen=True, config=STRICT)
class UpsampleRow(Row):
    """Enlarges by `factor`; `size` is there because the published tables write it, as None."""

    size: None = None
    factor: Kernel = 2
    mode: Literal["nearest"] = "nearest"

    def build(self, channels: Sequence[int]) -> nn.Module:
        return nn.Upsample(scale_factor=float(self.factor), mode=self.mode)


@dataclass(frozen=True, config=STRICT)
class ConcatRow(Row):
    """Joins the channels of its sources."""

    dimension: Literal[1] = 1

    def build(self, channels: Sequence[int]) -> nn.Module:
        return blocks.Concat()


@dataclass(frozen=True, config=STRICT)
class MaxPoolRow(Row):
    """Maximum over a square window."""

    kernel: Kernel
    stride: Kernel
    padding: Padding = 0

    def build(self, channels: Sequence[int]) -> nn.Module:
        return nn.MaxPool2d(self.kernel, self.stride, self.padding)


@dataclass(frozen=True, config=STRICT)
class ZeroPadRow(Row):
    """Pads by (left, right, top, bottom) pixels."""

    padding: tuple[Padding, Padding, Padding, Padding]

    def build(self, channels: Sequence[int]) -> nn.Module:
        return nn.ZeroPad2d(self.padding)


@dataclass(frozen=True, config=STRICT)
class HeadRow(Row):
    """A head, one source per level."""

    num_classes: Channels = 80


@dataclass(frozen=True, config=STRICT)
class AnchorFreeRow(HeadRow):
    """The decoupled head without anchors."""

    def build(self, channels: Sequence[int]) -> nn.Module:
        return AnchorFree(channels, self.num_classes)


@dataclass(frozen=True, config=STRICT)
class DetectRow(HeadRow):
    """The head with anchors."""

    num_anchors: Count = 3

    def build(self, channels: Sequence[int]) -> nn.Module:
        return Detect(channels, self.num_classes, self.num_anchors)
