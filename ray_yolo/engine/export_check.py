"""Whether an exported model gives the numbers that torch gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from ray_yolo.config.commands import NmsConfig
from ray_yolo.errors import RayYoloError
from ray_yolo.ops.nms import select

LARGEST_DIFFERENCE = 1e-4  # of boxes as shares of the image, of chances as they are

Run = Callable[[Tensor], np.ndarray]  # an exported model


def compare_predictions(model: nn.Module, run: Run, batch_size: int, imgsz: int, *, dynamic: bool) -> float:
    """The largest difference over a batch of noise, and over a batch of another shape where that is allowed.

    Raises:
        RayYoloError: if it is too large.
    """
    shapes = [(batch_size, 3, imgsz, imgsz)] + [(batch_size + 1, 3, imgsz, imgsz + 32)] * dynamic
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for shape in shapes:
        images = torch.rand(shape, generator=generator)
        worst = max(worst, _difference(model(images).numpy(), run(images), slice(0, 4), imgsz))
    return worst


def compare_suppression(run: Run, settings: NmsConfig) -> float:
    """The largest difference from `select` on boxes in heaps, which is where suppression has something to do.

    Raises:
        RayYoloError: if it is too large.
    """
    predictions = random_predictions()
    found = select(predictions[..., :4], predictions[..., 4:], confidence=settings.confidence, iou=settings.iou,
                   max_detections=settings.max_detections, multi_label=False, agnostic=settings.agnostic_nms)
    expected = torch.cat([torch.cat([torch.full((len(rows), 1), float(image)), rows], 1)
                          for image, rows in enumerate(found)])
    return _difference(expected.numpy(), run(predictions), slice(1, 5), 640)


def random_predictions(num_images: int = 2, num_boxes: int = 300, num_classes: int = 3) -> Tensor:
    """(images, boxes, 4 + classes) overlapping boxes in an image of 640 pixels with random scores, always the same."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.randint(0, 6, (num_images, num_boxes, 2), generator=generator) * 100.0 + 50
    edges = torch.rand(num_images, num_boxes, 4, generator=generator) * 20
    boxes = torch.cat([centre - 40 - edges[..., :2], centre + 40 + edges[..., 2:]], 2)
    return torch.cat([boxes, torch.rand(num_images, num_boxes, num_classes, generator=generator)], 2)


def _difference(expected: np.ndarray, got: np.ndarray, boxes: slice, imgsz: int) -> float:
    """The largest absolute difference, with boxes as shares of the image.

    Raises:
        RayYoloError: if it is too large, or the shapes differ.
    """
    if expected.shape != got.shape:
        raise RayYoloError(f"the exported model gives {got.shape} numbers where torch gives {expected.shape}; nothing "
                           "was written")
    apart = np.abs(expected.astype(np.float64) - got)
    apart[..., boxes] /= imgsz
    worst = float(apart.max(initial=0.0))
    if not worst <= LARGEST_DIFFERENCE:
        raise RayYoloError(f"the exported model differs from torch by up to {worst:.1e} (allowed "
                           f"{LARGEST_DIFFERENCE}); nothing was written")
    return worst
