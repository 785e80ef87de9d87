"""One data set as YOLO, COCO and VOC files: the same annotations, the same batches, the same results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data import index as index_module
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.spec import WorkerContext
from ray_yolo.engine.team import image_stores, make_loaders
from ray_yolo.runtime.preflight import read_dataset
from ray_yolo.runtime.trainer import fit
from tests.support.formats import FORMATS, NAMES
from tests.support.jobs import TINY, make_spec
from tests.support.snapshot import snapshot

LIVELY = {"mosaic": 0.5, "mixup": 0.5, "degrees": 20.0, "shear": 5.0, "flipud": 0.5}
QUICK = {  # reaches an mAP50 of 0.1 and more in 12 epochs
    "imgsz": 64, "epochs": 12, "batch_size": 8, "microbatch": 8, "noval": True, "threads": 1,
    "optimizer": {"name": "AdamW", "nominal_batch": 8}, "augment": {"mosaic": 0.0, "scale": 0.0},
    "schedule": {"warmup_epochs": 0, "ema_decay": 0.5}}


class Stored(NamedTuple):
    """The data set in one format."""

    yaml: Path
    written: dict[str, AnnotationIndex]
    read: dict[str, AnnotationIndex]


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_YOLO_CACHE", str(tmp_path_factory.mktemp("user-cache")))
        yield


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stored]:
    """By format. The data folders cannot be written to."""
    found = {}
    for name, write in FORMATS.items():
        root = tmp_path_factory.mktemp(name)
        yaml, written = write(root)
        for path in (*root.rglob("*"), root):
            path.chmod(0o555 if path.is_dir() else 0o444)
        _, train, val = read_dataset(Recipe(data=str(yaml)))
        found[name] = Stored(yaml, written, {"train": train, "val": val})
    return found


def facts(index: AnnotationIndex) -> dict[str, object]:
    """Everything that an index says, but for the folder that it lies in."""
    return {"files": [Path(path).name for path in index.paths], "sizes": index.sizes.tolist(), "names": index.names,
            "labels": index.offsets.tolist(), "classes": index.classes.tolist(), "boxes": index.boxes.tolist(),
            "outlines": index.polygons, "findings": index.findings}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("split", ["train", "val"])
def test_every_format_reads_as_what_was_written(stored: dict[str, Stored], name: str, split: str) -> None:
    written, read = stored[name].written[split], stored[name].read[split]
    assert facts(read) == facts(written)
    assert read.names == NAMES
    assert set(read.classes.tolist()) == {0, 1}
    assert read.offsets[-1] == read.offsets[-2], "the last picture is background"
    assert read.digest == stored["yolo"].read[split].digest


def first_batch(stored: Stored, folder: Path) -> dict[str, Tensor]:
    job = replace(make_spec(folder, num_images=1, augment=LIVELY), names=NAMES, train=stored.read["train"],
                  val=stored.read["val"])
    context = WorkerContext()
    loaders = make_loaders(job, 32, context, Collectives(), image_stores(job, context))
    loaders.sampler.start(0)
    return dict(next(iter(loaders.train)))


def test_every_format_gives_the_same_first_batch_to_the_bit(stored: dict[str, Stored], tmp_path: Path) -> None:
    first, *others = (first_batch(item, tmp_path / name) for name, item in stored.items())
    assert len(first["targets"]) > 0
    assert set(first["targets"][:, 1].tolist()) == {0, 1}
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in ("images", "targets", "indices"))


def test_training_on_every_format_ends_with_the_same_weights_and_map(
        stored: dict[str, Stored], tmp_path: Path) -> None:
    model = tmp_path / "tiny.yaml"
    model.write_text(json.dumps(TINY))
    before = {name: snapshot(item.yaml.parent) for name, item in stored.items()}
    results = [fit(RunConfig.model_validate({
        "recipe": {**QUICK, "data": str(item.yaml), "model": str(model)},
        "placement": {"num_workers": 0, "storage_path": str(tmp_path / name), "mlflow_uri": "off", "noplots": True},
    }), quiet=True) for name, item in stored.items()]
    states = [torch.load(result.last, weights_only=True)["ema"] for result in results]
    assert results[0].metrics["mAP50"] > 0.1
    for result, state in zip(results, states, strict=True):
        assert result.metrics == results[0].metrics
        assert all(torch.equal(tensor, state[name]) for name, tensor in states[0].items())
    assert {name: snapshot(item.yaml.parent) for name, item in stored.items()} == before


@pytest.mark.parametrize("name", FORMATS)
def test_the_second_start_looks_into_no_picture_and_no_label(
        stored: dict[str, Stored], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_check_all", None)
    _, train, val = read_dataset(Recipe(data=str(stored[name].yaml)))
    assert facts(train) == facts(stored[name].read["train"])
    assert facts(val) == facts(stored[name].read["val"])
    assert np.array_equal(train.boxes, stored[name].written["train"].boxes)
