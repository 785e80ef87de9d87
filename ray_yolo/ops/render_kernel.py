"""From decoded images to what a network takes as one kernel of Triton, for GPUs: mosaic, zoom, translation, rotation,
shear, flips, colours, and the step from bytes to 0..1.

It resamples as OpenCV's linear interpolation does, with other rounding: places have 28 bits after the point, and
neighbours are weighted in steps of 1/2048. All of that is in integers, so every device has the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ray_yolo.ops.colour_kernel import changed_colours, store_colours
from ray_yolo.ops.recolour import ColourTables
from ray_yolo.ops.views import FRACTION, HEAD, LENGTH, PER_TILE

_BLOCK = 1024  # pixels of a program


def rendered_input(held: Tensor, tables: ColourTables | None, views: Tensor, scaled: Tensor | None,
                   size: tuple[int, int], memory_format: torch.memory_format) -> Tensor:
    """What a network takes of a batch: float32 in 0..1, (B, 3, H, W), in this memory format, in one launch.

    Pixel p of the picture shows the canvas at seam + M^-1 (p + 1/2 - s), where s is the seam in the picture, and there
    the image on that side of the seam, between its four nearest pixels; grey where there is none. Then colours change
    as in `recolour.recolour`, and bytes are divided by 255.

    Args:
        held: (bytes,) uint8, the RGB pixels of all images, back to back.
        tables: None, as `scaled`, where colours stay.
        views: (B, 28) int64, B > 0, see `views.view_of`; all have the same size.
        scaled: (B, 3, 256) uint8, as `recolour.recolour` takes it.
        size: (height, width) of the pictures.
    """
    images = torch.empty((len(views), 3, *size), dtype=torch.float32, device=views.device, memory_format=memory_format)
    height, width = size
    to_hsv, to_rgb = tables or (held, held)  # which are not read where colours stay
    strides = [images.stride(dim) for dim in (0, 3, 1)]
    grid = (triton.cdiv(height * width, _BLOCK), len(views))
    with torch.cuda.device_of(views):  # Triton launches on the current one
        _render[grid](held, views.contiguous(), held if scaled is None else scaled.contiguous(), to_hsv, to_rgb, images,
                      height * width, width, *strides, fraction=FRACTION, head=HEAD, per_tile=PER_TILE, length=LENGTH,
                      recolours=scaled is not None, block=_BLOCK, enable_fp_fusion=False)
    return images


@triton.jit
def _render(held: tl.tensor, views: tl.tensor, scaled: tl.tensor, to_hsv: tl.tensor, to_rgb: tl.tensor,
            images: tl.tensor, size: tl.tensor, width: tl.tensor, images_image: tl.tensor, images_place: tl.tensor,
            images_channel: tl.tensor, fraction: tl.constexpr, head: tl.constexpr, per_tile: tl.constexpr,
            length: tl.constexpr, recolours: tl.constexpr, block: tl.constexpr) -> None:
    """One block of the pixels of one picture."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    image = tl.program_id(1).to(tl.int64)  # a batch may have more than 2^31 bytes
    is_inside = place < size
    view = views + image * length

    # From the seam to the pixel's centre, in half pixels of the picture; then on the canvas, in 2^-29 pixels.
    across = 2 * (place % width - tl.load(view + 2)) + 1
    down = 2 * (place // width - tl.load(view + 3)) + 1
    x = tl.load(view + 4) * across + tl.load(view + 5) * down
    y = tl.load(view + 6) * across + tl.load(view + 7) * down

    tile = view + head + per_tile * (tl.where(y < 0, 0, 2) + tl.where(x < 0, 0, 1))
    start = tl.load(tile, is_inside, 0)
    tile_height = tl.load(tile + 1, is_inside, 0)
    tile_width = tl.load(tile + 2, is_inside, 0)
    unit: tl.constexpr = fraction + 1
    is_shown = (tl.abs(x) < tl.load(tile + 3, is_inside, 0) << unit) & (
        tl.abs(y) < tl.load(tile + 4, is_inside, 0) << unit)

    left, right, from_left = _neighbours(tl.where(x < 0, x + (tile_width << unit), x), tile_width, unit)
    above, below, from_above = _neighbours(tl.where(y < 0, y + (tile_height << unit), y), tile_height, unit)
    upper = held + start + above * tile_width * 3
    lower = held + start + below * tile_width * 3
    rgb = tl.zeros([block], tl.int32)
    for channel in tl.static_range(3):
        top = _between(upper + left * 3 + channel, upper + right * 3 + channel, from_left, is_shown)
        bottom = _between(lower + left * 3 + channel, lower + right * 3 + channel, from_left, is_shown)
        value = top * (2048 - from_above) + bottom * from_above
        rgb = (rgb << 8) | ((value + (1 << 21)) >> 22)

    if recolours:
        rgb = changed_colours(rgb, scaled + image * 768, to_hsv, to_rgb, is_inside)
    store_colours(images + image * images_image + place * images_place, images_channel, rgb, is_inside)


@triton.jit
def _neighbours(place: tl.tensor, length: tl.tensor, unit: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The two pixels along an axis between whose centres a place lies, and the weight of the second one, out of 2048.
    Beyond the outer centres they are the outer pixel.

    place: from the image's edge, in units of 2^-unit pixels.
    """
    last = tl.maximum(length - 1, 0)
    from_centre = tl.minimum(tl.maximum(place - (1 << (unit - 1)), 0), last << unit)
    first = from_centre >> unit
    weight = (from_centre - (first << unit) + (1 << (unit - 12))) >> (unit - 11)
    return first, tl.minimum(first + 1, last), weight.to(tl.int32)


@triton.jit
def _between(first: tl.tensor, second: tl.tensor, weight: tl.tensor, is_shown: tl.tensor) -> tl.tensor:
    """2048 times the value between two pixels; of grey where no image is shown."""
    near = tl.load(first, is_shown, 114).to(tl.int32)
    far = tl.load(second, is_shown, 114).to(tl.int32)
    return near * (2048 - weight) + far * weight
