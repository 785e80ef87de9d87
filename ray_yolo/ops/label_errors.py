"""Labels that a detector doubts: missing ones, ones it does not see, and ones to which it gives another class."""

from __future__ import annotations

from itertools import zip_longest
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ray_yolo.ops.boxes import AnyFloats, pairwise_iou

OVERLAP = 0.5  # IoU from which a detection and a label are of the same object
LEAST_DOUBT = 0.5

DoubtKind = Literal["missing label", "denied label", "wrong class"]
KINDS: tuple[DoubtKind, ...] = ("missing label", "denied label", "wrong class")

AnyInts = NDArray[np.integer]


class DoubtfulLabel(NamedTuple):
    """A label that is probably wrong or missing."""

    kind: DoubtKind
    image: int
    box: tuple[float, float, float, float]  # the label's; for a missing one the detection's
    labelled: int | None  # class of the label; None for a missing one
    detected: int | None  # class of the detection; None for a denied label
    doubt: float  # 0..1


def doubtful_labels(detections: AnyFloats, images: AnyInts, classes: AnyInts, boxes: AnyFloats, crowds: AnyFloats,
                    most: int) -> list[DoubtfulLabel]:
    """The labels that are most probably wrong, at most `most`, by what a detector says of them.

    A detection and a label belong together if their boxes overlap by an IoU of at least `OVERLAP`, of any class.

    | kind | condition | doubt |
    |---|---|---|
    | missing label | no label belongs to a detection, and it is not in a crowd | score of the detection |
    | denied label | no detection belongs to a label | 1 |
    | denied label | all that belong to it have low scores | 1 - the highest score |
    | wrong class | a detection of another class belongs to a label | its score - the highest one of the label's class |

    A label has the kind with the highest doubt; a doubt below `LEAST_DOUBT` does not count. Of missing labels that
    overlap, the one with the highest score counts. Each kind is sorted by falling doubt, and among equal doubts by the
    data set's order. The kinds take turns in the result: a detector that misses many objects would otherwise hide the
    other kinds.

    Args:
        detections: (n, 7 or more) rows [image, x1, y1, x2, y2, score, class, ...].
        images, classes, boxes: (m,), (m,) and (m, 4) of the labels, xyxy in the unit of the detections.
        crowds: (k, 6 or more) rows [image, class, x1, y1, x2, y2, ...] of regions with many objects.
    """
    found: dict[DoubtKind, list[DoubtfulLabel]] = {kind: [] for kind in KINDS}
    by_image = detections[np.argsort(detections[:, 0], kind="stable")]
    for image in np.union1d(detections[:, 0], images).astype(np.int64).tolist():
        first, end = np.searchsorted(by_image[:, 0], [image, image + 1])
        own = by_image[first:end]
        own = own[np.argsort(-own[:, 5], kind="stable")]
        low, high = np.searchsorted(images, [image, image + 1])  # labels are in the order of images
        own_classes, own_boxes = classes[low:high], boxes[low:high]
        own_crowds = crowds[crowds[:, 0] == image, 2:6]
        doubts = [*_missing(image, own, own_boxes, own_crowds), *_contradicted(image, own, own_classes, own_boxes)]
        for doubt in doubts:
            if doubt.doubt >= LEAST_DOUBT:
                found[doubt.kind].append(doubt)

    by_kind = [sorted(found[kind], key=lambda doubt: -doubt.doubt) for kind in KINDS]
    in_turn = []
    for one_of_each in zip_longest(*by_kind):
        in_turn += [doubt for doubt in one_of_each if doubt is not None]
    return in_turn[:most]


def _missing(image: int, detections: AnyFloats, boxes: AnyFloats, crowds: AnyFloats) -> list[DoubtfulLabel]:
    """Detections of an image, best first, that belong to no label."""
    alone = ~(_overlaps(detections[:, 1:5], boxes) >= OVERLAP).any(1)
    alone &= ~(_covered(detections[:, 1:5], crowds) >= OVERLAP).any(1)
    kept: list[AnyFloats] = []
    doubts = []
    for row in detections[alone & (detections[:, 5] >= LEAST_DOUBT)]:
        box = row[1:5]
        if kept and (_overlaps(box[None], np.array(kept)) >= OVERLAP).any():
            continue
        kept.append(box)
        doubts.append(DoubtfulLabel("missing label", image, tuple(box.tolist()), None, int(row[6]), float(row[5])))
    return doubts


def _contradicted(image: int, detections: AnyFloats, classes: AnyInts, boxes: AnyFloats) -> list[DoubtfulLabel]:
    """For each label of an image the kind with the highest doubt."""
    belongs = _overlaps(detections[:, 1:5], boxes) >= OVERLAP
    doubts = []
    for label, (kind, box) in enumerate(zip(classes.tolist(), boxes.tolist(), strict=True)):
        own = detections[belongs[:, label]]
        same, others = own[own[:, 6] == kind], own[own[:, 6] != kind]
        denied = 1 - float(own[:, 5].max(initial=0))
        other = others[others[:, 5].argmax()] if len(others) else None
        wrong = float(other[5] - same[:, 5].max(initial=0)) if other is not None else 0.0
        if other is not None and wrong > denied:
            doubts.append(DoubtfulLabel("wrong class", image, tuple(box), kind, int(other[6]), wrong))
        else:
            doubts.append(DoubtfulLabel("denied label", image, tuple(box), kind, None, denied))
    return doubts


def _overlaps(a: AnyFloats, b: AnyFloats) -> AnyFloats:
    """(n, m) IoU; NaN of two boxes without area, which is below every limit."""
    first, second = (np.asarray(boxes, np.float64).reshape(-1, 4) for boxes in (a, b))
    return pairwise_iou(first, second)


def _covered(boxes: AnyFloats, regions: AnyFloats) -> AnyFloats:
    """(n, m) share of each box that is inside of each region."""
    low = np.maximum(boxes[:, None, :2], regions[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], regions[None, :, 2:])
    inside = (high - low).clip(0).prod(2)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)[:, None]
    return inside / np.maximum(areas, 1e-9)
