"""Is our model the peer's? The same tensors by name and shape, the same predictions and the same loss of one batch.

    python tests/benchmarks/run.py same_as_peer --python ENVIRONMENT/bin/python [--model yolov5nu] [--seed 0]

The peer (ultralytics; yolov5 for its P6 models) is called in an environment of its own through its public interface
(`peer_values.py`); weights
go from its `state_dict` into ours. Prints one JSON line of the largest relative differences.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ray_yolo.config.recipe import Recipe
from ray_yolo.models.criterion import LossSums
from ray_yolo.models.families import build_model, find_family
from ray_yolo.ops.boxes import corners

SIZE, IMAGES, LABELS, CLASSES = (192, 256), 3, 12, 80


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py same_as_peer")
    parser.add_argument("--python", required=True, help="of the environment that the peer is installed in")
    parser.add_argument("--model", default="yolov5nu")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    images, targets = draw(given.seed)
    peer = ask(given.python, {"model": given.model, "images": images, "targets": targets, "seed": given.seed})
    family, model = find_family(given.model), build_model(given.model, CLASSES)
    own = model.state_dict()
    assert {name: value.shape for name, value in own.items()} == {
        n: v.shape for n, v in peer["state"].items() if not n.endswith("anchor_grid")}
    model.load_state_dict({name: peer["state"][name] for name in own})
    with torch.no_grad():
        levels = model.eval()(images)
        boxes, scores = family.decode(model.head, levels[: len(model.head.strides)])
        loss = family.build_loss(model.head, Recipe(model=given.model).loss, CLASSES, max(SIZE))
        sums = loss.measure(model.train()(images), targets, SIZE)
    last = LossSums(*(part[:, -1:] * torch.ones(loss.num_counts) for part in sums)) if not family.suppress else sums
    terms, first = loss.terms(*last), loss.terms(*sums, 0.0)
    expected = torch.tensor([next(value for key, value in peer["terms"].items() if name in key) for name in loss.names])
    theirs = peer["predictions"] if given.model.endswith("6") else peer["predictions"].transpose(1, 2)
    their_scores = theirs[..., 4:5] * theirs[..., 5:] if given.model.endswith("6") else theirs[..., 4:]
    print(json.dumps({
        "id": "same_as_peer", "model": given.model, "tensors": len(own), "points": boxes.shape[1],
        "boxes_px": float((boxes - corners(theirs[..., :4])).abs().max()),
        "scores": float((scores / their_scores - 1).abs().max()), "highest_score": float(scores.max()),
        "names": loss.names, "ours": terms.tolist(),
        "theirs": expected.tolist(), "loss": float((terms / expected - 1).abs().max()),
        "first_epoch": float((first.sum() / peer["first"].sum() - 1).abs())}))


def draw(seed: int) -> tuple[Tensor, Tensor]:
    """Images in 0..1, and labels sorted by image, of sides between 10 and 130 pixels."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(IMAGES, 3, *SIZE, generator=generator)
    low = torch.rand(LABELS, 2, generator=generator) * torch.tensor([90.0, 30.0])
    numbers = torch.arange(LABELS).mul(IMAGES).div(LABELS, rounding_mode="floor")[:, None]
    return images, torch.cat((numbers, torch.randint(CLASSES, (LABELS, 1), generator=generator), low,
                              low + 10 + 120 * torch.rand(LABELS, 2, generator=generator)), 1)


def ask(python: str, case: dict[str, Any]) -> dict[str, Any]:
    """What the peer makes of a case."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("in.pt", "out.pt")]
        torch.save(case, paths[0])
        ended = subprocess.run([python, str(Path(__file__).with_name("peer_values.py")), *map(str, paths)], cwd=folder,
                               capture_output=True, text=True, check=False,
                               env={**os.environ, "PYTHONPATH": "", "YOLO_CONFIG_DIR": folder})
        if ended.returncode:
            raise SystemExit(ended.stderr.strip().splitlines()[-1])
        return torch.load(paths[1], weights_only=True)
