"""The page about a data set: what a training would read, and what it would refuse, without training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import DatasetError
from ray_yolo.core.events import SplitCounts
from ray_yolo.core.redact import printable
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.index import as_training_reads, read_index, refuse_count_from_one, require_boxes, survey
from ray_yolo.labels import DatasetDescription
from ray_yolo.plots.boxes import Picture, plot_pictures
from ray_yolo.runs.folders import output_folder
from ray_yolo.runs.location import location, publish
from ray_yolo.sinks.report import dataset_table
from ray_yolo.sinks.run_logger import write_findings

PROJECT = "runs/checks"
_SPLITS = ("train", "val", "test")
_PICTURES = 16  # dataset.jpg shows this many
_SIDE_PX = 640  # The long side of each of these pictures is scaled to it.
_FINDINGS = 10  # this many are printed for each split
_SIZES = 3  # each split's lines name this many sizes of images


class CheckedDataset(NamedTuple):
    """The page about a data set."""

    lines: list[str]
    problems: list[str]  # what a training would refuse
    names: tuple[str, ...]
    splits: dict[str, SplitCounts]


def check_dataset(data: str, placement: Placement) -> CheckedDataset:
    """Read every split of a data set and write a picture and findings.txt into a new folder.

    Raises:
        DatasetError: if there is no such data set, or none of its splits can be read.
    """
    description = read_description(data)
    indices, problems = read_readable_splits(description)
    if not indices:
        raise DatasetError("; ".join(problems))
    paths = [path for index in indices.values() for path in index.paths]
    folder = output_folder(placement, paths)
    write_findings(indices, folder)
    _draw(indices, folder / "dataset.jpg")
    for split, index in indices.items():
        try:
            refuse_count_from_one(index, description)
            require_boxes(index, description, split)
        except DatasetError as error:
            problems.append(str(error))
    counts = {split: survey(index) for split, index in indices.items()}
    lines = [*_page(description, indices, counts), f"pictures with their boxes: {location(folder)}/dataset.jpg"]
    if (folder / "findings.txt").exists():
        lines.append(f"all findings: {location(folder)}/findings.txt")
    publish(folder)
    names = tuple(next(iter(indices.values())).names)
    return CheckedDataset([printable(line) for line in lines], problems, names, counts)


def read_readable_splits(description: DatasetDescription) -> tuple[dict[str, AnnotationIndex], list[str]]:
    """The splits that can be read, by name, and why the others cannot."""
    indices, problems = dict[str, AnnotationIndex](), []
    for split in _SPLITS:
        if not getattr(description, split):
            continue
        try:
            index = read_index(description, split)
        except DatasetError as error:
            problems.append(str(error))
            continue
        indices[split] = as_training_reads(index, indices["train"]) if "train" in indices else index
    return indices, problems


def _page(description: DatasetDescription, indices: Mapping[str, AnnotationIndex], counts: Mapping[str, SplitCounts]
          ) -> Iterator[str]:
    """The lines of the page: counts of each split, sizes of images and boxes, and the first findings."""
    names = next(iter(indices.values())).names
    yield f"{description.file}: {len(names)} classes"
    yield from dataset_table(counts, names)
    for split, index in indices.items():
        sizes = Counter((width, height) for height, width in index.sizes.tolist())
        most = ", ".join(f"{width} x {height} ({count})" for (width, height), count in sizes.most_common(_SIZES))
        others = f" and {len(sizes) - _SIZES} other sizes" if len(sizes) > _SIZES else ""
        yield f"sizes of the images of {split}: {most}{others}"
        if len(index.boxes):
            shorter = (index.boxes[:, 2:] - index.boxes[:, :2]).min(axis=1)
            yield (f"sizes of the boxes of {split}: shorter side {shorter.min():.4g} to {shorter.max():.4g} px, median "
                   f"{np.median(shorter):.4g} px; clipped {counts[split].clipped}, specks {counts[split].specks}")
    for finding in description.findings:
        yield f"{finding.where}: {finding.what}"
    for split, index in indices.items():
        for finding in index.findings[:_FINDINGS]:
            yield f"{split}: {finding.where}: {finding.what}{' (left out)' if finding.dropped else ''}"
        if len(index.findings) > _FINDINGS:
            yield f"{split}: {len(index.findings) - _FINDINGS} more findings"


def _draw(indices: Mapping[str, AnnotationIndex], path: Path) -> None:
    """Images of all splits with their boxes, evenly chosen, those with boxes first."""
    share = -(-_PICTURES // len(indices))
    pictures = [picture for split, index in indices.items() for picture in _pictures(split, index, share)]
    plot_pictures(pictures, next(iter(indices.values())).names, path)


def _pictures(split: str, index: AnnotationIndex, count: int) -> Iterator[Picture]:
    labelled = np.flatnonzero(np.diff(index.offsets))
    candidates = labelled if len(labelled) else np.arange(len(index))
    evenly = np.linspace(0, len(candidates) - 1, min(count, len(candidates)))
    chosen = candidates[np.unique(evenly.astype(int))]
    store = ImageStore(index, _SIDE_PX, smooth=True)
    for number in chosen.tolist():
        pixels, annotation = store.load_or_grey(number), index[number]
        scale = pixels.shape[1] / annotation.size[1]
        yield Picture(pixels, annotation.boxes * scale, annotation.classes,
                      title=f"{split}: {Path(annotation.path).name}")
