"""The rows of a model table: where a layer's input comes from, which block it is, how wide, how often repeated.

In a table, channels and repeats are those before the multiples of a model size. Rows are values: validated where they
are written, comparable, printable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import nn

from ray_yolo.models import blocks, heads

# The bounds only keep a slip of the pen from asking for more memory than there is.
Channels = Annotated[int, Field(ge=1, le=2**15)]
Count = Annotated[int, Field(ge=1, le=1000)]
Kernel = Annotated[int, Field(ge=1, le=127)]
Padding = Annotated[int, Field(ge=0, le=127)]
STRICT = ConfigDict(strict=True)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LayerRow:
    """One layer. `source` are rows by index; a negative one counts back from this row (-1: the row before)."""

    layer: ClassVar[type[nn.Module]]
    source: tuple[int, ...] = (-1,)

    @property
    def arguments(self) -> list[Any]:
        """What a row of a YAML file writes behind the layer's name, in order."""
        return [getattr(self, entry.name) for entry in fields(self) if not entry.kw_only]

    def build(self, channels: Sequence[int]) -> nn.Module:
        """The layer, for inputs of so many channels."""
        return self.layer(*self.arguments)

    def scaled(self, depth: float, width: float, most: int = 2**15) -> Self:
        """The row of a model size."""
        return self


@dataclass(frozen=True, config=STRICT)
class WideRow(LayerRow):
    """A row that sets the number of channels. Repeated, it is a sequence of blocks."""

    channels: Channels
    repeats: Count = field(default=1, kw_only=True)

    def block(self, channels: int) -> nn.Module:
        """One repeat, for an input of so many channels."""
        return self.layer(channels, *self.arguments)

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

    layer = blocks.Conv
    kernel: Kernel = 1
    stride: Kernel = 1
    padding: Padding | None = None
    groups: Channels = 1


@dataclass(frozen=True, config=STRICT)
class DWConvRow(WideRow):
    """Depth-wise convolution: as many groups as input and output channels allow."""

    kernel: Kernel = 1
    stride: Kernel = 1

    def block(self, channels: int) -> nn.Module:
        return blocks.Conv(channels, self.channels, self.kernel, self.stride,
                           groups=math.gcd(channels, self.channels))


@dataclass(frozen=True, config=STRICT)
class BottleneckRow(WideRow):
    """Bottlenecks of half width inside."""

    layer = blocks.Bottleneck
    shortcut: bool = True


@dataclass(frozen=True, config=STRICT)
class C3Row(WideRow):
    """Repeats are bottlenecks inside the block."""

    layer: ClassVar[type[nn.Module]] = blocks.C3
    shortcut: bool = True

    def build(self, channels: Sequence[int]) -> nn.Module:
        return self.layer(channels[0], self.channels, self.repeats, self.shortcut)


@dataclass(frozen=True, config=STRICT)
class C2fRow(C3Row):
    """Repeats are bottlenecks inside the block."""

    layer = blocks.C2f


@dataclass(frozen=True, config=STRICT)
class C3k2Row(WideRow):
    """Repeats are blocks inside the block."""

    c3k: bool = False
    expansion: float = 0.5
    attention: bool = False

    def build(self, channels: Sequence[int]) -> nn.Module:
        return blocks.C3k2(channels[0], self.channels, self.repeats, self.c3k, self.expansion, self.attention)


@dataclass(frozen=True, config=STRICT)
class C2PSARow(WideRow):
    """Repeats are attention blocks inside the block."""

    def build(self, channels: Sequence[int]) -> nn.Module:
        return blocks.C2PSA(channels[0], self.channels, self.repeats)


@dataclass(frozen=True, config=STRICT)
class A2C2fRow(WideRow):
    """Repeats are pairs of attention blocks, in so many areas, or (0) C3 blocks."""

    areas: Padding = 0
    scaled_residual: bool = False

    def build(self, channels: Sequence[int]) -> nn.Module:
        return blocks.A2C2f(channels[0], self.channels, self.repeats, self.areas, self.scaled_residual)


@dataclass(frozen=True, config=STRICT)
class SPPRow(WideRow):
    """Max-pools of these sizes side by side."""

    layer = blocks.SPP
    kernels: tuple[Kernel, ...] = (5, 9, 13)


@dataclass(frozen=True, config=STRICT)
class SPPFRow(WideRow):
    """Three max-pools of this size in a chain."""

    layer = blocks.SPPF
    kernel: Kernel = 5
    residual: bool = False


@dataclass(frozen=True, config=STRICT)
class UpsampleRow(LayerRow):
    """Enlarges by `factor`; `size` is there because the published tables write it, as None."""

    layer = nn.Upsample
    size: None = None
    factor: Kernel = 2
    mode: Literal["nearest"] = "nearest"


@dataclass(frozen=True, config=STRICT)
class ConcatRow(LayerRow):
    """Joins the channels of its sources."""

    dimension: Literal[1] = 1

    def build(self, channels: Sequence[int]) -> nn.Module:
        return blocks.Concat()


@dataclass(frozen=True, config=STRICT)
class MaxPoolRow(LayerRow):
    """Maximum over a square window."""

    layer = nn.MaxPool2d
    kernel: Kernel
    stride: Kernel
    padding: Padding = 0


@dataclass(frozen=True, config=STRICT)
class ZeroPadRow(LayerRow):
    """Pads by (left, right, top, bottom) pixels."""

    layer = nn.ZeroPad2d
    padding: tuple[Padding, Padding, Padding, Padding]


@dataclass(frozen=True, config=STRICT)
class HeadRow(LayerRow):
    """A head, one source per level."""

    num_classes: Channels = 80

    def build(self, channels: Sequence[int]) -> nn.Module:
        return self.layer(channels, *self.arguments)


@dataclass(frozen=True, config=STRICT)
class AnchorFreeRow(HeadRow):
    """The decoupled head without anchors."""

    layer: ClassVar[type[nn.Module]] = heads.AnchorFree


@dataclass(frozen=True, config=STRICT)
class LightAnchorFreeRow(AnchorFreeRow):
    """The same with depth-wise convolutions."""

    layer: ClassVar[type[nn.Module]] = heads.LightAnchorFree


@dataclass(frozen=True, config=STRICT)
class EndToEndRow(AnchorFreeRow):
    """Two heads, of which the second needs no suppression."""

    layer = heads.EndToEnd


@dataclass(frozen=True, config=STRICT)
class DetectRow(HeadRow):
    """The head with anchors."""

    layer = heads.Detect
    num_anchors: Count = 3
