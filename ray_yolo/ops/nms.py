"""Confidence threshold and non-maximum suppression: from predictions to detections.

The result is a pure function of one image's predictions. Detections are dropped for three reasons only: a score below
the confidence, suppression by a better box, or the limits `MAX_CANDIDATES` and `max_detections`. No time limit applies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

MAX_CANDIDATES = 30_000  # boxes of an image that enter suppression, best scores first


def select(boxes: Tensor, scores: Tensor, *, confidence: float, iou: float | None, max_detections: int,
           multi_label: bool, agnostic: bool = False) -> list[Tensor]:
    """Detections of each image, best score first; equal scores in the order of the predictions, then of the classes.

    A prediction is a candidate for its best class, or for every class with `multi_label`, if the score exceeds
    `confidence`. A candidate is suppressed if it overlaps a better detection of its class (of any class if `agnostic`)
    by more than `iou`. With `iou` None there is no suppression, and predictions have every class unless `agnostic`.

    Args:
        boxes: (B, N, 4), xyxy.
        scores: (B, N, classes).

    Returns:
        B tensors (n, 6) with n up to `max_detections`, rows [x1, y1, x2, y2, score, class], in the unit of the boxes.
    """
    candidates = [_best_first(*image, confidence, multi_label if iou is not None else not agnostic)
                  for image in zip(boxes, scores, strict=True)]
    if iou is None:
        return [rows[:max_detections] for rows in candidates]
    return [rows[_suppress(rows, iou, max_detections, agnostic)] for rows in candidates]


def _best_first(boxes: Tensor, scores: Tensor, confidence: float, multi_label: bool) -> Tensor:
    """Candidates (n, 6) of one image by falling score, at most `MAX_CANDIDATES`; ties keep the order of the boxes."""
    if multi_label:
        rows, classes = torch.nonzero(scores > confidence, as_tuple=True)
        best = scores[rows, classes]
    else:
        best, classes = scores.max(dim=1)
        rows = torch.nonzero(best > confidence)[:, 0]
        best, classes = best[rows], classes[rows]
    order = _highest(best)
    return torch.cat([boxes[rows[order]], best[order, None], classes[order, None].to(boxes.dtype)], dim=1)


def _highest(scores: Tensor) -> Tensor:
    """Indices of the `MAX_CANDIDATES` highest scores in falling order; ties keep their order."""
    chosen = torch.arange(len(scores), device=scores.device)
    if len(scores) > MAX_CANDIDATES:  # topk is several times faster than a full stable sort, but not stable
        chosen = chosen[scores >= scores.topk(MAX_CANDIDATES, sorted=False).values.min()]
    return chosen[scores[chosen].argsort(descending=True, stable=True)][:MAX_CANDIDATES]


def _suppress(candidates: Tensor, iou: float, max_detections: int, agnostic: bool) -> Tensor:
    """Indices of the first `max_detections` candidates that survive suppression, ascending.

    A candidate's survival depends only on better ones, so suppression of the best few gives a prefix of the full
    result. More candidates, at quadratic cost, are processed only until the limit is reached.
    """
    boxes = candidates[:, :4].double()
    if not agnostic and len(boxes):
        # Offset each class by more than the extent of all boxes, whose coordinates may be negative or large. In double
        # precision this changes an overlap by less than 1e-9; in single precision by up to 1e-2 for small boxes.
        boxes = boxes + (candidates[:, 5:].double() * (boxes.max() - boxes.min() + 1.0))
    # Ranks instead of scores: the kernel's sort must not reorder ties.
    ranks = torch.arange(len(boxes), 0, -1, dtype=boxes.dtype, device=boxes.device)
    count = 2 * max_detections
    while True:
        kept = _kernel()(boxes[:count], ranks[:count], iou)
        if len(kept) >= max_detections or count >= len(boxes):
            return kept[:max_detections]
        count *= 2


@cache
def _kernel() -> Callable[[Tensor, Tensor, float], Tensor]:
    """torchvision's greedy suppression (boxes, scores, iou) -> indices.

    Loading its library alone registers the operator. `import torchvision.ops` is the fallback for other library
    locations: it also loads torch's compiler, which takes as long as torch itself (2 CPU seconds).
    """
    package = find_spec("torchvision")
    for folder in (package and package.submodule_search_locations) or ():
        for library in sorted(Path(folder).glob("_C*.so")):
            torch.ops.load_library(str(library))
    if not hasattr(torch.ops.torchvision, "nms"):
        with suppress(ImportError):
            import_module("torchvision.ops")
    if not hasattr(torch.ops.torchvision, "nms"):
        raise ImportError("torchvision is not installed, or was built without its operators; install it for this torch")
    kernel: Callable[[Tensor, Tensor, float], Tensor] = torch.ops.torchvision.nms
    return kernel
