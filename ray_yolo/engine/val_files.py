"""What a validation detected, as files for other programs: COCO's result format, and YOLO's text files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ray_yolo.data.dataset_yaml import DatasetDescription
from ray_yolo.data.label_files import Sources
from ray_yolo.data.media import Media, unique_stems
from ray_yolo.engine.predict_files import Prediction, label_rows, place
from ray_yolo.structures import AnnotationIndex


def coco_results(table: np.ndarray, index: AnnotationIndex, description: DatasetDescription, split: str
                 ) -> list[dict[str, Any]]:
    """Rows of image_id, category_id, bbox (x, y, width, height) and score, as COCO's evaluators load them.

    Ids are those of the split's COCO files; without such files an image's id is its name, as a number if it is one, and
    a category's the number of the class.

    Args:
        table: detections as `Evaluation` has them.
    """
    sources = Sources(description, split)
    owns = [sources.own_ids(path) for path in index.paths]
    rows = []
    for number, x1, y1, x2, y2, score, kind, _ in table.tolist():
        image, categories = owns[int(number)]
        rows.append({"image_id": image, "category_id": categories.get(int(kind), int(kind)),
                     "bbox": [round(value, 3) for value in (x1, y1, x2 - x1, y2 - y1)], "score": round(score, 5)})
    return rows


def write_label_files(table: np.ndarray, index: AnnotationIndex, folder: Path, *, scores: bool) -> None:
    """Write labels/NAME.txt for each image with detections, as prediction does."""
    root = os.path.commonpath([os.path.dirname(path) for path in index.paths])
    names = [os.path.relpath(path, root) for path in index.paths]
    for number, (path, name, stem) in enumerate(zip(index.paths, names, unique_stems(names), strict=True)):
        rows = table[table[:, 0] == number, 1:7]
        if len(rows):
            found = Prediction(name, None, index[number].size, rows)
            place(folder / "labels", Media(path, name, stem), ".txt").write_text(label_rows(found, scores=scores))
