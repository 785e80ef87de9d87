"""The building blocks of all model families. Attribute names follow the published tensors.

The signature of a block is also the schema of its row in a model table, see `models.rows`: annotations are checked,
`inputs` and `repeats` are filled in, and parameters after `*` cannot be set by a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ray_yolo.models.batch_norm import BatchNorm, plain_norm, silu_of

# The bounds only protect from typing errors that would exhaust memory.
Channels = Annotated[int, Field(ge=1, le=2**15)]
Count = Annotated[int, Field(ge=1, le=1000)]
Kernel = Annotated[int, Field(ge=1, le=127)]
Padding = Annotated[int, Field(ge=0, le=127)]


class Conv(nn.Module):
    """Convolution without bias, BatchNorm, and SiLU if `active`. `padding` None: half the kernel."""

    def __init__(self, inputs: int, outputs: Channels, kernel: Kernel = 1, stride: Kernel = 1,
                 padding: Padding | None = None, groups: Channels = 1, *, active: bool = True) -> None:
        super().__init__()
        self.active = active
        padding = kernel // 2 if padding is None else padding
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        self.bn: nn.Module = BatchNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.active and isinstance(self.bn, BatchNorm) and self.bn.normalise is not plain_norm:
            return self.bn(x, silu=True)  # a kernel may do both
        x = self.bn(x)
        return silu_of(x) if self.active else x


class DWConv(Conv):
    """Depth-wise convolution: as many groups as input and output channels allow."""

    def __init__(self, inputs: int, outputs: Channels, kernel: Kernel = 1, stride: Kernel = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=math.gcd(inputs, outputs))


class Bottleneck(nn.Module):
    """Two convolutions, the second 3x3, plus the input if `shortcut` and the channels are equal."""

    def __init__(self, inputs: int, outputs: Channels, shortcut: bool = True, *, expansion: float = 0.5,
                 kernel: int = 1) -> None:
        super().__init__()
        hidden = int(outputs * expansion)
        self.cv1 = Conv(inputs, hidden, kernel)
        self.cv2 = Conv(hidden, outputs, 3)
        self.adds = shortcut and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv2(self.cv1(x))
        return x + y if self.adds else y


class C3(nn.Module):
    """Two 1x1 branches, one followed by bottlenecks, merged by a third 1x1 convolution."""

    def __init__(self, inputs: int, outputs: Channels, repeats: Count = 1, shortcut: bool = True, *, kernel: int = 1
                 ) -> None:
        super().__init__()
        hidden = outputs // 2
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv(inputs, hidden)
        self.cv3 = Conv(2 * hidden, outputs)
        self.m = nn.Sequential()
        for _ in range(repeats):
            self.m.append(Bottleneck(hidden, hidden, shortcut, expansion=1.0, kernel=kernel))

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class C2f(nn.Module):
    """A 1x1 convolution split into halves, a chain of blocks on the second, and a 1x1 convolution of all outputs.

    `inner` builds a block for a number of channels; default: a bottleneck of full width.
    """

    def __init__(self, inputs: int, outputs: Channels, repeats: Count = 1, shortcut: bool = False, *,
                 expansion: float = 0.5, inner: Callable[[int], nn.Module] | None = None) -> None:
        def bottleneck(channels: int) -> nn.Module:
            return Bottleneck(channels, channels, shortcut, expansion=1.0, kernel=3)

        super().__init__()
        hidden = int(outputs * expansion)
        inner = inner or bottleneck
        self.cv1 = Conv(inputs, 2 * hidden)
        self.cv2 = Conv((2 + repeats) * hidden, outputs)
        self.m = nn.ModuleList(inner(hidden) for _ in range(repeats))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.cv1(x).chunk(2, 1))
        for block in self.m:
            parts.append(block(parts[-1]))
        return self.cv2(torch.cat(parts, 1))


class C3k2(C2f):
    """C2f with other inner blocks: bottlenecks of half width, C3 blocks (`c3k`), or bottlenecks followed by
    self-attention (`attention`)."""

    true_in_sizes: ClassVar[Mapping[str, str]] = {"c3k": "mlx"}

    def __init__(self, inputs: int, outputs: Channels, repeats: Count = 1, c3k: bool = False,
                 expansion: Annotated[float, Field(gt=0, le=100)] = 0.5, attention: bool = False) -> None:
        def inner(channels: int) -> nn.Module:
            if attention:
                return nn.Sequential(Bottleneck(channels, channels, kernel=3),
                                     PSABlock(channels, max(channels // 64, 1)))
            if c3k:
                return C3(channels, channels, 2, kernel=3)
            return Bottleneck(channels, channels, kernel=3)

        super().__init__(inputs, outputs, repeats, expansion=expansion, inner=inner)


class Attention(nn.Module):
    """Self-attention over the cells of a feature map (c, h, w), plus a depth-wise convolution of the values.

    softmax over cells of (query . key) / sqrt(key width), times the values. The channels of `qkv` are ordered by head,
    and within a head by query, key, value.
    """

    def __init__(self, channels: int, heads: int, key_share: float = 0.5, kernel: int = 3) -> None:
        super().__init__()
        width = channels // heads  # the width of a value; queries and keys may be narrower
        key_width = int(width * key_share)
        self.heads = heads
        self.widths = (key_width, key_width, width)
        self.qkv = Conv(channels, heads * sum(self.widths), active=False)
        self.proj = Conv(channels, channels, active=False)
        self.pe = Conv(channels, channels, kernel, groups=channels, active=False)

    def forward(self, x: Tensor, areas: int = 1) -> Tensor:
        """`areas`: number of equal parts of the flattened map; a cell attends to the cells of its own part."""
        batch, channels, height, width = x.shape
        cells = self.qkv(x).reshape(batch, self.heads, sum(self.widths), areas, height * width // areas)
        query, key, value = cells.transpose(2, 3).split(self.widths, 3)  # (B, heads, areas, width, cells)
        scale = self.widths[0] ** -0.5
        weights = (query.transpose(3, 4) @ key * scale).softmax(4)  # (B, heads, areas, cells, cells)
        attended = value @ weights.transpose(3, 4)

        def as_map(cells: Tensor) -> Tensor:
            return cells.transpose(2, 3).reshape(batch, channels, height, width)

        return self.proj(as_map(attended) + self.pe(as_map(value)))


class PSABlock(nn.Module):
    """Attention, then two 1x1 convolutions, each with a residual connection."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.attn = Attention(channels, heads)
        self.ffn = nn.Sequential(Conv(channels, 2 * channels), Conv(2 * channels, channels, active=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.ffn(x)


class C2PSA(nn.Module):
    """A 1x1 convolution split into halves, attention blocks on the second, and a 1x1 convolution of both."""

    def __init__(self, inputs: int, outputs: Channels, repeats: Count = 1) -> None:
        super().__init__()
        hidden = outputs // 2
        self.cv1 = Conv(inputs, 2 * hidden)
        self.cv2 = Conv(2 * hidden, outputs)
        self.m = nn.Sequential(*(PSABlock(hidden, max(hidden // 64, 1)) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.cv1(x).chunk(2, 1)
        return self.cv2(torch.cat((first, self.m(second)), 1))


class AreaBlock(nn.Module):
    """Area attention (Tian et al. 2025, arXiv:2502.12524), then two 1x1 convolutions, each with a residual."""

    def __init__(self, channels: int, areas: int, ratio: float) -> None:
        super().__init__()
        hidden = int(channels * ratio)
        self.areas = areas
        self.attn = Attention(channels, max(channels // 32, 1), key_share=1.0, kernel=7)
        self.mlp = nn.Sequential(Conv(channels, hidden), Conv(hidden, channels, active=False))
        for convolve in self.modules():
            if isinstance(convolve, nn.Conv2d):
                nn.init.trunc_normal_(convolve.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x, self.areas)
        return x + self.mlp(x)


class A2C2f(nn.Module):
    """A 1x1 convolution, a chain of blocks, and a 1x1 convolution of all outputs.

    The blocks are pairs of area attention blocks, or C3 blocks without `attention`. `scaled_residual` (with
    attention): the result is the input plus a learned factor per channel times the output, and the blocks are narrower.
    """

    true_in_sizes: ClassVar[Mapping[str, str]] = {"scaled_residual": "lx"}

    def __init__(self, inputs: int, outputs: Channels, repeats: Count = 1, attention: bool = True,
                 areas: Annotated[int, Field(ge=-1, le=127)] = 1,  # published tables have -1 without attention
                 scaled_residual: bool = False) -> None:
        super().__init__()
        hidden = outputs // 2
        ratio = 1.2 if scaled_residual else 2.0
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv((1 + repeats) * hidden, outputs)
        self.gamma = nn.Parameter(torch.full((outputs,), 0.01)) if attention and scaled_residual else None
        self.m = nn.ModuleList()
        for _ in range(repeats):
            if attention:
                block: nn.Module = nn.Sequential(AreaBlock(hidden, areas, ratio), AreaBlock(hidden, areas, ratio))
            else:
                block = C3(hidden, hidden, 2, kernel=3)
            self.m.append(block)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.cv1(x)]
        for block in self.m:
            parts.append(block(parts[-1]))
        y = self.cv2(torch.cat(parts, 1))
        return y if self.gamma is None else x + self.gamma.view(1, -1, 1, 1) * y


class SPP(nn.Module):
    """Parallel max-pools of several sizes between two 1x1 convolutions."""

    def __init__(self, inputs: int, outputs: Channels, kernels: tuple[Kernel, ...] = (5, 9, 13)) -> None:
        super().__init__()
        hidden = inputs // 2
        self.kernels = kernels
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv(hidden * (len(kernels) + 1), outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        pooled = [_same_max_pool(x, kernel) for kernel in self.kernels]
        return self.cv2(torch.cat([x, *pooled], 1))


class SPPF(nn.Module):
    """A chain of max-pools between two 1x1 convolutions: three of kernel 5 equal `SPP` of 5, 9 and 13.

    `residual`: the first convolution has no activation, and the input is added.
    """

    def __init__(self, inputs: int, outputs: Channels, kernel: Kernel = 5, pools: Count = 3, residual: bool = False
                 ) -> None:
        super().__init__()
        hidden = inputs // 2
        self.kernel, self.pools, self.residual = kernel, pools, residual
        self.cv1 = Conv(inputs, hidden, active=not residual)
        self.cv2 = Conv((1 + pools) * hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.cv1(x)]
        for _ in range(self.pools):
            parts.append(_same_max_pool(parts[-1], self.kernel))
        y = self.cv2(torch.cat(parts, 1))
        return x + y if self.residual else y


class Upsample(nn.Upsample):
    """Enlarges by `factor`. Published tables contain `size`, always None."""

    def __init__(self, size: None = None, factor: Kernel = 2, mode: Literal["nearest"] = "nearest") -> None:
        super().__init__(size, factor, mode)


class MaxPool2d(nn.MaxPool2d):
    """Maximum over a square window."""

    def __init__(self, kernel: Kernel, stride: Kernel, padding: Padding = 0) -> None:
        super().__init__(kernel, stride, padding)


class ZeroPad2d(nn.ZeroPad2d):
    """Pads by (left, right, top, bottom) pixels."""

    def __init__(self, padding: tuple[Padding, Padding, Padding, Padding]) -> None:
        super().__init__(padding)


class Concat(nn.Module):
    """Concatenates the channels of its inputs."""

    def __init__(self, dimension: Literal[1] = 1) -> None:  # published tables contain it
        super().__init__()

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat(inputs, 1)


def avoid_slow_convolutions(model: nn.Module) -> None:
    """Make torch use its fast CPU kernels for 1x1 convolutions.

    With under 16 images on one thread torch computes them by `_slow_conv2d`, image by image, unless they are dilated.
    Dilation has no effect on a 1x1 kernel. A step of two microbatches of 8 is 1.06 times as fast.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            module.dilation = (2, 2)


def _same_max_pool(x: Tensor, kernel: int) -> Tensor:
    return F.max_pool2d(x, kernel, stride=1, padding=kernel // 2)
