"""The files that command lines in tests name: a data set, models, weights, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import torch
import yaml

from ray_yolo.models.families import build_model
from tests.support.jobs import TINY, make_dataset

WIDE, TALL = 16, 16  # pictures of 28 x 64 and 64 x 28 pixels; the other 5 have 48 x 64
RARE = 6  # every sixth picture's labels have class 1
CERTAIN = 2.0  # class logits of certain.pt: 2 for class 0, -2 for class 1, whatever it sees
FAR_ANCHORS = [[300, 400, 500, 300, 310, 330], [700, 900, 800, 800, 900, 700]]  # pixels, of far.yaml

CALM = {"mosaic": 1.0, "fliplr": 0.0, "hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0, "translate": 0.0, "scale": 0.0}

LISTENER = """
class Listener:
    def on_run_start(self, run_dir, recipe):
        self.run_dir = run_dir
    def on_epoch_end(self, event):
        (self.run_dir / f"heard{event['epoch']}").touch()
"""


def make_files(files: Path) -> None:
    """Write them all.

    base.yaml trains two epochs of three steps without Ray, tracking, plots and augmentation except mosaic.
    """
    _bend(make_dataset(files / "data").parent)
    split = {"path": str(files / "data"), "val": "images/val", "names": ["dark", "bright"]}
    _write(files / "few.yaml", {**split, "train": "images/val"})
    _make_broken(files)
    _write(files / "tiny.yaml", TINY)
    backbone: Any = TINY["backbone"]
    _write(files / "wide.yaml", {**TINY, "backbone": [[-1, 1, "Conv", [24, 3, 2]], *backbone[1:]]})
    _write(files / "far.yaml", {**TINY, "anchors": FAR_ANCHORS})
    base = {"data": str(files / "data" / "data.yaml"), "model": str(files / "tiny.yaml"), "imgsz": 64, "epochs": 2,
            "batch_size": 16, "num_workers": 0, "gpus_per_worker": 0, "cpus_per_worker": 1, "cache": "none",
            "mlflow_uri": "off", "noplots": True, **CALM}
    _write(files / "base.yaml", base)
    _write(files / "plots.yaml", {**base, "noplots": False})
    _write(files / "any_gpu.yaml", {**base, "gpus_per_worker": "auto"})
    _write(files / "fast.yaml", {**base, "optimizer": {"lr0": 0.02}})
    _write(files / "hyp.yaml", {"lr0": 0.03})
    (files / "listener.py").write_text(LISTENER)
    _make_weights(files)


def _bend(data: Path) -> None:
    """Give the training pictures three shapes, and one of the classes to few of them. Labels are relative to sides."""
    for number, path in enumerate(sorted((data / "images" / "train").iterdir())):
        picture = cv2.imread(str(path))
        assert picture is not None
        if number < WIDE + TALL:
            cv2.imwrite(str(path), cv2.resize(picture, (64, 28) if number < WIDE else (28, 64)))
        labels = data / "labels" / "train" / f"{path.stem}.txt"
        rows = [f"{int(number % RARE == 0)} {row.split(maxsplit=1)[1]}" for row in labels.read_text().splitlines()]
        labels.write_text("\n".join(rows))


def _make_broken(files: Path) -> None:
    """broken/data.yaml: a data set with a label that has to be left out."""
    folder = make_dataset(files / "broken", 8).parent
    with (folder / "labels" / "train" / "000.txt").open("a") as labels:
        labels.write("\noops")


@torch.no_grad()
def _make_weights(files: Path) -> None:
    """initial.pt: fresh ones, of no seed of a recipe; certain.pt: the same, with an opinion on classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000)
        model = build_model(TINY, 2)
    torch.save(model.state_dict(), files / "initial.pt")
    for name, tensor in model.head.m.state_dict().items():
        rows = tensor.view(model.head.num_anchors, 7, -1)[:, 5:]
        rows.copy_(torch.tensor([[CERTAIN], [-CERTAIN]]) if name.endswith("bias") else torch.zeros(()))
    torch.save(model.state_dict(), files / "certain.pt")


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False))
