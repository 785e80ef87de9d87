"""The operations of a peer's training step by phase; run by `launches.py` with the peers' Python.

    python peer_launches.py PEER MODEL CLASSES SIDE IMAGES

Prints a JSON line: operations and waits by phase. Losses and averages are the peer's own, through its public classes.
The optimiser's step is not counted: on a CPU it is another one.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from launch_counter import Phases
from torch import Tensor


def main(peer: str, name: str, classes: str, side: str, images: str) -> None:
    torch.manual_seed(0)
    model, average, measure = (yolov5 if peer == "yolov5" else ultralytics)(name, int(classes))
    pixels = torch.rand(int(images), 3, int(side), int(side))
    boxes = torch.tensor([[0.3, 0.3, 0.2, 0.3], [0.6, 0.5, 0.3, 0.2]]).repeat(int(images), 1)
    owners = torch.arange(2 * int(images)) // 2
    model.train()
    measure(model(pixels), owners, boxes)  # fills what is made once
    average.update(model)
    phases = Phases()
    with phases.phase("forward"):
        levels = model(pixels)
    with phases.phase("loss"):
        total = measure(levels, owners, boxes)
    with phases.phase("backward"):
        total.backward()
    with phases.phase("average"):
        average.update(model)
    print(json.dumps({"launches": phases.launches, "waits": phases.waits}))


def yolov5(name: str, classes: int) -> tuple[Any, Any, Any]:
    """Model, average and loss (levels, image of each box, boxes) -> total."""
    import yolov5 as package
    from yolov5.models.yolo import Model
    from yolov5.utils.loss import ComputeLoss
    from yolov5.utils.torch_utils import ModelEMA

    model = Model(f"{next(iter(package.__path__))}/models/{name}.yaml", nc=classes)
    model.nc = classes
    model.hyp = {"box": 0.05, "obj": 1.0, "cls": 0.5, "obj_pw": 1.0, "cls_pw": 1.0, "anchor_t": 4.0, "fl_gamma": 0.0,
                 "label_smoothing": 0.0}
    compute = ComputeLoss(model.train())

    def measure(levels: Any, owners: Tensor, boxes: Tensor) -> Tensor:
        columns = torch.stack([owners.float(), torch.zeros(len(owners))], 1)
        total, _ = compute(levels, torch.cat([columns, boxes], 1))
        return total

    return model, ModelEMA(model), measure


def ultralytics(name: str, classes: int) -> tuple[Any, Any, Any]:
    """The same of the other peer."""
    from ultralytics import YOLO
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel
    from ultralytics.utils.torch_utils import ModelEMA

    model = DetectionModel(YOLO(f"{name}.yaml").model.yaml, nc=classes, verbose=False)
    model.args = get_cfg()

    def measure(levels: Any, owners: Tensor, boxes: Tensor) -> Tensor:
        batch = {"batch_idx": owners.float(), "cls": torch.zeros(len(owners), 1), "bboxes": boxes,
                 "img": torch.zeros(1)}
        total, _ = model.loss(batch, levels)
        return total.sum()

    return model, ModelEMA(model), measure


if __name__ == "__main__":
    main(*sys.argv[1:])
