"""From the bytes of an image to what a network takes."""

from __future__ import annotations

import torch
from torch import Tensor

WHITE = 255.0


def unit_range(pixels: Tensor, memory_format: torch.memory_format = torch.channels_last) -> Tensor:
    """Bytes (B, 3, H, W) as float32 in 0..1, in this memory format: pixels / 255 on the same device.

    It is one kernel that reads bytes and writes the result. Every device has the same bits: the quotient is exact up to
    one rounding.
    """
    result = torch.empty(pixels.shape, dtype=torch.float32, device=pixels.device, memory_format=memory_format)
    # A GPU multiplies by 1 / 255, rounded, if the divisor is a Python number or on the host: then 126 of 256 values
    # would differ from a CPU's in the last bit.
    white = torch.full((), WHITE, device=pixels.device)
    return torch.div(pixels, white, out=result)
