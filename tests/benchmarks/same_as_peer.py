"""Is our yolov5nu the peer's? The same tensors by name and shape, the same predictions and the same loss of one batch.

    python tests/benchmarks/run.py same_as_peer --python ENVIRONMENT/bin/python [--seed 0]

The peer (ultralytics) is called in an environment of its own through its public interface (`peer_values.py`); weights
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

from ray_yolo.config.sections import LossConfig
from ray_yolo.families import build_model, find_family
from ray_yolo.ops.boxes import corners

MODEL, SIZE, IMAGES, LABELS, CLASSES = "yolov5nu", (160, 224), 3, 12, 80
GAINS = LossConfig(box=7.5, cls=0.5, dfl=1.5)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py same_as_peer")
    parser.add_argument("--python", required=True, help="of the environment that the peer is installed in")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    images, targets = draw(given.seed)
    peer = ask(given.python, {"images": images, "targets": targets, "seed": given.seed})
    family, model = find_family(MODEL), build_model(MODEL, CLASSES)
    own = model.state_dict()
    assert {name: value.shape for name, value in own.items()} == {n: v.shape for n, v in peer["state"].items()}
    model.load_state_dict(peer["state"])
    with torch.no_grad():
        boxes, scores = family.decode(model.head, model.eval()(images))
        loss = family.build_loss(model.head, GAINS, CLASSES, max(SIZE))
        terms = loss.terms(*loss.measure(model.train()(images), targets, SIZE))
    expected = torch.tensor([next(value for key, value in peer["terms"].items() if name in key) for name in loss.names])
    theirs = peer["predictions"].transpose(1, 2)
    print(json.dumps({
        "id": "same_as_peer", "tensors": len(own), "points": boxes.shape[1],
        "boxes_px": float((boxes - corners(theirs[..., :4])).abs().max()),
        "scores": float((scores / theirs[..., 4:] - 1).abs().max()), "highest_score": float(scores.max()),
        "names": loss.names, "ours": terms.tolist(),
        "theirs": expected.tolist(), "loss": float((terms / expected - 1).abs().max())}))


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
