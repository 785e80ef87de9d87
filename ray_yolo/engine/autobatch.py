"""AutoBatch: the number of images of a worker's microbatch that fits into its GPU's memory (`--batch-size -1`).

The rule is YOLOv5's. It fits a line to the memory of steps of 1, 2, 4, 8 and 16 images, and uses 80 % of the free
memory.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ray_yolo.config.recipe import BATCH_PER_WORKER, Recipe
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.evaluate import autocast
from ray_yolo.engine.team import normalisation
from ray_yolo.models.batch_norm import Statistics
from ray_yolo.models.criterion import Criterion
from ray_yolo.models.detector import Detector
from ray_yolo.models.families import build_model, find_family
from ray_yolo.ops.seeding import LARGEST_SCALE

SIZES = (1, 2, 4, 8, 16)
SHARE = 0.8  # A training may use this share of the free memory.
CROWD_PERCENTILE = 99  # A crowd has as many labels as an image at this percentile.
LARGEST = 1024
COPIES = 5  # Besides a step's memory, the weights are held so often: average, two moments, DDP's buckets, reserve.


def images_that_fit(sizes: Sequence[int], used: Sequence[int], room: float) -> int:
    """The largest number of images whose step needs at most `room` bytes, by a line fitted to (sizes, used bytes).

    If the fit is useless, it is 16, as without a GPU. A fit is useless if it has fewer than two points, does not rise,
    or is outside 1 to 1024 images.
    """
    if len(sizes) < 2:
        return BATCH_PER_WORKER
    slope, base = np.polyfit(sizes, used, 1)
    images = math.floor((room - base) / slope + 1e-6) if slope > 0 else 0
    return images if 1 <= images <= LARGEST else BATCH_PER_WORKER


def labels_of_a_crowd(index: AnnotationIndex) -> int:
    """Labels of an image that has more of them than 99 % of the data set's images; at least 1."""
    labels = np.diff(index.offsets)
    return max(math.ceil(np.percentile(labels, CROWD_PERCENTILE)), 1) if len(labels) else 1


def auto_batch(recipe: Recipe, model: str | Mapping[str, Any], num_classes: int, labels_per_image: int,
               device: torch.device, part: float = 1.0, held: int = 0) -> int:
    """Images of one microbatch for this worker; 16 on a CPU, where memory is no limit.

    Args:
        recipe: resolved except for its batch.
        labels_per_image: of the measured steps. Assignment needs memory for each label.
        part: of the GPU that this worker has; others use the rest.
        held: bytes of training images that the GPU will hold.
    """
    if device.type != "cuda":
        return BATCH_PER_WORKER
    gc.collect()  # the memory that a former training of this process has left would hide that of the steps
    torch.cuda.empty_cache()
    network = build_model(model, num_classes).to(device).to(memory_format=torch.channels_last).train()
    Statistics(network, normalisation(recipe, Collectives(), device))  # sync_bn needs more memory
    loss = find_family(model).build_loss(network.head, recipe.loss, num_classes, recipe.imgsz)
    weights = sum(tensor.nbytes for tensor in network.state_dict().values())
    free, _ = torch.cuda.mem_get_info(device)
    used: list[int] = []
    for size in SIZES:
        try:
            used.append(_step_bytes(network, loss, recipe, size, labels_per_image))
        except torch.OutOfMemoryError:
            break
    del network
    torch.cuda.empty_cache()
    return images_that_fit(SIZES[: len(used)], used, SHARE * free * min(part, 1.0) - COPIES * weights - held)


def _step_bytes(network: Detector, loss: Criterion, recipe: Recipe, num_images: int, labels_per_image: int) -> int:
    """Peak GPU memory of a forward and backward pass of `num_images` images of the largest size."""
    device = next(network.parameters()).device
    grid = network.grid
    side = math.floor(LARGEST_SCALE * recipe.imgsz / grid + 1) * grid if recipe.multi_scale else recipe.imgsz
    torch.cuda.reset_peak_memory_stats(device)
    images = torch.zeros(num_images, 3, side, side, device=device).to(memory_format=torch.channels_last)
    rows = [[image, 0, 0.0, 0.0, side / 4, side / 4] for image in range(num_images)]
    targets = torch.tensor(rows, device=device).repeat(labels_per_image, 1)
    with autocast(device, recipe.precision):
        levels = network(images)
    measured = loss.measure(levels, targets, (side, side))
    loss.terms(measured.numerators, measured.counts).sum().backward()
    network.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_reserved(device)
