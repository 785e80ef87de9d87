"""All decoded training images in a device's memory, from which it renders samples (`augment.render: device`)."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ray_yolo.core.errors import ConfigError
from ray_yolo.core.formatting import format_size
from ray_yolo.core.system import available_memory
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.images import UnreadableImageError
from ray_yolo.engine.devices import device_name

_THREADS = 16  # at most this many decode images at once
_log = logging.getLogger(__name__)


class HeldImages(NamedTuple):
    """The images of a store on a device."""

    pixels: Tensor  # (bytes,) uint8 on the device, RGB; an image begins at its entry of the store's `starts`
    readable: np.ndarray  # (images,) bool; the others could not be decoded


def require_memory(needed: int, num_images: int, device: torch.device) -> None:
    """Refuse images for which a device has too little memory.

    Args:
        needed: bytes of all decoded images.

    Raises:
        ConfigError: with both sizes.
    """
    free = free_memory(device)
    if needed > free:
        raise ConfigError(
            f"augment.render: device: the {num_images} decoded images need {format_size(needed)}, and "
            f"{device_name(device)} has {format_size(free)} free; leave augment.render out, and the loaders render")


def hold_images(store: ImageStore, device: torch.device) -> HeldImages:
    """Decode all images of a store into a device's memory.

    Raises:
        DatasetError: if too many images cannot be read.
    """
    pixels = torch.empty(int(store.starts[-1]), dtype=torch.uint8, device=device)
    readable = np.zeros(len(store.paths), bool)

    def hold(image: int) -> None:
        try:
            decoded = np.array(store.load(image))  # a copy: a cached image is read-only, which torch warns of
        except UnreadableImageError as error:
            _log.warning("%s: %s; replaced by the next image", store.paths[image], error)
            return
        pixels[store.starts[image]:store.starts[image + 1]] = torch.from_numpy(decoded.reshape(-1))
        readable[image] = True

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(hold, range(len(store.paths))))
    return HeldImages(pixels, readable)


def free_memory(device: torch.device) -> int:
    """Bytes of a device's memory that are free."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
