"""From predictions to detections: confidence thresholds and non-maximum suppression of each image.

The result is a pure function of one image's predictions. There is no time limit and no other silent loss: what is left
out is below the confidence, suppressed by a better box, or beyond the two stated limits.
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

MAX_CANDIDATES = 30_000  # boxes of one image that enter suppression, best scores first


def select(
    boxes: Tensor,
    scores: Tensor,
    *,
    confidence: float,
    iou: float | None,
    max_detections: int,
    multi_label: bool,
    agnostic: bool = False,
) -> list[Tensor]:
    """Detections of each image, best score first; equal scores in the order of the predictions, then of the classes.

    A prediction detects its best class, or every class under `multi_label`, whose score exceeds `confidence`. A
    detection is dropped if it overlaps a better, kept one of its class (of any class if `agnostic`) by more than `iou`.
    With `iou` None nothing is dropped, and a prediction detects every class unless `agnostic`.
    The first `max_detections` of what remains are given back.

    Args:
        boxes: (B, N, 4), xyxy.
        scores: (B, N, classes).

    Returns:
        B tensors (n, 6), rows [x1, y1, x2, y2, score, class], in the unit of the boxes.
    """
    detections = []
    for image in zip(boxes, scores, strict=True):
        candidates = _best_first(*image, confidence, multi_label if iou is not None else not agnostic)
        if iou is None:
            detections.append(candidates[:max_detections])
            continue
        detections.append(candidates[_suppress(candidates, iou, max_detections, agnostic)])
    return detections


def _best_first(boxes: Tensor, scores: Tensor, confidence: float, multi_label: bool) -> Tensor:
    """(n, 6) candidates of one image by falling score, at most `MAX_CANDIDATES`; ties keep the order of the boxes."""
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
    """Indices of the `MAX_CANDIDATES` highest scores, falling; the first of equal ones first."""
    chosen = torch.arange(len(scores), device=scores.device)
    if len(scores) > MAX_CANDIDATES:  # topk is several times faster than a stable sort of everything, but not stable
        chosen = chosen[scores >= scores.topk(MAX_CANDIDATES, sorted=False).values.min()]
    return chosen[scores[chosen].argsort(descending=True, stable=True)][:MAX_CANDIDATES]


def _suppress(candidates: Tensor, iou: float, max_detections: int, agnostic: bool) -> Tensor:
    """Indices of the first `max_detections` candidates that survive suppression, ascending.

    Whether a candidate survives depends on better ones only. So suppression of the best few gives the beginning of the
    full result, and the rest, whose cost is quadratic, is looked at only while the limit is not reached.
    """
    boxes = candidates[:, :4].double()
    if not agnostic and len(boxes):
        # Classes are moved apart by more than the extent of all boxes, which may be negative or large. In double
        # precision this changes an overlap by less than 1e-9; in single precision by up to 1e-2 for small boxes.
        boxes = boxes + (candidates[:, 5:].double() * (boxes.max() - boxes.min() + 1.0))
    # Ranks in place of scores: the kernel sorts by them, and equal scores must not be reordered.
    ranks = torch.arange(len(boxes), 0, -1, dtype=boxes.dtype, device=boxes.device)
    looked_at = 2 * max_detections
    while True:
        kept = _kernel()(boxes[:looked_at], ranks[:looked_at], iou)
        if len(kept) >= max_detections or looked_at >= len(boxes):
            return kept[:max_detections]
        looked_at *= 2


@cache
def _kernel() -> Callable[[Tensor, Tensor, float], Tensor]:
    """torchvision's greedy suppression (boxes, scores, iou) -> kept.

    Its library alone registers the operator. `import torchvision` registers it too, but also loads torch's compiler,
    which takes as many CPU seconds (2) as torch itself: that is for where the library lies elsewhere.

    Raises:
        ImportError: if torchvision is not there, or was built without its operators.
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
