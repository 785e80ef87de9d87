"""Starts of trainings, validations and predictions that are refused: the recipe or the weights do not fit."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import yaml

from ray_yolo.config.commands import PredictConfig, ValConfig
from ray_yolo.config.placement import Placement, RunConfig
from ray_yolo.config.recipe import Recipe, resolve
from ray_yolo.config.sections import OptimizerConfig
from ray_yolo.core.errors import CheckpointError, ConfigError, DatasetError, DivergedError, InputError
from ray_yolo.core.structures import Orders
from ray_yolo.engine import held_images, loop, team
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.learner import TrainState
from ray_yolo.engine.spec import WorkerContext
from ray_yolo.models.families import build_model
from ray_yolo.runtime.predictor import predict
from ray_yolo.runtime.preflight import check_early, check_model, compare_initial_weights, read_dataset
from ray_yolo.runtime.validator import check
from tests.support.jobs import TINY, make_dataset
from tests.support.messages import Refusal
from tests.support.weights import make_weights

CPU = torch.device("cpu")
LAYERS = "yolov5n has layers 0 to 24"
NO_END = "optimizer.backbone_lr: the model has no upsampling layer…"
RECIPES: list[tuple[dict[str, Any], str]] = [
    ({"model": "yolov5n", "freeze": [99]}, f"freeze: there is no layer 99; {LAYERS}"),
    ({"model": "yolov5n", "freeze": 25}, f"freeze: no layer would be trained; {LAYERS}"),
    ({"model": "tiny.yaml", "optimizer": {"backbone_lr": 0.1}}, NO_END),
    ({"model": "tiny.yaml", "epochs": 8, "changes": "4: optimizer.backbone_lr=0.1"}, NO_END),
    ({"model": "here/yolov8n.yaml"},
     "model: here/yolov8n.yaml: no such file, but here/yolov8.yaml exists; to use it, add the line `scale: n` to it "
     "and give its path, or copy it to yolov8n.yaml; the built-in model is yolov8n"),
    ({"model": "yolov5n", "weights": "mine.pt"},
     "…/here/mine.pt: no such weights file; give a .pt file of a run, of YOLOv5 or of Ultralytics, or a .safetensors "
     "file"),
]
"""Recipes beside tiny.yaml, whose backbone has no end, and here/yolov8.yaml, which has all scales."""

ROWS = {
    "[-1, 1, Cnov, [16, 3, 2]]": ":5: backbone[1]: module 'Cnov' is unknown; did you mean Conv? Known: …",
    "[-1, 1, Conv, [many, 3, 2]]": ":5: backbone[1] Conv: argument 'many' is not a number; known names: …",
    "[7, 1, Conv, [16, 3, 2]]": ": …row 1, …its source is not an earlier row…",
}
"""The second row of a model file."""

SHARED = "workers: the workers of a training cannot share a GPU, because NCCL connects no two processes on one; use " \
         "--gpus-per-worker 1, or one worker"
STRICT = "for 2-4 workers: workers of a range join, leave and move one by one, and Ray can bind only workers that it " \
         "places together; use --num-workers 4, or --placement-strategy PACK or SPREAD"
NO_SERVER = "is no address of an MLflow server; give http://HOST:PORT, https://HOST, sqlite:///FILE, another " \
            "database, file:///FOLDER, databricks, or --mlflow-uri off for none"
PLACEMENTS: list[tuple[dict[str, Any], str]] = [
    ({"num_workers": 2, "gpus_per_worker": 0.5}, f"gpus_per_worker: 0.5 for 2 {SHARED}"),
    ({"num_workers": (1, 4), "gpus_per_worker": 0.25}, f"gpus_per_worker: 0.25 for 4 {SHARED}"),
    ({"num_workers": (2, 4), "placement_strategy": "STRICT_PACK"}, f"placement_strategy: STRICT_PACK {STRICT}"),
    ({"num_workers": (2, 4), "placement_strategy": "STRICT_SPREAD"}, f"placement_strategy: STRICT_SPREAD {STRICT}"),
    ({"mlflow_uri": "off", "registered_name": "birds"},
     "registered_name: a model is registered on an MLflow server, and mlflow_uri is off; leave one of them out"),
    ({"mlflow_uri": "ftp://h"}, f"mlflow_uri: ftp://h {NO_SERVER}"),
]

INVALID: list[tuple[dict[str, Any], str]] = [
    ({"freeze": [-1, 2]}, "…freeze…greater than or equal to 0…"),
    ({"freeze": -1}, "…freeze…the number of the first layers is 0 or more…"),
    ({"quad": True, "microbatch": 2, "batch_size": 16},
     "…quad merges groups of 4 images: batch_size and microbatch must be multiples of 4, not 2…"),
    ({"quad": True, "batch_size": 10},
     "…quad merges groups of 4 images: batch_size and microbatch must be multiples of 4, not 10…"),
    ({"quad": True, "sync_bn": True}, "…quad and sync_bn exclude each other…"),
    ({"rect": True, "image_weights": True}, "…rect and image_weights exclude each other…"),
    ({"batch_size": 0}, "…batch_size…-1 for as many…"),
]
"""Settings that would not do what they say, and pydantic's error."""

FROM_ONE = "…/set/data.yaml: the classes of the labels seem to count from 1: none is 0, and …/set/labels/….txt:… has " \
           "2; YOLO labels count from 0, so subtract 1 from each class"
SPELLINGS = ["2", "2.0", "2.000000000000000000e+00", "+2", "02"]
"""Class 2 as tools write it; `np.savetxt` writes floats."""

NAMES = "…/data.yaml: names other classes than …/best.pt:\n… …/data.yaml  …/best.pt\n…0  cat …  dark\n…1  dog …  " \
        "bright\nthe weights do not name cat, dog; correct `names` of the data set, or give other weights; if only " \
        "the spelling differs, --allow-names takes the unmatched classes in the order of this list"


def _check(settings: dict[str, Any]) -> None:
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
    Path("here").mkdir()
    Path("here/yolov8.yaml").write_text("nc: 2\n")
    check_model(Recipe.model_validate(settings))


def _start(placement: dict[str, Any], model: str = "yolov5n") -> None:
    check_early(RunConfig(recipe=Recipe(model=model), placement=Placement.model_validate(placement)))


def _start_file(row: str) -> None:
    Path("mine.yaml").write_text("nc: 2\nanchors: [[10, 13, 16, 30]]\nbackbone:\n- [-1, 1, Conv, [8, 3, 2]]\n"
                                 f"- {row}\nhead:\n- [[1], 1, Detect, [nc, anchors]]\n")
    _start({}, "mine.yaml")


def _split_over_eight() -> None:
    resolve(Recipe(quad=True, batch_size=16, optimizer=OptimizerConfig(nominal_batch=16)), 8, gpu=False)


def _hold_images() -> None:
    with mock.patch.object(held_images, "free_memory", return_value=340_999):
        held_images.require_memory(341_000, 37, CPU)


def _render_without_triton() -> None:
    with mock.patch.multiple(team, held_bytes=lambda *_: 1, find_spec=lambda name: None):
        team.image_stores(mock.Mock(), WorkerContext())


def _norm_without_triton() -> None:
    with mock.patch.object(team, "find_spec", return_value=None):
        team.normalisation(Recipe(norm_kernels=True), Collectives(), torch.device("cuda"))


def _diverge() -> None:
    """Train steps whose loss is not finite."""
    learner: Any = SimpleNamespace(spec=SimpleNamespace(recipe=Recipe()), state=TrainState())
    step: Any = SimpleNamespace(images=range(16))
    launched: Any = SimpleNamespace(summed=SimpleNamespace(step=step), rates=None)
    result: Any = SimpleNamespace(losses=torch.tensor([math.nan]), skipped=True, gradient_norm=math.nan,
                                  orders=Orders())
    with mock.patch.multiple(loop, start_loading=mock.DEFAULT, launch_steps=lambda *_: itertools.repeat(launched),
                             finish_step=lambda *_: result):
        loop.train(learner, mock.Mock(), mock.Mock(), mock.Mock())


def _dataset(names: Sequence[str], numbers: dict[str, str] | None = None, split: str = "*") -> Path:
    """A data set whose labels have other numbers, in one of its splits."""
    data = make_dataset(Path("set").absolute(), 8)
    data.write_text(f"train: images/train\nval: images/val\nnames: [{', '.join(names)}]\n")
    for file in data.parent.glob(f"labels/{split}/*.txt"):
        rows = [line.split(" ", 1) for line in file.read_text().splitlines()]
        file.write_text("\n".join(f"{(numbers or {}).get(kind, kind)} {box}" for kind, box in rows))
    return data


def _read_from_one(number: str, split: str, single_cls: bool = False) -> None:
    data = _dataset(("dark", "bright"), {"0": "1", "1": number}, split)
    read_dataset(Recipe(data=str(data), single_cls=single_cls))


def _validate_other_names() -> None:
    weights = make_weights(Path("weights").absolute())
    check(ValConfig(weights=str(weights), data=str(_dataset(("cat", "dog")))))


def _validate_one_class_of_another_set() -> None:
    weights = make_weights(Path("weights").absolute(), classes=(1,), single_cls=True, data="other.yaml")
    check(ValConfig(weights=str(weights), data=str(_dataset(("dark", "bright")))))


def _train_from(meta: dict[str, Any] | None) -> None:
    """Train the default model from weights of a smaller one."""
    tensors = build_model("yolov5n", 2).state_dict()
    torch.save({"meta": json.dumps(meta), "ema": tensors} if meta else tensors, "small.pt")
    compare_initial_weights(Recipe(data="d.yaml", weights="small.pt"), ("dark", "bright"))


def _predict(source: str = "pictures", **settings: Any) -> None:
    os.mkdir("pictures")
    for name in ("a.jpg", "b.jpg"):
        Path("pictures", name).write_text("not a picture")
    weights = make_weights(Path("weights").absolute())
    predict(PredictConfig.model_validate({"weights": str(weights), "source": source, **settings}), quiet=True)


def _refusals() -> Iterator[Refusal]:
    for settings, message in RECIPES:
        yield Refusal(f"recipe: {settings}", message, partial(_check, settings),
                      CheckpointError if "weights" in settings else ConfigError)
    for row, message in ROWS.items():
        yield Refusal(f"row {row}", f"…mine.yaml{message}", partial(_start_file, row), ConfigError)
    for settings, message in PLACEMENTS:
        yield Refusal(f"placement: {settings}", message, partial(_start, settings), InputError)
    for settings, message in INVALID:
        yield Refusal(f"recipe: {settings}", message, partial(Recipe.model_validate, settings), ValueError)
    yield Refusal("quad on eight workers", "num_workers: 8 workers, but a step of batch size 16 and microbatch 4 has "
                  "only 4 parts; use 1 to 4 workers, a smaller --microbatch, a larger --batch-size, or --sync-bn",
                  _split_over_eight, ConfigError)
    yield Refusal("an odd microbatch", "microbatch: 7 does not divide batch size 16; legal: 1, 2, 4, 8, 16",
                  lambda: resolve(Recipe(batch_size=None, microbatch=7), 1, gpu=False), ConfigError)
    yield Refusal("more images than memory", "augment.render: device: the 37 decoded images need 341 kB, and … has "
                  "341 kB free; leave augment.render out, and the loaders render", _hold_images, ConfigError)
    yield Refusal("a device that renders without Triton", "augment.render: device: Triton is not installed where this "
                  "worker runs; install it, or leave augment.render out", _render_without_triton, ConfigError)
    yield Refusal("norm kernels without Triton", "norm_kernels: Triton is not installed where this worker runs; "
                  "install it, or leave norm_kernels out", _norm_without_triton, ConfigError)
    yield Refusal("steps that are not finite", "step 10: loss or gradient not finite 10 times in a row; lower "
                  "optimizer.lr0, or use --set precision=fp32", _diverge, DivergedError)
    for number in SPELLINGS:
        for split in ("train", "val"):
            yield Refusal(f"classes from 1: {number} in {split}", FROM_ONE, partial(_read_from_one, number, split),
                          DatasetError)
    yield Refusal("classes from 1 as one class", FROM_ONE, partial(_read_from_one, "2", "*", True), DatasetError)
    yield Refusal("validation of other names", NAMES, _validate_other_names, DatasetError)
    yield Refusal("validation of some classes as one", "classes: …best.pt was trained on classes 1 of other.yaml as "
                  "one; say with --classes which ones of …data.yaml these are", _validate_one_class_of_another_set)
    for meta, hint in (({"names": ["dark", "bright"], "recipe": {"model": "yolov5n"}}, " yolov5n"), (None, "")):
        yield Refusal(f"weights of another model{hint}", "small.pt: has only … of the 349 tensors of yolov5s, the "
                      f"default model; give its own model with --model{hint}", partial(_train_from, meta),
                      CheckpointError)
    yield Refusal("a prediction of no picture", "source: none of 2 files could be read; the first, a.jpg, …", _predict)
    yield Refusal("a prediction of a class that is not there", "classes: 2 …", partial(_predict, classes=(2,)))
    yield Refusal("a prediction of nothing", "source: nowhere…", partial(_predict, "nowhere"))


REFUSALS = list(_refusals())
