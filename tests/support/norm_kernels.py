"""torch's kernels for synchronised BatchNorm, which only GPUs have, written out for a CPU by their formulas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Context in which a CPU has them. To a dispatch mode, each is one operation."""
    library = torch.library.Library("aten", "IMPL")
    for function in (batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt,
                     batch_norm_backward_reduce, batch_norm_backward_elemt):
        library.impl(function.__name__, function, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _wide(channels: Tensor) -> Tensor:
    return channels[:, None, None]


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(variance + eps) of each channel."""
    var, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
    return mean, (var + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
        x: Tensor, means: Tensor, factors: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float,
        eps: float, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Those of all workers' values, from their own: worker by worker, each added to those before it."""
    assert counts[0] > 0  # the kernel would divide 0 by 0
    count = torch.zeros(())
    mean, squares = torch.zeros_like(means[0]), torch.zeros_like(means[0])
    for own_mean, own_factor, own_count in zip(means, factors, counts, strict=True):
        both = count + own_count
        squares = (squares + (own_factor ** -2 - eps) * own_count
                   + (mean - own_mean).square() * count * own_count / both)
        mean = (count * mean + own_count * own_mean) / both
        count = both
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(squares / (count - 1), momentum)
    return mean, (squares / count + eps).rsqrt()


def batch_norm_elemt(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, factor: Tensor, eps: float) -> Tensor:
    """Normalised values."""
    assert x.numel()  # a kernel is not launched for none
    return ((x - _wide(mean)) * _wide(weight * factor) + _wide(bias)).to(x.dtype)


def batch_norm_backward_reduce(
        gradient: Tensor, x: Tensor, mean: Tensor, factor: Tensor, weight: Tensor, of_input: bool, of_weight: bool,
        of_bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums of the gradient and of the gradient times (x - mean); the gradients of weight and bias."""
    assert x.numel()
    sums = gradient.float().sum((0, 2, 3))
    products = (gradient * (x - _wide(mean))).sum((0, 2, 3))
    return sums, products, products * factor, sums.clone()


def batch_norm_backward_elemt(gradient: Tensor, x: Tensor, mean: Tensor, factor: Tensor, weight: Tensor, sums: Tensor,
                              products: Tensor, counts: Tensor) -> Tensor:
    """The gradient of x."""
    assert counts.dtype == torch.int32
    total = counts.sum()
    centred = gradient - _wide(sums / total) - (x - _wide(mean)) * _wide(factor.square() * products / total)
    return (centred * _wide(weight * factor)).to(x.dtype)
