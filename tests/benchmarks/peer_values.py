"""What a peer's model computes, through the peer's own public interface; run by `same_as_peer.py` with the Python of
an environment in which the peer is installed. This file imports nothing of the product, and the product never a peer.

    python peer_values.py IN.pt OUT.pt

IN: the model's name, images (B, 3, H, W) in 0..1, targets (n, 6) rows [image, class, x1, y1, x2, y2] in pixels, seed.
OUT: its
tensors by name, its predictions (B, 4 + classes, N) as centre, size and scores in evaluation, and its three loss terms.
Of two heads
the predictions are the one-to-many head's; `first` are the weighted terms of both in the first epoch, the terms the
one-to-one head's.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor


def main(given: str, found: str) -> None:
    case = torch.load(given, weights_only=True)
    images, targets = case["images"], case["targets"]
    torch.manual_seed(case["seed"])
    model = build(case["model"])
    with torch.no_grad():  # far from how training starts, so that scores and boxes differ from point to point
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and "dfl" not in name and "anchors" not in name:
                tensor.add_(torch.rand_like(tensor) * 0.1 * tensor.abs().mean())
            if name.endswith("bias") and "cv3." in name and tensor.mean() < -5:  # of the class scores
                tensor.add_(10)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        predictions = model.eval()(images)[0]
        size = torch.tensor([images.shape[3], images.shape[2]] * 2)
        corners = targets[:, 2:] / size
        boxes = torch.cat(((corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]), 1)
        total, terms = losses(case["model"], model.train(), images, targets[:, :2], boxes)
    torch.save({"state": state, "predictions": predictions, "terms": terms, "first": total / len(images)}, found)


def build(name: str) -> torch.nn.Module:
    if name.endswith("6"):
        import yolov5
        from yolov5.models.yolo import Model

        return Model(f"{next(iter(yolov5.__path__))}/models/hub/{name}.yaml")
    from ultralytics import YOLO
    from ultralytics.cfg import get_cfg

    model = YOLO(f"{name.removesuffix('u')}.yaml").model
    model.args = get_cfg()
    return model


def losses(name: str, model: torch.nn.Module, images: Tensor, owners: Tensor, boxes: Tensor
           ) -> tuple[Tensor, dict[str, float]]:
    """The loss that is trained on, summed over images, and its terms by name."""
    if not name.endswith("6"):
        total, terms = model({"img": images, "batch_idx": owners[:, 0], "cls": owners[:, 1:], "bboxes": boxes})
        return total, {key: float(value) for key, value in terms.items()}
    from yolov5.utils.loss import ComputeLoss

    gains = {"box": 0.05, "obj": 1.0, "cls": 0.5, "obj_pw": 1.0, "cls_pw": 1.0, "anchor_t": 4.0, "fl_gamma": 0.0}
    levels = model.model[-1].nl
    scale = 3 / levels
    model.hyp = gains | {"box": gains["box"] * scale, "cls": gains["cls"] * scale,
                         "obj": gains["obj"] * (max(images.shape[2:]) / 640) ** 2 * scale, "label_smoothing": 0.0}
    total, terms = ComputeLoss(model)(model(images), torch.cat((owners, boxes), 1))
    return total, dict(zip(("box", "obj", "cls"), terms.tolist(), strict=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
