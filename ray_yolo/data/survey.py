"""What there is in a data split, in numbers: told at every start, so that nothing is missing in silence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ray_yolo.data.dataset_yaml import DatasetDescription
from ray_yolo.errors import DatasetError
from ray_yolo.structures import AnnotationIndex, Finding

_TOLD = 10  # findings that an error lists


def survey(index: AnnotationIndex) -> dict[str, Any]:
    """Counts of a split by name, boxes of each class in order, and where labels were looked for. Plain JSON."""
    out = [finding.image for finding in index.findings if finding.dropped]
    without_boxes = int((np.diff(index.offsets) == 0).sum())
    return {"images": len(index), "boxes": len(index.classes),
            "per_class": np.bincount(index.classes, minlength=len(index.names)).tolist(),
            "empty_file": without_boxes - index.num_without_file, "no_file": index.num_without_file,
            "images_left_out": sum(out), "rows_left_out": len(out) - sum(out), "looked_for": list(index.looked_for)}


def require_boxes(index: AnnotationIndex, description: DatasetDescription, split: str) -> None:
    """Refuse a split without any box.

    Raises:
        DatasetError: saying where labels were looked for, and what was left out.
    """
    if len(index.classes):
        return
    dropped = [finding for finding in index.findings if finding.dropped]
    reasons = f"; {len(dropped)} rows and images were left out, the first: {listed(dropped[:1])}" if dropped else ""
    raise DatasetError(f"{description.file}: {split}: none of its {len(index)} images has a box; looked for labels in "
                       f"{first_places(index.looked_for)}{reasons}; correct the paths, or add --allow-empty if that is "
                       "meant")


def first_places(looked_for: Sequence[str]) -> str:
    """Places in one line, the first of many."""
    more = len(looked_for) - 4
    return ", ".join(looked_for[:4]) + (f" and {more} more" if more > 0 else "")


def listed(findings: Sequence[Finding]) -> str:
    """Findings in one line, the first of many."""
    more = len(findings) - _TOLD
    lines = [f"{finding.where}: {finding.what}" for finding in findings[:_TOLD]]
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")
