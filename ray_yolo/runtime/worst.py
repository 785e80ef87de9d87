"""`val --worst`: the images with the highest loss, and the labels that are most probably wrong."""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path

import numpy as np

from ray_yolo.core.files import atomic_write
from ray_yolo.core.formatting import encodable, format_count
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.engine.evaluate import Evaluation
from ray_yolo.ops.label_errors import KINDS, DoubtfulLabel, doubtful_labels
from ray_yolo.sinks.pictures import Failed, draw_doubtful_labels, draw_worst_images

TABLE = "worst.csv"


def write_worst(evaluation: Evaluation, index: AnnotationIndex, most: int, imgsz: int, folder: Path, failed: Failed, *,
                draw: bool) -> str:
    """Write worst.csv, and with `draw` worst_images*.jpg and worst_labels*.jpg, with at most `most` images and labels.
    Returns what was found in a sentence.

    Images are ranked by the sum of their `Evaluation.image_losses`, what is not finite first; labels as in
    `doubtful_labels`.
    """
    losses = evaluation.image_losses
    assert losses is not None, "they were requested"
    totals = losses.sum(1)
    ranks = np.where(np.isfinite(totals), totals, np.inf)
    images = np.argsort(-ranks, kind="stable")[:most].tolist()
    labels = doubtful_labels(evaluation.detections, index.owners, index.classes, index.boxes, index.crowds, most)
    atomic_write(folder / TABLE, _table(losses, tuple(evaluation.losses), images, labels, index))
    if draw:
        draw_worst_images(images, totals, evaluation.detections, index, imgsz, folder, failed)
        draw_doubtful_labels(labels, index, imgsz, folder, failed)
    files = f"{TABLE}, worst_images*.jpg, worst_labels*.jpg" if draw else TABLE
    return f"worst: {_sentence(totals, images, labels, index)} ({files})"


def _sentence(totals: np.ndarray, images: list[int], labels: list[DoubtfulLabel], index: AnnotationIndex) -> str:
    """What was found: the image with the highest loss, and how many labels of which kind are probably wrong."""
    first = images[0]
    median = np.median(totals[np.isfinite(totals)]) if np.isfinite(totals).any() else np.nan
    compared = f"{totals[first]:.3g} (median of all images {median:.3g})"
    text = f"{encodable(Path(index.paths[first]).name)} has the highest loss, {compared}; "
    if not labels:
        return f"{text}no label is probably wrong"
    counts = Counter(label.kind for label in labels)
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if kind in counts)
    return f"{text}{format_count(len(labels), 'label')} probably wrong ({kinds})"


def _table(losses: np.ndarray, terms: tuple[str, ...], images: list[int], labels: list[DoubtfulLabel],
           index: AnnotationIndex) -> str:
    """Rows of kind, file, value (an image's loss, a label's doubt), classes, box in pixels, and the image's losses."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    loss_columns = [f"{term}_loss" for term in terms]
    table.writerow(("kind", "file", "value", "labelled", "detected", "x1", "y1", "x2", "y2", *loss_columns))

    def parts(image: int) -> list[str]:
        return [f"{loss:.5g}" for loss in losses[image].tolist()]

    def name(kind: int | None) -> str:
        return "" if kind is None else index.names[kind]

    for image in images:
        file, loss = encodable(index.paths[image]), f"{losses[image].sum():.5g}"
        table.writerow(("image", file, loss, "", "", "", "", "", "", *parts(image)))  # neither classes nor a box
    for label in labels:
        corners = [f"{edge:.1f}" for edge in label.box]
        file, doubt = encodable(index.paths[label.image]), f"{label.doubt:.4f}"
        table.writerow((label.kind, file, doubt, name(label.labelled), name(label.detected), *corners,
                        *parts(label.image)))
    return text.getvalue()
