"""The building blocks of the model families. Attribute names are those of the published tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ray_yolo.models.batch_norm import BatchNorm


class Conv(nn.Module):
    """Convolution without bias, BatchNorm, SiLU unless it is not `active`. `padding` None keeps the size at stride 1
    (odd kernels)."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, padding: int | None = None,
                 groups: int = 1, *, active: bool = True) -> None:
        super().__init__()
        self.active = active
        padding = kernel // 2 if padding is None else padding
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        self.bn: nn.Module = BatchNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        if not self.active:
            return x
        # Under autograd an in-place SiLU copies its input first, because its gradient needs it.
        return F.silu(x, inplace=not x.requires_grad)


class Bottleneck(nn.Module):
    """Two convolutions, the second 3x3, around which the input is added when `shortcut` and the channels are equal."""

    def __init__(self, inputs: int, outputs: int, shortcut: bool = True, expansion: float = 0.5, kernel: int = 1
                 ) -> None:
        super().__init__()
        hidden = int(outputs * expansion)
        self.cv1 = Conv(inputs, hidden, kernel)
        self.cv2 = Conv(hidden, outputs, 3)
        self.adds = shortcut and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv2(self.cv1(x))
        return x + y if self.adds else y


class C3(nn.Module):
    """Two 1x1 branches, one followed by bottlenecks, joined by a third 1x1 convolution."""

    def __init__(self, inputs: int, outputs: int, repeats: int = 1, shortcut: bool = True, kernel: int = 1) -> None:
        super().__init__()
        hidden = outputs // 2
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv(inputs, hidden)
        self.cv3 = Conv(2 * hidden, outputs)
        self.m = nn.Sequential(*(Bottleneck(hidden, hidden, shortcut, 1.0, kernel) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class C2f(nn.Module):
    """A 1x1 convolution cut into halves, a chain of blocks behind the second, and all of it joined by a 1x1.

    `inner` makes a block of so many channels; left out: a bottleneck that does not narrow.
    """

    def __init__(self, inputs: int, outputs: int, repeats: int = 1, shortcut: bool = True, expansion: float = 0.5,
                 inner: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__()
        hidden = int(outputs * expansion)
        inner = inner or (lambda channels: Bottleneck(channels, channels, shortcut, 1.0, kernel=3))
        self.cv1 = Conv(inputs, 2 * hidden)
        self.cv2 = Conv((2 + repeats) * hidden, outputs)
        self.m = nn.ModuleList(inner(hidden) for _ in range(repeats))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.cv1(x).chunk(2, 1))
        for block in self.m:
            parts.append(block(parts[-1]))
        return self.cv2(torch.cat(parts, 1))


class C3k2(C2f):
    """C2f whose inner blocks are bottlenecks that narrow; under `c3k` C3 blocks; under `attention` bottlenecks, each
    with self-attention behind it."""

    def __init__(self, inputs: int, outputs: int, repeats: int = 1, c3k: bool = False, expansion: float = 0.5,
                 attention: bool = False) -> None:
        def inner(channels: int) -> nn.Module:
            if attention:
                return nn.Sequential(Bottleneck(channels, channels, kernel=3),
                                     PSABlock(channels, max(channels // 64, 1)))
            return C3(channels, channels, 2, kernel=3) if c3k else Bottleneck(channels, channels, kernel=3)

        super().__init__(inputs, outputs, repeats, expansion=expansion, inner=inner)


class Attention(nn.Module):
    """Self-attention of the cells of a picture (c, h, w), with a depth-wise convolution of the values added.

    softmax over cells of (query . key) / sqrt(key width), times the values. The channels of `qkv` run over heads;
    within
    a head queries, keys, values.
    """

    def __init__(self, channels: int, heads: int, key_share: float = 0.5, kernel: int = 3) -> None:
        super().__init__()
        self.heads, width = heads, channels // heads
        self.widths = (int(width * key_share), int(width * key_share), width)
        self.qkv = Conv(channels, heads * sum(self.widths), active=False)
        self.proj = Conv(channels, channels, active=False)
        self.pe = Conv(channels, channels, kernel, groups=channels, active=False)

    def forward(self, x: Tensor, areas: int = 1) -> Tensor:
        """`areas`: into how many equal stretches the flattened picture is cut; a cell sees those of its own stretch."""
        batch, channels, height, width = x.shape
        cells = self.qkv(x).reshape(batch, self.heads, sum(self.widths), areas, height * width // areas)
        query, key, value = cells.transpose(2, 3).split(self.widths, 3)  # (B, heads, areas, width, cells)
        weights = (query.transpose(3, 4) @ key * self.widths[0] ** -0.5).softmax(4)
        seen, value = ((part.transpose(2, 3).reshape(batch, channels, height, width))
                       for part in (value @ weights.transpose(3, 4), value))
        return self.proj(seen + self.pe(value))


class PSABlock(nn.Module):
    """Attention, then two 1x1 convolutions, each around which the input is added."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.attn = Attention(channels, heads)
        self.ffn = nn.Sequential(Conv(channels, 2 * channels), Conv(2 * channels, channels, active=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.ffn(x)


class C2PSA(nn.Module):
    """A 1x1 convolution cut into halves, attention blocks behind the second, joined by a 1x1."""

    def __init__(self, inputs: int, outputs: int, repeats: int = 1) -> None:
        super().__init__()
        hidden = outputs // 2
        self.cv1 = Conv(inputs, 2 * hidden)
        self.cv2 = Conv(2 * hidden, outputs)
        self.m = nn.Sequential(*(PSABlock(hidden, max(hidden // 64, 1)) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.cv1(x).chunk(2, 1)
        return self.cv2(torch.cat((first, self.m(second)), 1))


class AreaBlock(nn.Module):
    """Attention within areas of the picture (Tian et al. 2025, arXiv:2502.12524), then two 1x1 convolutions."""

    def __init__(self, channels: int, areas: int, ratio: float) -> None:
        super().__init__()
        hidden = int(channels * ratio)
        self.areas = areas
        self.attn = Attention(channels, channels // 32, key_share=1.0, kernel=7)
        self.mlp = nn.Sequential(Conv(channels, hidden), Conv(hidden, channels, active=False))
        for convolve in self.modules():
            if isinstance(convolve, nn.Conv2d):
                nn.init.trunc_normal_(convolve.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x, self.areas)
        return x + self.mlp(x)


class A2C2f(nn.Module):
    """A 1x1 convolution, a chain of blocks behind it, and all of it joined by a 1x1.

    The blocks are pairs of attention blocks; without `areas` C3 blocks. `scaled`: the result is added to the input,
    times a learned factor for each channel, and the blocks are narrower.
    """

    def __init__(self, inputs: int, outputs: int, repeats: int = 1, areas: int = 0, scaled: bool = False) -> None:
        super().__init__()
        hidden, ratio = outputs // 2, 1.2 if scaled else 2.0
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv((1 + repeats) * hidden, outputs)
        self.gamma = nn.Parameter(torch.full((outputs,), 0.01)) if areas and scaled else None
        self.m = nn.ModuleList(
            nn.Sequential(AreaBlock(hidden, areas, ratio), AreaBlock(hidden, areas, ratio)) if areas else
            C3(hidden, hidden, 2, kernel=3) for _ in range(repeats))

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.cv1(x)]
        for block in self.m:
            parts.append(block(parts[-1]))
        y = self.cv2(torch.cat(parts, 1))
        return y if self.gamma is None else x + self.gamma.view(1, -1, 1, 1) * y


class SPP(nn.Module):
    """Max-pools of several sizes side by side between two 1x1 convolutions."""

    def __init__(self, inputs: int, outputs: int, kernels: tuple[int, ...] = (5, 9, 13)) -> None:
        super().__init__()
        hidden = inputs // 2
        self.kernels = kernels
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv(hidden * (len(kernels) + 1), outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        return self.cv2(torch.cat([x, *(_same_max_pool(x, kernel) for kernel in self.kernels)], 1))


class SPPF(nn.Module):
    """Three max-pools in a chain between two 1x1 convolutions: for kernel 5 equal to `SPP` of 5, 9 and 13.

    `residual`: the first convolution is not active, and the input is added.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int = 5, residual: bool = False) -> None:
        super().__init__()
        hidden = inputs // 2
        self.kernel, self.residual = kernel, residual
        self.cv1 = Conv(inputs, hidden, active=not residual)
        self.cv2 = Conv(4 * hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        pools = [self.cv1(x)]
        for _ in range(3):
            pools.append(_same_max_pool(pools[-1], self.kernel))
        y = self.cv2(torch.cat(pools, 1))
        return x + y if self.residual else y


class Concat(nn.Module):
    """Joins the channels of its inputs."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat(inputs, 1)


def avoid_slow_convolutions(model: nn.Module) -> None:
    """Have a CPU compute 1x1 convolutions as it does all others.

    Under 16 images and on one thread torch leaves them to `_slow_conv2d`, image by image, unless they are dilated,
    which a kernel of one pixel does not notice: a step of two microbatches of 8 is 1.06 times as fast.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            module.dilation = (2, 2)


def _same_max_pool(x: Tensor, kernel: int) -> Tensor:
    return F.max_pool2d(x, kernel, stride=1, padding=kernel // 2)
