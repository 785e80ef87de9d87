"""The colour augmentation on the device, with the values of the host's (`data.augment.recolour`).

On the host it is the largest part of a sample from memory. On a GPU it is two look-ups in tables of 64 MiB, which its
cache holds in large part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ray_yolo.ops.network_input import unit_range

RecolouredInput = Callable[[Tensor, Tensor, torch.memory_format], Tensor]
"""The last three arguments of `recoloured_input`, and its result."""

_SHIFTS = (16, 8, 0)  # the places of the three channels in a packed colour


class ColourTables(NamedTuple):
    """The conversions between RGB and HSV as tables, (2^24,) int32 each.

    Colours are packed: 2^16 times the first channel, plus 2^8 times the second, plus the third.
    """

    to_hsv: Tensor
    to_rgb: Tensor

    def to(self, device: torch.device) -> ColourTables:
        """The same tables on a device."""
        return ColourTables(self.to_hsv.to(device), self.to_rgb.to(device))


def recoloured_input(tables: ColourTables, pixels: Tensor, scaled: Tensor, memory_format: torch.memory_format
                     ) -> Tensor:
    """What a network takes of images with other colours: float32 in 0..1, (B, 3, H, W), in this memory format.

    The arguments are those of `recolour`.
    """
    return unit_range(recolour(pixels, scaled, tables), memory_format)


def recolour(pixels: Tensor, scaled: Tensor, tables: ColourTables) -> Tensor:
    """Images with other hues, saturations and values, as uint8 RGB in the memory format of `pixels`.

    Args:
        pixels: (B, 3, H, W) uint8 RGB.
        scaled: (B, 3, 256) uint8, what becomes of each hue, saturation and value of an image.
    """
    hsv = tables.to_hsv.index_select(0, _pack(pixels))
    first = torch.arange(len(pixels), dtype=torch.int32, device=pixels.device) * 256  # entry of each image in a table
    offsets = first[:, None].expand(-1, pixels.shape[2] * pixels.shape[3]).reshape(-1)
    changed = torch.zeros_like(hsv)
    for channel, shift in enumerate(_SHIFTS):
        table = scaled[:, channel].reshape(-1).int() << shift
        entries = ((hsv >> shift) & 255) + offsets
        changed |= table.index_select(0, entries)
    rgb = tables.to_rgb.index_select(0, changed).view(len(pixels), *pixels.shape[2:])
    recoloured = torch.empty_like(pixels)
    for channel, shift in enumerate(_SHIFTS):
        recoloured[:, channel] = (rgb >> shift) & 255
    return recoloured


def _pack(pixels: Tensor) -> Tensor:
    """The packed colours of all pixels, (B x H x W,) int32."""
    packed = torch.zeros(len(pixels), *pixels.shape[2:], dtype=torch.int32, device=pixels.device)
    for channel, shift in enumerate(_SHIFTS):
        packed |= pixels[:, channel].int() << shift
    return packed.view(-1)
