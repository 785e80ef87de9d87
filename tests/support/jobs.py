"""Small trainings on generated images: a few layers, 64 pixels, 37 images (a prime number, so no split is even)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe, recipe_digest, resolve
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.learner import Learner, build_learner
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.team import Team, form_team, image_stores

NAMES = ("dark", "bright")

TINY: dict[str, Any] = {
    "nc": 2,
    "depth_multiple": 1.0,
    "width_multiple": 1.0,
    "anchors": [[10, 13, 16, 30, 33, 23], [30, 61, 62, 45, 59, 59]],
    "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 3, 2]], [-1, 1, "C3", [16]],
                 [-1, 1, "Conv", [24, 3, 2]], [-1, 1, "Conv", [32, 3, 2]]],
    "head": [[[3, 4], 1, "Detect", ["nc", "anchors"]]],
}

# Settings under which a difference between runs is a difference of the algorithm. CIoU has kinks where the edges of two
# boxes meet, and training moves boxes there. At larger learning rates the last bit decides on which side a box ends,
# and runs that round differently diverge (measured at 0.01: by 2e-2 of the distance travelled in 200 steps).
STEADY = {"precision": "fp32",
          "imgsz": 64, "batch_size": 16, "microbatch": 4, "epochs": 7, "noval": True, "patience": 0, "threads": 1,
          "optimizer": {"nominal_batch": 16, "clip_norm": 0.3, "lr0": 3e-4}, "schedule": {"warmup_epochs": 0},
          "augment": {"scale": 0.2, "mosaic": 0.5}}


def make_index(folder: Path, num_images: int, seed: int = 0) -> AnnotationIndex:
    """Images with one or two bright or dark rectangles each, written to `folder`, and their annotations."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    paths, boxes, classes, offsets = [], [], [], [0]
    for number in range(num_images):
        image = rng.integers(90, 150, (48, 64, 3), dtype=np.uint8)
        for _ in range(rng.integers(1, 3)):
            kind = int(rng.integers(2))
            x, y = rng.integers(0, 30), rng.integers(0, 20)
            width, height = rng.integers(12, 30), rng.integers(12, 26)
            image[y : y + height, x : x + width] = 20 if kind == 0 else 235
            boxes.append((x, y, x + width, y + height))
            classes.append(kind)
        offsets.append(len(boxes))
        paths.append(str(folder / f"{number:03d}.png"))
        cv2.imwrite(paths[-1], image)
    return AnnotationIndex(tuple(paths), np.array([[48, 64]] * num_images, np.int32), np.array(offsets, np.int64),
                           np.array(classes, np.int64), np.array(boxes, np.float32), NAMES)


def make_dataset(folder: Path, num_images: int = 37) -> Path:
    """The same images as a YOLO data set on disk. Returns its YAML file."""
    for split, count, seed in (("train", num_images, 0), ("val", 11, 1)):
        index = make_index(folder / "images" / split, count, seed)
        labels = folder / "labels" / split
        labels.mkdir(parents=True, exist_ok=True)
        for shown in (index[i] for i in range(len(index))):
            height, width = shown.size
            rows = [f"{kind} {(x1 + x2) / 2 / width} {(y1 + y2) / 2 / height} {(x2 - x1) / width} {(y2 - y1) / height}"
                    for kind, (x1, y1, x2, y2) in zip(shown.classes, shown.boxes.tolist(), strict=True)]
            (labels / f"{Path(shown.path).stem}.txt").write_text("\n".join(rows))
    yaml = folder / "data.yaml"
    yaml.write_text(f"train: images/train\nval: images/val\nnames: [{', '.join(NAMES)}]\n")
    return yaml


def make_config(folder: Path, num_workers: int, placement: dict[str, Any] | None = None, **recipe: Any) -> RunConfig:
    """A training of the tiny model on a data set on disk, as a user configures it.

    It has no tracking and no plots, and one CPU per worker.
    """
    model = folder / "tiny.yaml"
    model.write_text(json.dumps(TINY))
    return RunConfig.model_validate({
        "recipe": {**STEADY, "data": str(make_dataset(folder / "data")), "model": str(model), **recipe},
        "placement": {"num_workers": num_workers, "storage_path": str(folder), "mlflow_uri": "off", "noplots": True,
                      "cpus_per_worker": 1, **(placement or {})}})


def make_spec(folder: Path, num_images: int = 37, **recipe: Any) -> TrainSpec:
    """A training of the tiny model under STEADY, with its run folder; `recipe` replaces fields."""
    (folder / "run").mkdir(parents=True, exist_ok=True)
    fields = {**STEADY, **recipe}
    if fields.get("sync_bn"):
        fields["microbatch"] = None
    resolved = resolve(Recipe.model_validate(fields), 1, gpu=False)
    return TrainSpec(recipe=resolved, digest=recipe_digest(resolved), names=NAMES, architecture=TINY, anchors=None,
                     train=make_index(folder / "train", num_images), val=make_index(folder / "val", 11, seed=1),
                     run_dir=folder / "run")


class Training(NamedTuple):
    """What trains on one worker: the first arguments of the functions of `engine.loop`."""

    learner: Learner
    team: Team


def build_training(spec: TrainSpec, context: WorkerContext | None = None, collectives: Collectives | None = None
                   ) -> Training:
    """A training before its first step, by default of a worker that is alone."""
    context = context or WorkerContext()
    learner = build_learner(spec, context)
    return Training(learner, form_team(learner, context, collectives or Collectives(), image_stores(spec, context)))
