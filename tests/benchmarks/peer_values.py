"""What a peer's yolov5nu computes, through the peer's own public interface; run by `same_as_peer.py` with the Python of
an environment in which the peer is installed. This file imports nothing of the product, and the product never a peer.

    python peer_values.py IN.pt OUT.pt

IN: images (B, 3, H, W) in 0..1, targets (n, 6) rows [image, class, x1, y1, x2, y2] in pixels, seed. OUT: its tensors by
name, its predictions (B, 4 + classes, N) as centre, size and scores in evaluation, and its three loss terms.
"""

from __future__ import annotations

import sys

import torch
from ultralytics import YOLO
from ultralytics.cfg import get_cfg


def main(given: str, found: str) -> None:
    case = torch.load(given, weights_only=True)
    images, targets = case["images"], case["targets"]
    torch.manual_seed(case["seed"])
    model = YOLO("yolov5n.yaml").model
    model.args = get_cfg()
    with torch.no_grad():  # far from how training starts, so that scores and boxes differ from point to point
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and "dfl" not in name:
                tensor.add_(torch.rand_like(tensor) * 0.1 * tensor.abs().mean())
            if name.endswith("bias") and ".cv3." in name and tensor.mean() < -5:  # of the class scores
                tensor.add_(10)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        predictions = model.eval()(images)[0]
        size = torch.tensor([images.shape[3], images.shape[2]] * 2)
        corners = targets[:, 2:] / size
        boxes = torch.cat(((corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]), 1)
        _, terms = model.train()({"img": images, "batch_idx": targets[:, 0], "cls": targets[:, 1:2], "bboxes": boxes})
    numbers = {name: float(value) for name, value in terms.items()}
    torch.save({"state": state, "predictions": predictions, "terms": numbers}, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
