"""A training step (forward, loss, backward, clip, SGD, average) of ours against YOLOv5's, and the memory it takes.

    python tests/benchmarks/run.py step|memory [--model yolov5n] [--imgsz 320] [--batch 16] [--microbatch 16]
        [--threads 1] [--precision fp32]

Both have the same weights, the same uint8 images and the same boxes. Before anything is timed, the losses have to agree
to 1e-3 and the gradients to a cosine of 0.999. `step` compares CPU seconds of a step, `memory` the most memory that the
processes ever held. `--microbatch` cuts our batch (the peer's stays whole).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ray_yolo.config.recipe import Recipe, resolve
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.core.system import keep_freed_memory
from ray_yolo.engine import loop
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.worker_rows import read_rows
from tests.benchmarks.contestant import serve
from tests.benchmarks.harness import contestant, report, take_turns
from tests.support.jobs import Training, build_training

CLASSES, LABELS, SAME_LOSS, SAME_GRADIENT = 80, 8, 1e-3, 0.999
GAINS = {"box": 0.05, "cls": 0.5, "cls_pw": 1.0, "obj_pw": 1.0, "anchor_t": 4.0, "fl_gamma": 0.0,
         "label_smoothing": 0.0}  # the default recipe's; that of `obj` goes with the size


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py step")
    parser.add_argument("--model", default="yolov5n")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatch", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.contestant:
        return answer(given)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "case.pt")
        torch.save(draw(given), file)
        with (contestant("run.py", *sys.argv[1:], "--contestant", file, threads=given.threads) as ours,
              contestant("peer_step.py", file, threads=given.threads, peer=True) as peer):
            gate = check(*[torch.load(ask("gate") and file.with_name(name), weights_only=True)
                           for ask, name in ((ours, "ours.pt"), (peer, "peer.pt"))])
            turns = take_turns({"ours": lambda: ours(given.steps), "yolov5": lambda: peer(given.steps)}, given.rounds)
    if sys.argv[1] == "memory":
        report("memory", {name: each[-1:] for name, each in turns.items()}, "peak_mb", gate=gate)
    else:
        report("step", turns, scale=1 / given.steps, gate=gate)


def draw(given: argparse.Namespace) -> dict[str, Any]:
    """Weights, images, and boxes of sides between 10 and 110 pixels whose centres are 72 pixels apart or more: where
    several boxes claim one prediction, the peer takes the last one and we the best."""
    generator, count = torch.Generator().manual_seed(0), given.batch * LABELS
    places = torch.cartesian_prod(torch.arange(4), torch.arange(LABELS // 4)).repeat(given.batch, 1)
    centre = 40 + 80 * places + 4 * torch.rand(count, 2, generator=generator)
    half = (5 + 50 * torch.rand(count, 2, generator=generator)).minimum(centre)
    classes = torch.randint(CLASSES, (count, 1), generator=generator)
    targets = torch.cat((torch.arange(count)[:, None] // LABELS, classes, centre - half, centre + half), 1)
    images = torch.randint(256, (given.batch, 3, given.imgsz, given.imgsz), dtype=torch.uint8, generator=generator)
    return {"model": given.model, "classes": CLASSES, "images": images, "targets": targets,
            "gains": GAINS | {"obj": (given.imgsz / 640) ** 2}, "state": parts_of(given).learner.model.state_dict()}


def parts_of(given: argparse.Namespace) -> Training:
    """What trains a data set of one batch; its pictures are never read."""
    recipe = resolve(Recipe.model_validate({
        "data": "shapes8", "model": given.model, "imgsz": given.imgsz, "batch_size": given.batch, "epochs": 1000,
        "microbatch": given.microbatch or given.batch, "threads": given.threads, "precision": given.precision,
        "optimizer": {"nominal_batch": given.batch}}), 1, gpu=False)
    index = AnnotationIndex(tuple(map(str, range(given.batch))), np.full((given.batch, 2), given.imgsz, np.int32),
                            np.zeros(given.batch + 1, np.int64), np.zeros(0, np.int64), np.zeros((0, 4), np.float32),
                            tuple(map(str, range(CLASSES))))
    torch.set_num_threads(given.threads)
    spec = TrainSpec(recipe, "", index.names, None, None, index, index, Path())
    return build_training(spec, WorkerContext(threads=given.threads))


def answer(given: argparse.Namespace) -> None:
    """Be our side: "gate" or a number of steps, as `peer_step.py`."""
    keep_freed_memory()
    case, (learner, team) = torch.load(given.contestant, weights_only=True), parts_of(given)
    learner.model.load_state_dict(case["state"])
    size = learner.plan.recipe.microbatch or given.batch
    numbers = case["targets"][:, 0]
    batches = []
    for first in range(0, given.batch, size):
        inside = case["targets"][(numbers >= first) & (numbers < first + size)].clone()
        inside[:, 0] -= first
        batches.append({"images": case["images"][first:first + size], "targets": inside})
    step = learner.plan.steps(0)[0]

    def do(asked: Any) -> None:
        if asked == "gate":
            summed = loop.sum_microbatches(learner, team, step, iter(batches), 0, loop.Orders)
            found = {f"grad {name}": p.grad for name, p in learner.model.named_parameters()}
            losses = read_rows(summed.gathered, summed.layout).losses
            torch.save({"loss": losses.sum()} | found, Path(given.contestant).with_name("ours.pt"))
            learner.optimizer.zero_grad()
            return
        for number in range(asked):
            summed = loop.sum_microbatches(learner, team, step, iter(batches), number, loop.Orders)
            loop.finish_step(learner, team, loop.update_weights(learner, team, summed, learner.plan.rates(step, 0)))

    serve(do)


def check(ours: dict[str, torch.Tensor], peer: dict[str, torch.Tensor]) -> dict[str, float]:
    """Refuse to time what is not the same step.

    Raises:
        SystemExit: if losses or gradients differ.
    """
    names = sorted(ours.keys() - {"loss"})
    flat = [torch.cat([side[name].flatten().double() for name in names]) for side in (ours, peer)]
    cosine = float(torch.nn.functional.cosine_similarity(*flat, dim=0))
    loss = abs(float(ours["loss"]) / float(peer["loss"]) - 1)
    if not (loss < SAME_LOSS and cosine > SAME_GRADIENT):
        raise SystemExit(f"not the same step: losses differ by {loss:.1e}, gradients have a cosine of {cosine:.5f}")
    return {"loss": loss, "cosine": cosine}
