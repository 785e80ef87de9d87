"""From an image to what is in it, in the image's own pixels.

One image at a time, letterboxed as in validation: what is found in an image depends on that image and the settings
alone. Nothing here reads files or knows how many workers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from torch import Tensor

from ray_yolo.config.commands import DetectConfig
from ray_yolo.data.augment import letterbox
from ray_yolo.data.image_cache import loaded_sizes
from ray_yolo.data.validation import padded_shapes
from ray_yolo.engine.build import CPU
from ray_yolo.engine.evaluate import autocast
from ray_yolo.engine.trained import Trained
from ray_yolo.errors import InputError
from ray_yolo.families import Family
from ray_yolo.models.detector import Detector, fuse
from ray_yolo.ops.boxes import to_original
from ray_yolo.ops.nms import select


@dataclass(frozen=True)
class Predictor:
    """A model ready to be used: `predictor(image)`. Safe to call from several threads."""

    model: Detector  # fused, on its device
    family: Family
    names: tuple[str, ...]
    imgsz: int
    settings: DetectConfig
    device: torch.device
    precision: str

    @torch.no_grad()
    def __call__(self, image: np.ndarray) -> np.ndarray:
        """What is found in an image, best score first.

        Args:
            image: (height, width, 3) uint8 RGB.

        Returns:
            (n, 6) float32 rows [x1, y1, x2, y2, score, class], in pixels of the image.
        """
        pixels, ratio, pad = to_network(image, self.imgsz)
        batch = torch.from_numpy(pixels).to(self.device).permute(2, 0, 1)[None].float().div_(255)
        with autocast(self.device, self.precision):
            levels = self.model(batch.contiguous(memory_format=torch.channels_last))
        boxes, scores = self.family.decode(self.model.head, levels)
        settings = self.settings
        chosen = _looked_for(scores[0], settings.classes)
        [found] = select(boxes[:, chosen], scores[:, chosen], confidence=settings.confidence, iou=settings.iou,
                         max_detections=settings.max_detections, multi_label=False, agnostic=settings.agnostic_nms)
        boxes = to_original(found[:, :4], ratio, pad, image.shape[:2])
        return torch.cat([boxes, found[:, 4:]], 1).cpu().numpy()


def build_predictor(trained: Trained, settings: DetectConfig, *, imgsz: int | None = None, precision: str = "fp32",
                    device: torch.device = CPU) -> Predictor:
    """Trained weights as a predictor; `imgsz` left out is that of the training."""
    model = fuse(trained.model).to(device).to(memory_format=torch.channels_last)
    return Predictor(model, trained.family, trained.names, imgsz or trained.recipe.imgsz, settings, device, precision)


def check_classes(classes: Sequence[int] | None, names: Sequence[str]) -> None:
    """Refuse to look for classes that the weights do not know.

    Raises:
        InputError: naming those that they know.
    """
    unknown = [number for number in classes or () if not 0 <= number < len(names)]
    if unknown:
        known = ", ".join(f"{number} {name}" for number, name in enumerate(names))
        raise InputError(f"classes: {unknown[0]} is none of the weights' classes ({known})")


def to_network(image: np.ndarray, imgsz: int) -> tuple[np.ndarray, tuple[float, float], tuple[int, int]]:
    """An image as the network sees it in validation.

    Returns:
        The letterboxed picture (h, w, 3) uint8; the (vertical, horizontal) scale and the (top, left) padding that
        `ops.boxes.to_original` takes back.
    """
    size = np.array([image.shape[:2]])
    height, width = loaded_sizes(size, imgsz)[0].tolist()
    tall, wide = padded_shapes(size, imgsz)[0].tolist()
    if (height, width) != image.shape[:2]:
        shrinks = height < image.shape[0] or width < image.shape[1]
        method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
        resized = cv2.resize(image, (width, height), interpolation=method)
    else:
        resized = image
    padded, pad = letterbox(resized, (tall, wide))
    return padded, (height / image.shape[0], width / image.shape[1]), pad


def _looked_for(scores: Tensor, classes: tuple[int, ...] | None) -> Tensor | slice:
    """Which of the scores (N, classes) are best for a class among `classes`."""
    if classes is None:
        return slice(None)
    return torch.isin(scores.argmax(1), torch.tensor(classes, device=scores.device))
