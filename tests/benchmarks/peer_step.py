"""YOLOv5's training step through its public classes; run by `step.py` with the peers' Python, a `contestant`.

    python peer_step.py CASE.pt

CASE has `state` (tensors by name), `images` (uint8), `targets` (n, 6) rows [image, class, x1, y1, x2, y2] in pixels,
`classes` and `gains`. FailureCallback for "gate" it writes the first step's loss and gradient to peer.pt beside CASE;
asked for a
number it takes so many steps.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import yolov5
from contestant import serve
from yolov5.models.yolo import Model
from yolov5.utils.loss import ComputeLoss
from yolov5.utils.torch_utils import ModelEMA, smart_optimizer


class Steps:
    def __init__(self, case: dict[str, Any]) -> None:
        self.images, self.size = case["images"], case["images"].shape[-1]
        boxes = case["targets"][:, 2:] / self.size
        self.targets = torch.cat((case["targets"][:, :2], (boxes[:, :2] + boxes[:, 2:]) / 2,
                                  boxes[:, 2:] - boxes[:, :2]), 1)
        self.model = Model(Path(yolov5.__file__).parent / "models" / f"{case['model']}.yaml", ch=3, nc=case["classes"])
        self.model.load_state_dict(case["state"])
        self.model.hyp, self.model.nc = case["gains"], case["classes"]
        self.optimizer = smart_optimizer(self.model, "SGD", 0.01, 0.937, 5e-4)
        self.ema, self.loss = ModelEMA(self.model), ComputeLoss(self.model.train())

    def backward(self) -> torch.Tensor:
        loss, _ = self.loss(self.model(self.images.float() / 255), self.targets)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update(self.model)


def main(file: str) -> None:
    steps = Steps(torch.load(file, weights_only=True))

    def do(asked: Any) -> None:
        if asked == "gate":
            before = copy.deepcopy(steps.model.state_dict())
            found = {"loss": steps.backward()} | {f"grad {n}": p.grad for n, p in steps.model.named_parameters()}
            torch.save(found, Path(file).with_name("peer.pt"))
            steps.optimizer.zero_grad()
            steps.model.load_state_dict(before)
            return
        for _ in range(asked):
            steps.step()

    serve(do)


if __name__ == "__main__":
    main(*sys.argv[1:])
