"""The operations of a training step by phase, ours and the peers', and those whose result the host waits for.

    python tests/benchmarks/run.py launches [--models yolov5n yolov8n yolo11n yolo26n] [--images 16]

On a GPU each operation is at least one kernel launch, and a small step is bound by their number. Both sides are counted
alike, in fp32, but ours on `meta` tensors, which run the code of GPUs (no value can be read there: a wait is an error),
and the peers on a CPU, where they run the same code. The optimiser's step is not counted. YOLOv5 has yolov5n alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from contextlib import nullcontext
from unittest.mock import patch

import torch

from ray_yolo.config.recipe import Recipe
from ray_yolo.models.batch_norm import Statistics
from ray_yolo.models.families import build_model, find_family
from ray_yolo.ops.ema import Ema
from tests.benchmarks.harness import HERE, PEER_PYTHON, machine
from tests.benchmarks.launch_counter import Phases

CLASSES, SIDE = 3, 64
MODELS = ("yolov5n", "yolov8n", "yolo11n", "yolo26n")
OF_YOLOV5 = ("yolov5n",)


def main(argv: list[str]) -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--images", type=int, default=16)
    given = parser.parse_args(argv)
    found = {}
    for name in given.models:
        peer = "yolov5" if name in OF_YOLOV5 else "ultralytics"
        found[name] = {"ours": {"launches": own_phases(name, given.images).launches},
                       peer: peer_phases(peer, name, given.images)}
    print(json.dumps({"id": "launches", "operations": found, "images": given.images, "machine": machine()}))


def peer_phases(peer: str, name: str, images: int) -> dict[str, dict[str, int]]:
    """Operations and waits of a peer's step.

    Raises:
        SystemExit: if the peers are not installed.
    """
    if not PEER_PYTHON.exists():
        raise SystemExit(f"{PEER_PYTHON} is missing: run `make bench-env`")
    command = [PEER_PYTHON, HERE / "peer_launches.py", peer, name, str(CLASSES), str(SIDE), str(images)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    phases: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return phases


def own_phases(name: str, images: int = 2) -> Phases:
    """Those of one microbatch and of one update of the statistics and the average."""
    phases = Phases()
    family = find_family(name)
    without_autocast = patch.object(torch, "autocast", lambda *_, **__: nullcontext())  # `meta` has none
    with torch.device("meta"), without_autocast:
        model = build_model(name, CLASSES)
        loss = family.build_loss(model.head, Recipe(model=name, data="unused").loss, CLASSES, SIDE)
        statistics = Statistics(model)
        average = Ema(model, 0.9999, 2000)
        pixels = torch.empty(images, 3, SIDE, SIDE)
        targets = torch.empty(2 * images, 6)
        average.update(model, 1)  # lists its tensors
        loss.terms(torch.ones(len(loss.names), 1), torch.ones(()))  # moves its gains to the device
        with phases.phase("forward"):
            levels = model(pixels)
        with phases.phase("loss"):
            sums = loss.measure(levels, targets, (SIDE, SIDE))
            total = loss.terms(sums.numerators, sums.counts).sum()
        with phases.phase("backward"):
            total.backward()
        with phases.phase("statistics"):
            statistics.apply(statistics.recorded(0), 1)
        with phases.phase("average"):
            average.update(model, 2)
    return phases
