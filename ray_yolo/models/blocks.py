"""The building blocks of the model families. Attribute names are those of the published tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ray_yolo.models.batch_norm import BatchNorm


class Conv(nn.Module):
    """Convolution without bias, BatchNorm, SiLU. `padding` None keeps the size at stride 1 (odd kernels)."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, padding: int | None = None,
                 groups: int = 1) -> None:
        super().__init__()
        padding = kernel // 2 if padding is None else padding
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        self.bn: nn.Module = BatchNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
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

    def __init__(self, inputs: int, outputs: int, repeats: int = 1, shortcut: bool = True) -> None:
        super().__init__()
        hidden = outputs // 2
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv(inputs, hidden)
        self.cv3 = Conv(2 * hidden, outputs)
        self.m = nn.Sequential(*(Bottleneck(hidden, hidden, shortcut, expansion=1.0) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class C2f(nn.Module):
    """A 1x1 convolution cut into halves, a chain of bottlenecks behind the second, and all of it joined by a 1x1."""

    def __init__(self, inputs: int, outputs: int, repeats: int = 1, shortcut: bool = True) -> None:
        super().__init__()
        hidden = outputs // 2
        self.cv1 = Conv(inputs, 2 * hidden)
        self.cv2 = Conv((2 + repeats) * hidden, outputs)
        self.m = nn.ModuleList(Bottleneck(hidden, hidden, shortcut, 1.0, kernel=3) for _ in range(repeats))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.cv1(x).chunk(2, 1))
        for bottleneck in self.m:
            parts.append(bottleneck(parts[-1]))
        return self.cv2(torch.cat(parts, 1))


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
    """Three max-pools in a chain between two 1x1 convolutions: for kernel 5 equal to `SPP` of 5, 9 and 13."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 5) -> None:
        super().__init__()
        hidden = inputs // 2
        self.kernel = kernel
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv(4 * hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        pools = [self.cv1(x)]
        for _ in range(3):
            pools.append(_same_max_pool(pools[-1], self.kernel))
        return self.cv2(torch.cat(pools, 1))


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
