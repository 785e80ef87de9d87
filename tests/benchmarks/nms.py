"""Non-maximum suppression of ours against the peers': CPU seconds of an image, at confidence 0.001 and 80 classes.

    python tests/benchmarks/run.py nms [--anchors 6300] [--images 8] [--rounds 5]

All get the same boxes and scores, about half an anchor's classes above the threshold. Before anything is timed each
peer's detections of one image have to be ours, nearly all of them (they round while they keep classes apart). The
peers stop at a time limit and give nothing for the images that are left; `detections` says how many each gave.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from ray_yolo.ops.nms import select
from tests.benchmarks.contestant import timed
from tests.benchmarks.harness import contestant, report, take_turns

PEERS, CLASSES, LIMIT, SAME = ("yolov5", "ultralytics"), 80, 300, 0.98


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py nms")
    parser.add_argument("--anchors", type=int, default=6300)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    boxes, scores = draw(given.images, given.anchors)

    def detect(images: int) -> list[list[float]]:
        found = select(boxes[:images], scores[:images], confidence=0.001, iou=0.6, max_detections=LIMIT,
                       multi_label=True)
        return [each[:, 4].tolist() for each in found]

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "case.pt")
        torch.save({"boxes": boxes, "scores": scores, "limit": LIMIT}, file)
        with (contestant("peer_nms.py", "yolov5", file, peer=True) as first,
              contestant("peer_nms.py", "ultralytics", file, peer=True) as second):
            asked = dict(zip(PEERS, (first, second), strict=True))
            [own] = detect(1)
            for name, ask in asked.items():
                [theirs] = ask(1)["result"]
                same = len(set(own) & set(theirs)) / max(len(own), len(theirs))
                if same < SAME:
                    raise SystemExit(f"{name} detects something else: {same:.0%} of the detections are ours")
            sides = {name: (lambda ask=ask: ask(given.images)) for name, ask in asked.items()}
            turns = take_turns({"ours": lambda: timed(detect, given.images), **sides}, given.rounds)
    report("nms", turns, scale=1 / given.images,
           detections={name: sum(map(len, each[-1]["result"])) for name, each in turns.items()})


def draw(images: int, anchors: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Boxes (B, N, 4) that overlap in clusters, and scores (B, N, classes) of which 0.7 % pass."""
    generator = torch.Generator().manual_seed(0)
    clusters = 600 * torch.rand(images, 40, 2, generator=generator)
    chosen = torch.randint(40, (images, anchors, 1), generator=generator).expand(-1, -1, 2)
    centre = clusters.gather(1, chosen) + 8 * torch.randn(images, anchors, 2, generator=generator)
    half = 10 + 30 * torch.rand(images, anchors, 2, generator=generator)
    scores = torch.rand(images, anchors, CLASSES, generator=generator)
    return torch.cat((centre - half, centre + half), 2), (scores - 0.993).clamp(min=0) * 100 + 1e-6
