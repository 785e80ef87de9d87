"""BatchNorm and the SiLU after it as kernels of Triton, for GPUs.

Values of fp16 and bf16 have 2 bytes. What memory carries for each element of a layer:

| pass | by torch's kernels | here |
|---|---|---|
| forward | statistics 2, normalised values 4, SiLU 4 | statistics 2, the rest 4 |
| backward | SiLU 6, sums 4, gradient 6 | sums 4, the rest 6 |

The normalised values are computed again where they are needed. Every sum is over parts of the values that only the
shape decides, and then over those parts: no order depends on which program is first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_ELEMENTS = 4096  # a program's tile has this many
_CHANNELS = 64  # a tile has at most this many
_PARTS = 512  # whose sums are added in a second step, at most
_FOLDED = 16  # channels of a program of that
_OPTIONS = {"enable_fp_fusion": False}  # the same rounding in each release of Triton


def fused_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, *, silu: bool) -> Tensor:
    """Weight times (x - mean) / sqrt(variance + eps), plus bias, and SiLU of that if `silu`; like x, channels last.

    Args:
        x: (B, C, H, W), not empty.
        mean: (C,) gets the means of the channels.
        var: (C,) gets their unbiased variances.
    """
    normalised: Tensor = _FusedNorm.apply(x, weight, bias, mean, var, eps, silu)
    return normalised


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, scratch_mean: Tensor, scratch_var: Tensor,
                eps: float, silu: bool) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        channels = x.shape[1]
        rows = x.numel() // channels
        tile_channels, tile_rows, parts, part_rows = _tiles(rows, channels)
        means, squares = torch.empty(2, parts, channels, device=x.device)
        mean, factor = torch.empty(2, channels, device=x.device)
        output = torch.empty_like(x)
        tiles_across = triton.cdiv(channels, tile_channels)
        with torch.cuda.device_of(x):  # Triton launches on the current one
            _part_statistics[parts, tiles_across](
                x, means, squares, rows, channels, part_rows, tile_rows, tile_channels, **_OPTIONS)
            _all_statistics[(triton.cdiv(channels, _FOLDED),)](
                means, squares, mean, factor, scratch_mean, scratch_var, rows, channels, parts, part_rows, eps,
                triton.next_power_of_2(parts), _FOLDED, **_OPTIONS)
            _normalise[triton.cdiv(rows, tile_rows), tiles_across](
                x, output, mean, factor, weight, bias, rows, channels, tile_rows, tile_channels, silu,
                **_OPTIONS)
        ctx.save_for_backward(x, weight, bias, mean, factor)
        ctx.silu = silu
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, factor = ctx.saved_tensors
        channels = x.shape[1]
        rows = x.numel() // channels
        gradient, stride = _with_rows(gradient)
        tile_channels, tile_rows, parts, part_rows = _tiles(rows, channels)
        sums, products = torch.empty(2, parts, channels, device=x.device)
        of_weight, of_bias = torch.empty_like(weight), torch.empty_like(bias)
        tiles_across = triton.cdiv(channels, tile_channels)
        of_input = None
        with torch.cuda.device_of(x):
            _part_gradients[parts, tiles_across](
                x, gradient, mean, factor, weight, bias, sums, products, rows, channels, stride, part_rows, tile_rows,
                tile_channels, ctx.silu, **_OPTIONS)
            _all_gradients[(triton.cdiv(channels, _FOLDED),)](
                sums, products, of_weight, of_bias, channels, parts, triton.next_power_of_2(parts), _FOLDED,
                **_OPTIONS)
            if ctx.needs_input_grad[0]:
                of_input = torch.empty_like(x)
                _input_gradient[triton.cdiv(rows, tile_rows), tiles_across](
                    x, gradient, of_input, mean, factor, weight, bias, of_weight, of_bias, rows, channels, stride,
                    tile_rows, tile_channels, ctx.silu, **_OPTIONS)
        return of_input, of_weight, of_bias, None, None, None, None


def _tiles(rows: int, channels: int) -> tuple[int, int, int, int]:
    """Channels and rows of a tile; parts, and rows of a part, which are whole tiles but for the last."""
    tile_channels = min(triton.next_power_of_2(channels), _CHANNELS)
    tile_rows = _ELEMENTS // tile_channels
    part_rows = triton.cdiv(triton.cdiv(rows, tile_rows), _PARTS) * tile_rows
    return tile_channels, tile_rows, triton.cdiv(rows, part_rows), part_rows


def _with_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor whose pixels are equally far apart, its channels side by side; and the distance of two pixels.

    A part of the channels of a wider tensor is so, too: the gradient of a concatenation's input.
    """
    _, channels, height, width = tensor.shape
    stride = tensor.stride(3) if width > 1 else tensor.stride(2) if height > 1 else tensor.stride(0)
    wanted = (height * width * stride, 1, width * stride, stride)
    if stride < channels or any(size > 1 and have != want for size, have, want in zip(
            tensor.shape, tensor.stride(), wanted, strict=True)):
        return tensor.contiguous(memory_format=torch.channels_last), channels
    return tensor, stride


@triton.jit
def _part_statistics(x: tl.tensor, means: tl.tensor, squares: tl.tensor, rows: tl.tensor, channels: tl.tensor,
                     part_rows: tl.tensor, tile_rows: tl.constexpr, tile_channels: tl.constexpr) -> None:
    """Mean, and sum of squared differences from it, of one part of the rows.

    Each tile's are computed in two passes over its values, which are read once, and merged with those before it.
    """
    part = tl.program_id(0)
    channel = tl.program_id(1) * tile_channels + tl.arange(0, tile_channels)
    begin = part.to(tl.int64) * part_rows
    end = tl.minimum(begin + part_rows, rows)
    mean = tl.zeros([tile_channels], tl.float32)
    square = tl.zeros([tile_channels], tl.float32)
    count = 0.0
    for first in range(begin, end, tile_rows):
        row = first + tl.arange(0, tile_rows)
        is_inside = (row < end)[:, None] & (channel < channels)[None, :]
        value = tl.load(x + row[:, None] * channels + channel[None, :], is_inside, 0.0).to(tl.float32)
        size = tl.minimum(end - first, tile_rows).to(tl.float32)
        tile_mean = tl.sum(value, 0) / size
        centred = tl.where(is_inside, value - tile_mean[None, :], 0.0)
        apart = tile_mean - mean
        total = count + size
        mean += apart * (size / total)
        square += tl.sum(centred * centred, 0) + apart * apart * (count * size / total)
        count = total
    place = part * channels + channel
    tl.store(means + place, mean, channel < channels)
    tl.store(squares + place, square, channel < channels)


@triton.jit
def _all_statistics(means: tl.tensor, squares: tl.tensor, mean: tl.tensor, factor: tl.tensor, scratch_mean: tl.tensor,
                    scratch_var: tl.tensor, rows: tl.tensor, channels: tl.tensor, parts: tl.tensor,
                    part_rows: tl.tensor, eps: tl.tensor, most_parts: tl.constexpr, tile_channels: tl.constexpr
                    ) -> None:
    """Mean and 1 / sqrt(variance + eps) of all parts, and the mean and unbiased variance for the scratch memory."""
    channel = tl.program_id(0) * tile_channels + tl.arange(0, tile_channels)
    part = tl.arange(0, most_parts)
    is_inside = (part < parts)[:, None] & (channel < channels)[None, :]
    place = part[:, None] * channels + channel[None, :]
    part_mean = tl.load(means + place, is_inside, 0.0)
    begin = part.to(tl.int64) * part_rows
    size = tl.maximum(tl.minimum(rows - begin, part_rows), 0).to(tl.float32)[:, None]
    count = rows.to(tl.float32)
    all_mean = tl.sum(part_mean * size, 0) / count
    apart = tl.where(is_inside, part_mean - all_mean[None, :], 0.0)
    square = tl.sum(tl.load(squares + place, is_inside, 0.0) + apart * apart * size, 0)
    is_channel = channel < channels
    tl.store(mean + channel, all_mean, is_channel)
    tl.store(factor + channel, 1.0 / tl.sqrt(square / count + eps), is_channel)
    tl.store(scratch_mean + channel, all_mean, is_channel)
    tl.store(scratch_var + channel, square / tl.maximum(count - 1.0, 1.0), is_channel)


@triton.jit
def _normalise(x: tl.tensor, output: tl.tensor, mean: tl.tensor, factor: tl.tensor, weight: tl.tensor,
               bias: tl.tensor, rows: tl.tensor, channels: tl.tensor, tile_rows: tl.constexpr,
               tile_channels: tl.constexpr, silu: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    channel = tl.program_id(1) * tile_channels + tl.arange(0, tile_channels)
    is_channel = channel < channels
    is_inside = (row < rows)[:, None] & is_channel[None, :]
    place = row[:, None] * channels + channel[None, :]
    value = tl.load(x + place, is_inside, 0.0).to(tl.float32)
    centre = tl.load(mean + channel, is_channel, 0.0)
    scale = tl.load(factor + channel, is_channel, 0.0) * tl.load(weight + channel, is_channel, 0.0)
    value = (value - centre[None, :]) * scale[None, :] + tl.load(bias + channel, is_channel, 0.0)[None, :]
    if silu:
        value = value * tl.sigmoid(value)
    tl.store(output + place, value.to(output.dtype.element_ty), is_inside)


@triton.jit
def _centred_and_gradient(x: tl.tensor, gradient: tl.tensor, mean: tl.tensor, factor: tl.tensor, weight: tl.tensor,
                          bias: tl.tensor, row: tl.tensor, channel: tl.tensor, is_inside: tl.tensor,
                          channels: tl.tensor, stride: tl.tensor, silu: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(x - mean) / sqrt(variance + eps) of a tile, and the gradient of the normalised values before SiLU."""
    value = tl.load(x + row[:, None] * channels + channel[None, :], is_inside, 0.0).to(tl.float32)
    change = tl.load(gradient + row[:, None] * stride + channel[None, :], is_inside, 0.0).to(tl.float32)
    is_channel = channel < channels
    centre = tl.load(mean + channel, is_channel, 0.0)
    centred = (value - centre[None, :]) * tl.load(factor + channel, is_channel, 0.0)[None, :]
    if silu:
        scale, shift = tl.load(weight + channel, is_channel, 0.0), tl.load(bias + channel, is_channel, 0.0)
        normalised = centred * scale[None, :] + shift[None, :]
        share = tl.sigmoid(normalised)
        change = change * (share * (1.0 + normalised * (1.0 - share)))
    return centred, change


@triton.jit
def _part_gradients(x: tl.tensor, gradient: tl.tensor, mean: tl.tensor, factor: tl.tensor, weight: tl.tensor,
                    bias: tl.tensor, sums: tl.tensor, products: tl.tensor, rows: tl.tensor, channels: tl.tensor,
                    stride: tl.tensor, part_rows: tl.tensor, tile_rows: tl.constexpr, tile_channels: tl.constexpr,
                    silu: tl.constexpr) -> None:
    """Sums over one part of the rows: of the gradient, and of the gradient times the centred values."""
    part = tl.program_id(0)
    channel = tl.program_id(1) * tile_channels + tl.arange(0, tile_channels)
    begin = part.to(tl.int64) * part_rows
    end = tl.minimum(begin + part_rows, rows)
    own_sum = tl.zeros([tile_channels], tl.float32)
    product = tl.zeros([tile_channels], tl.float32)
    for first in range(begin, end, tile_rows):
        row = first + tl.arange(0, tile_rows)
        is_inside = (row < end)[:, None] & (channel < channels)[None, :]
        centred, change = _centred_and_gradient(x, gradient, mean, factor, weight, bias, row, channel, is_inside,
                                                channels, stride, silu)
        own_sum += tl.sum(change, 0)  # outside, the gradient is 0
        product += tl.sum(change * centred, 0)
    place = part * channels + channel
    tl.store(sums + place, own_sum, channel < channels)
    tl.store(products + place, product, channel < channels)


@triton.jit
def _all_gradients(sums: tl.tensor, products: tl.tensor, of_weight: tl.tensor, of_bias: tl.tensor,
                   channels: tl.tensor, parts: tl.tensor, most_parts: tl.constexpr, tile_channels: tl.constexpr
                   ) -> None:
    """The gradients of weight and bias: the sums of all parts."""
    channel = tl.program_id(0) * tile_channels + tl.arange(0, tile_channels)
    part = tl.arange(0, most_parts)
    is_inside = (part < parts)[:, None] & (channel < channels)[None, :]
    place = part[:, None] * channels + channel[None, :]
    tl.store(of_bias + channel, tl.sum(tl.load(sums + place, is_inside, 0.0), 0), channel < channels)
    tl.store(of_weight + channel, tl.sum(tl.load(products + place, is_inside, 0.0), 0), channel < channels)


@triton.jit
def _input_gradient(x: tl.tensor, gradient: tl.tensor, of_input: tl.tensor, mean: tl.tensor, factor: tl.tensor,
                    weight: tl.tensor, bias: tl.tensor, of_weight: tl.tensor, of_bias: tl.tensor, rows: tl.tensor,
                    channels: tl.tensor, stride: tl.tensor, tile_rows: tl.constexpr, tile_channels: tl.constexpr,
                    silu: tl.constexpr) -> None:
    """weight / sqrt(variance + eps) (g - mean of g - centred x mean of (g x centred)), g the gradient before SiLU."""
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    channel = tl.program_id(1) * tile_channels + tl.arange(0, tile_channels)
    is_channel = channel < channels
    is_inside = (row < rows)[:, None] & is_channel[None, :]
    centred, change = _centred_and_gradient(x, gradient, mean, factor, weight, bias, row, channel, is_inside, channels,
                                            stride, silu)
    count = rows.to(tl.float32)
    change_mean = tl.load(of_bias + channel, is_channel, 0.0) / count
    product_mean = tl.load(of_weight + channel, is_channel, 0.0) / count
    scale = tl.load(factor + channel, is_channel, 0.0) * tl.load(weight + channel, is_channel, 0.0)
    change = (change - change_mean[None, :] - centred * product_mean[None, :]) * scale[None, :]
    tl.store(of_input + row[:, None] * channels + channel[None, :], change.to(of_input.dtype.element_ty), is_inside)
