"""Confidence threshold and non-maximum suppression: from predictions to detections.

The result is a pure function of one image's predictions. Detections are dropped for three reasons only: a score below
the confidence, suppression by a better box, or the limits `MAX_CANDIDATES` and `max_detections`. No time limit applies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

MAX_CANDIDATES = 30_000  # boxes of an image that enter suppression, best scores first

_LOW_BITS = 2**32 - 1  # the lower half of an int64


def select(boxes: Tensor, scores: Tensor, *, confidence: float, iou: float | None, max_detections: int,
           multi_label: bool, agnostic: bool = False) -> list[Tensor]:
    """Detections of each image, best score first; equal scores in the order of the predictions, then of the classes.

    A prediction is a candidate for its best class, or for every class with `multi_label`, if the score exceeds
    `confidence`. A candidate is suppressed if it overlaps a better detection of its class (of any class if `agnostic`)
    by more than `iou`. With `iou` None there is no suppression, and predictions have every class unless `agnostic`.

    Args:
        boxes: (B, N, 4) float32, xyxy.
        scores: (B, N, classes) float32.
        confidence: at least 0.

    Returns:
        B tensors (n, 6) on the host with n up to `max_detections`, rows [x1, y1, x2, y2, score, class], in the unit of
        the boxes.
    """
    selector = Selector(confidence, iou, max_detections, multi_label, agnostic)
    candidates = selector.candidates(boxes, scores)
    if boxes.is_cuda:
        torch.cuda.current_stream(boxes.device).synchronize()
    return selector.detections(candidates)


@dataclass(frozen=True)
class Selector:
    """`select` in two halves, so that the host has other work while a device finds the candidates."""

    confidence: float
    iou: float | None
    max_detections: int
    multi_label: bool
    agnostic: bool = False

    def candidates(self, boxes: Tensor, scores: Tensor) -> Tensor | list[Tensor]:
        """Rows (n, 6) of each image's candidates, best first, on the host. Arguments as of `select`.

        A device only queues the work and one copy of its result. The rows are there once it has come to this point.
        """
        if boxes.device.type != "cpu":
            return self.padded_candidates(boxes, scores).to("cpu", non_blocking=True)
        # On a CPU a shape that depends on values costs no wait, and few predictions pass: several times faster.
        return [_best_first(*image, self.confidence, self._every_class) for image in zip(boxes, scores, strict=True)]

    def padded_candidates(self, boxes: Tensor, scores: Tensor) -> Tensor:
        """The rows of `candidates`, (B, k, 6), on the device of the boxes, filled up with rows of score 0."""
        limit = MAX_CANDIDATES if self.iou is not None else min(self.max_detections, MAX_CANDIDATES)
        return _best_first_padded(boxes, scores, self.confidence, self._every_class, limit)

    @property
    def _every_class(self) -> bool:
        """Whether a prediction is a candidate for every class."""
        return self.multi_label if self.iou is not None else not self.agnostic

    def detections(self, candidates: Tensor | list[Tensor]) -> list[Tensor]:
        """The second half of `select`, on the host."""
        detections = []
        for rows in candidates:
            rows = rows[: int(rows[:, 4].count_nonzero())]  # without those of score 0
            if self.iou is None:
                detections.append(rows[: self.max_detections])
            else:
                detections.append(rows[_suppress(rows, self.iou, self.max_detections, self.agnostic)])
        return detections


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


def _best_first_padded(boxes: Tensor, scores: Tensor, confidence: float, multi_label: bool, limit: int) -> Tensor:
    """The first `limit` candidates of each image as in `_best_first`, then rows of score 0: (B, k, 6).

    No shape depends on values, so the host does not wait for the device.

    A key is the bits of a score, whose order is that of positive numbers, followed by the place from the end. Keys
    differ, so `topk`, which is not stable, has one result.
    """
    num_classes = scores.shape[2]
    best_classes = None
    if not multi_label:
        scores, best_classes = scores.max(dim=2)
    scores = scores.flatten(1)
    last = scores.shape[1] - 1
    places_from_end = torch.arange(last, -1, -1, device=scores.device)
    keys = scores.view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(places_from_end)
    keys.masked_fill_(~(scores > confidence), 0)  # less than any candidate's; not `<=`, which is false for NaN
    highest = keys.topk(min(limit, scores.shape[1])).values

    best = (highest >> 32).int().view(torch.float32)
    chosen = last - (highest & _LOW_BITS)
    if best_classes is None:
        rows, classes = chosen // num_classes, chosen % num_classes
    else:
        rows, classes = chosen, best_classes.gather(1, chosen)
    chosen_boxes = boxes.gather(1, rows[:, :, None].expand(-1, -1, 4))
    return torch.cat([chosen_boxes, best[:, :, None], classes[:, :, None].to(boxes.dtype)], dim=2)


def _highest(scores: Tensor) -> Tensor:
    """Indices of the `MAX_CANDIDATES` highest scores in falling order; ties keep their order."""
    chosen = torch.arange(len(scores))
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
    ranks = torch.arange(len(boxes), 0, -1, dtype=boxes.dtype)
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
