"""BatchNorm over the images of all workers, by the kernels that torch has for it on GPUs.

| pass | on each worker | between workers |
|---|---|---|
| forward | mean and 1 / sqrt(variance + eps) of its own values | one gather of both and the number of values |
| | those of all values; normalised values | |
| backward | sums of the gradient, and of the gradient times (x - mean) | one sum of both |
| | gradient of its own values | |

`torch.nn.SyncBatchNorm` runs the same kernels, but waits on the host for the counts of workers without images, and
updates running statistics at once.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Exchange(Protocol):
    """What BatchNorm needs of the workers over which a microbatch is spread. All of them call both in one order."""

    def global_sum(self, x: Tensor) -> Tensor:
        """Sum of `x` over the workers, differentiable."""

    def stack(self, x: Tensor) -> Tensor:
        """Each worker's `x`, in the order of their ranks, (workers, *shape)."""


def synchronised_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float,
                      exchange: Exchange) -> Tensor:
    """Weight times (x - mean) / sqrt(variance + eps), plus bias, with the statistics of all workers' values; like x.

    Args:
        x: (B, C, H, W) this worker's images, on a GPU. B may be 0, but not on the first worker.
        mean: (C,) gets the means of the channels.
        var: (C,) gets their unbiased variances.
    """
    normalised: Tensor = _SynchronisedNorm.apply(x, weight, bias, mean, var, eps, exchange)
    return normalised


class _SynchronisedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, scratch_mean: Tensor, scratch_var: Tensor,
                eps: float, exchange: Exchange) -> Tensor:
        channels = x.shape[1]
        x = x.contiguous(memory_format=torch.channels_last)
        # [mean of each channel, 1 / standard deviation of each channel, number of values a channel]
        own = weight.new_ones(2 * channels + 1)  # without images, any finite values with a count of 0
        own[-1] = x.numel() // channels
        if x.numel():
            torch.cat(torch.batch_norm_stats(x, eps), out=own[:-1])
        means, inverse_stds, counts = exchange.stack(own).split([channels, channels, 1], 1)
        counts = counts.flatten()
        # with momentum 1.0 the "running" statistics are those of these values
        mean, inverse_std = torch.batch_norm_gather_stats_with_counts(
            x, means, inverse_stds, scratch_mean, scratch_var, 1.0, eps, counts)
        ctx.save_for_backward(x, weight, mean, inverse_std, counts)
        ctx.exchange = exchange
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse_std, eps) if x.numel() else torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_std, counts = ctx.saved_tensors
        if not x.numel():
            if ctx.needs_input_grad[0]:
                ctx.exchange.global_sum(mean.new_zeros(2 * len(mean)))
            return gradient, torch.zeros_like(weight), torch.zeros_like(weight), None, None, None, None
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        sums, products, of_weight, of_bias = torch.batch_norm_backward_reduce(
            gradient, x, mean, inverse_std, weight, *ctx.needs_input_grad[:3])
        of_input = None
        if ctx.needs_input_grad[0]:
            total = ctx.exchange.global_sum(torch.cat((sums, products)))
            # torch's stub of this function still lacks its last argument, the counts.
            of_input = torch.batch_norm_backward_elemt(
                gradient, x, mean, inverse_std, weight, *total.chunk(2), counts.to(torch.int32))  # type: ignore[call-arg]
        return of_input, of_weight, of_bias, None, None, None, None
