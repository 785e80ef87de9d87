"""BatchNorm whose running statistics are updated by the training loop, not by the forward pass.

A training forward writes the microbatch's mean and unbiased variance into scratch memory. Updating the running
statistics r with a step's n microbatches s_0 ... s_(n-1) in order, r <- (1 - m) r + m s_i, is one weighted sum:

    r <- (1 - m)^n r + sum_i m (1 - m)^(n - 1 - i) s_i

It is reduced in the same tree as the gradients, so neither statistics nor traffic depend on the worker count. Without a
`Statistics`, and in eval mode, the layer is `torch.nn.BatchNorm2d`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ray_yolo.ops import torch_internals
from ray_yolo.ops.synchronised_norm import Exchange, synchronised_norm

MOMENTUM = 0.03


class Normalise(Protocol):
    """What normalises a microbatch by its own statistics."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, *, silu: bool
                 ) -> Tensor:
        """Weight times (x - mean) / sqrt(variance + eps), plus bias, and SiLU of that if `silu`; like x.

        Args:
            x: (B, C, H, W).
            mean: (C,) scratch memory, which gets the means of the channels.
            var: (C,) scratch memory, which gets their unbiased variances.
        """


class BatchNorm(nn.BatchNorm2d):
    """YOLO's BatchNorm (eps 1e-3, momentum 0.03) with the tensors of `nn.BatchNorm2d`."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3, momentum=MOMENTUM)
        # Plain attributes: a registered buffer would enter the state dict and DDP's buffer broadcast.
        self.scratch: tuple[Tensor, Tensor] | None = None
        """Memory for a microbatch's mean and variance, set by `Statistics`; None: the layer is torch's own."""
        self.normalise: Normalise = plain_norm
        """What normalises a microbatch, set by `Statistics`."""

    def forward(self, x: Tensor, silu: bool = False) -> Tensor:
        """Normalised values, and SiLU of them if `silu`."""
        if not (self.training and self.scratch is not None):
            x = super().forward(x)
            return silu_of(x) if silu else x
        return self.normalise(x, self.weight, self.bias, *self.scratch, self.eps, silu=silu)


def silu_of(x: Tensor) -> Tensor:
    """x sigmoid(x), which may take the place of x."""
    # Under autograd an in-place SiLU would first copy its input, which the gradient needs.
    return F.silu(x, inplace=not x.requires_grad)


def plain_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, *, silu: bool) -> Tensor:
    """A `Normalise` by torch's BatchNorm."""
    # with momentum 1.0 the "running" average is the microbatch's own mean and unbiased variance
    x = F.batch_norm(x, mean, var, weight, bias, training=True, momentum=1.0, eps=eps)
    return silu_of(x) if silu else x


def spread_norm(exchange: Exchange, *, by_kernels: bool = False) -> Normalise:
    """A `Normalise` of microbatches that are spread over workers.

    Args:
        by_kernels: use torch's kernels for it, which only GPUs have.
    """
    normalise = synchronised_norm if by_kernels else _by_operations

    # The copies of a model share a function; it is not copied, as an object with process groups would be
    def spread(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, *, silu: bool) -> Tensor:
        x = normalise(x, weight, bias, mean, var, eps, exchange)
        return silu_of(x) if silu else x

    return spread


def _by_operations(x: Tensor, weight: Tensor, bias: Tensor, scratch_mean: Tensor, scratch_var: Tensor, eps: float,
                   exchange: Exchange) -> Tensor:
    """Normalise with the mean and variance over all workers' images (this worker may have none).

    Two passes, because E[x^2] - E[x]^2 cancels in fp32.
    """
    wide = x.float()
    count_here = torch.full((1,), float(x.numel() // x.shape[1]), device=x.device)
    total = exchange.global_sum(torch.cat([wide.sum((0, 2, 3)), count_here]))
    sums, count = total[:-1], total[-1].detach()
    mean = sums / count
    centred = wide - mean[:, None, None]
    var = exchange.global_sum(centred.square().sum((0, 2, 3))) / count
    with torch.no_grad():
        scratch_mean.copy_(mean)
        scratch_var.copy_(var * (count / (count - 1).clamp(min=1)))
    scale = weight * torch.rsqrt(var + eps)
    return (centred * scale[:, None, None] + bias[:, None, None]).to(x.dtype)


class Statistics:
    """The BatchNorm statistics of a model as one flat vector: records a microbatch's, applies a step's.

    The vector is [means of all layers, unbiased variances of all layers] of length `size`.
    """

    def __init__(self, model: nn.Module, normalise: Normalise = plain_norm) -> None:
        self.layers = [layer for layer in model.modules() if isinstance(layer, BatchNorm)]
        self.channels = [layer.num_features for layer in self.layers]
        self.size = 2 * sum(self.channels)
        device = next(model.parameters()).device
        self._scratch = torch.zeros(self.size, device=device)
        means, variances = self._scratch.chunk(2)
        parts = zip(self.layers, means.split(self.channels), variances.split(self.channels), strict=True)
        for layer, mean, variance in parts:
            layer.scratch = (mean, variance)
            layer.normalise = normalise

    def clear(self) -> None:
        """Zero the scratch before a forward: torch adds old x (1 - momentum), and 0 x NaN is NaN."""
        self._scratch.zero_()

    def recorded(self, later: int) -> Tensor:
        """Statistics of the last forward, weighted for a microbatch that `later` ones follow, (size,)."""
        return self._scratch * (MOMENTUM * (1 - MOMENTUM) ** later)

    @torch.no_grad()
    def apply(self, total: Tensor, count: int) -> None:
        """Update the running statistics after a step of `count` microbatches; `total` is the sum of their `recorded`.
        """
        means = [layer.get_buffer("running_mean") for layer in self.layers]
        variances = [layer.get_buffer("running_var") for layer in self.layers]
        counters = [layer.get_buffer("num_batches_tracked") for layer in self.layers]
        running = means + variances  # in the order of the flat vector
        torch_internals.mul_(running, (1 - MOMENTUM) ** count)
        torch_internals.add_(running, list(total.split([*self.channels, *self.channels])))
        torch_internals.add_(counters, count)
