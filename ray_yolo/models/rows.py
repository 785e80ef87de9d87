"""The rows of a model table: source, block, channels and repeats of each layer.

Channels and repeats in a table are those before the multiples of a model size. Rows are validated, immutable values.
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

# The bounds only protect from typing errors that would exhaust memory.
Channels = Annotated[int, Field(ge=1, le=2**15)]
Count = Annotated[int, Field(ge=1, le=1000)]
Kernel = Annotated[int, Field(ge=1, le=127)]
Padding = Annotated[int, Field(ge=0, le=127)]
STRICT = ConfigDict(strict=True)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LayerRow:
    """One layer. `source`: indices of input rows; negative ones count back from this row (-1: the row before)."""

    layer: ClassVar[type[nn.Module]]
    source: tuple[int, ...] = (-1,)

    @property
    def arguments(self) -> list[Any]:
        """The positional arguments, in the order of a YAML row."""
        return [getattr(self, entry.name) for entry in fields(self) if not entry.kw_only]

    def build(self, channels: Sequence[int]) -> nn.Module:
        """The layer for inputs with these numbers of channels."""
        return self.layer(*self.arguments)

    def scaled(self, depth: float, width: float, most: int = 2**15) -> Self:
        """The row after the multiples of a model size."""
        return self

    def of_size(self, size: str) -> Self:
        """The row with the blocks of a model size (a letter); most rows are equal in all sizes."""
        return self


@dataclass(frozen=True, config=STRICT)
class WideRow(LayerRow):
    """A row that sets the number of channels. Repeated, it is a sequence of blocks."""

    channels: Channels
    repeats: Count = field(default=1, kw_only=True)

    def block(self, channels: int) -> nn.Module:
        """One repeat for an input with this number of channels."""
        return self.layer(channels, *self.arguments)

    def build(self, channels: Sequence[int]) -> nn.Module:
        first, *others = [self.block(channels[0] if i == 0 else self.channels) for i in range(self.repeats)]
        return nn.Sequential(first, *others) if others else first

    def scaled(self, depth: float, width: float, most: int = 2**15) -> Self:
        """Channels: min(channels, most) x width, rounded up to a multiple of 8.
        Repeats above 1: max(round(repeats x depth), 1)."""
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
class NestedRow(WideRow):
    """A row whose repeats are inside the block."""

    def build(self, channels: Sequence[int]) -> nn.Module:
        return self.layer(channels[0], self.channels, self.repeats, *self.arguments[1:])


@dataclass(frozen=True, config=STRICT)
class C3Row(NestedRow):
    """Bottlenecks inside."""

    layer = blocks.C3
    shortcut: bool = True


@dataclass(frozen=True, config=STRICT)
class C2fRow(NestedRow):
    """Bottlenecks inside."""

    layer = blocks.C2f
    shortcut: bool = False


@dataclass(frozen=True, config=STRICT)
class C3k2Row(NestedRow):
    """Bottlenecks inside, C3 blocks (`c3k`), or bottlenecks with attention."""

    layer = blocks.C3k2
    c3k: bool = False
    expansion: Annotated[float, Field(gt=0, le=100)] = 0.5
    attention: bool = False

    def of_size(self, size: str) -> Self:
        """The large sizes have C3 blocks in all rows."""
        return replace(self, c3k=self.c3k or size in ("m", "l", "x"))


@dataclass(frozen=True, config=STRICT)
class C2PSARow(NestedRow):
    """Attention blocks inside."""

    layer = blocks.C2PSA


@dataclass(frozen=True, config=STRICT)
class A2C2fRow(NestedRow):
    """Pairs of attention blocks inside, each in `areas` areas of the picture; without `attention` C3 blocks."""

    layer = blocks.A2C2f
    attention: bool = True
    areas: Annotated[int, Field(ge=-1, le=127)] = 1  # published tables have -1 without attention
    scaled_residual: bool = False

    def of_size(self, size: str) -> Self:
        """The two largest sizes scale the residual."""
        return replace(self, scaled_residual=self.scaled_residual or size in ("l", "x"))


@dataclass(frozen=True, config=STRICT)
class SPPRow(WideRow):
    """Max-pools of these sizes side by side."""

    layer = blocks.SPP
    kernels: tuple[Kernel, ...] = (5, 9, 13)


@dataclass(frozen=True, config=STRICT)
class SPPFRow(WideRow):
    """Max-pools of this size in a chain."""

    layer = blocks.SPPF
    kernel: Kernel = 5
    pools: Count = 3
    residual: bool = False


@dataclass(frozen=True, config=STRICT)
class UpsampleRow(LayerRow):
    """Enlarges by `factor`; published tables contain `size`, always None."""

    layer = nn.Upsample
    size: None = None
    factor: Kernel = 2
    mode: Literal["nearest"] = "nearest"


@dataclass(frozen=True, config=STRICT)
class ConcatRow(LayerRow):
    """Concatenates the channels of its sources."""

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
    """A head with one source per level."""

    num_classes: Channels = 80

    def build(self, channels: Sequence[int]) -> nn.Module:
        return self.layer(channels, *self.arguments)


@dataclass(frozen=True, config=STRICT)
class AnchorFreeRow(HeadRow):
    """The anchor-free head."""

    layer = heads.AnchorFree


@dataclass(frozen=True, config=STRICT)
class LightAnchorFreeRow(HeadRow):
    """The anchor-free head with depth-wise convolutions."""

    layer = heads.LightAnchorFree


@dataclass(frozen=True, config=STRICT)
class EndToEndRow(HeadRow):
    """The pair of anchor-free heads that needs no suppression."""

    layer = heads.EndToEnd


@dataclass(frozen=True, config=STRICT)
class DetectRow(HeadRow):
    """The anchor-based head."""

    layer = heads.Detect
    num_anchors: Count = 3
