"""What each training flag does, as something to be seen in a run; `tests/process/test_flag_effects.py` looks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from mlflow import MlflowClient

from tests.support.flag_files import CERTAIN, FAR_ANCHORS, RARE, TALL, WIDE
from tests.support.watched import Watched

Sight = tuple[object, object]  # what is seen, and what should be


class Effect(NamedTuple):
    """How a flag shows: `look(run with given and flag, run with given alone)`."""

    look: Callable[[Watched, Watched], Sight]
    given: str = ""  # words that both runs have


def rows(run: Watched) -> dict[int, dict[str, torch.Tensor]]:
    """Trained tensors of the last checkpoint by layer and name."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in run.last["model"].items():
        if name.endswith(("weight", "bias")):
            found.setdefault(int(name.split(".")[1]), {})[name] = tensor
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, Any]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def initial(run: Watched) -> dict[str, torch.Tensor]:
    return dict(torch.load(run.files / "initial.pt", weights_only=True))


def unmoved(run: Watched) -> list[int]:
    """Layers that end as initial.pt has them."""
    return [layer for layer, tensors in rows(run).items() if same(tensors, initial(run))]


def no_gpu(run: Watched, _: Watched) -> Sight:
    """What was asked for; without Ray and with a GPU it also decides where the model is."""
    return [placement["gpus_per_worker"] for placement in run.all("run", "placement")], [0.0]


def another_seed(run: Watched, plain: Watched) -> Sight:
    pictures = np.array_equal(run.passes[0].pictures, plain.passes[0].pictures)
    return {"pictures": pictures, "weights": same(rows(run)[0], rows(plain)[0])}, {"pictures": False, "weights": False}


def rectangles(run: Watched, _: Watched) -> Sight:
    """Shapes by aspect ratio, whole pictures in the same order in every epoch."""
    first, second = run.per_epoch(run.shown)
    batches = [(WIDE, 32, 64), (WIDE, 64, 64), (TALL - 11, 64, 32)]
    pictures = {name for batch in first for name in batch if name is not None}
    return (run.shapes, first == second, len(pictures)), (2 * batches, True, 37)


def rare_pictures(run: Watched, _: Watched) -> Sight:
    """How often pictures with the rare class are drawn: an image's weight is the sum of 1 / count over its labels."""
    texts = {path.stem: path.read_text() for path in (run.files / "data" / "labels" / "train").glob("*.txt")}
    classes = {name: [line.split()[0] for line in text.splitlines()] for name, text in texts.items()}
    counts = {kind: sum(labels.count(kind) for labels in classes.values()) for kind in "01"}
    weights = {name: sum(1 / counts[kind] for kind in labels) for name, labels in classes.items()}
    expected = sum(weight for name, weight in weights.items() if int(name) % RARE == 0) / sum(weights.values())
    drawn = [name for batch in run.shown for name in batch]
    seen = sum(name is not None and int(name) % RARE == 0 for name in drawn) / len(drawn)
    return seen, pytest.approx(expected, abs=0.1)


def smoothed(run: Watched, plain: Watched) -> Sight:
    """Cross-entropy is linear in its target: L(eps) = (1 - eps) L(0) + eps L(all targets 1/2), known for certain.pt.

    The gain of classes is 0.5 x 2 classes / 80 x 3 / 2 levels, on each of two levels.
    """
    eps, gain = 0.2, 2 * 0.5 * 2 / 80 * 3 / 2
    halves = gain * (softplus(CERTAIN) + softplus(-CERTAIN)) / 2
    before, after = plain.all("step", "loss")[0][2], run.all("step", "loss")[0][2]
    return after, pytest.approx((1 - eps) * before + eps * halves, rel=1e-5)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def cosine(run: Watched, _: Watched) -> Sight:
    factors = [1 + (0.01 - 1) * (1 - math.cos(math.pi * epoch / 4)) / 2 for epoch in range(4)]
    return [lr[1] for lr in run.all("epoch", "lr")], pytest.approx([0.01 * factor for factor in factors])


def anchors_px(run: Watched, _: Watched) -> Sight:
    """Those of far.yaml, at strides 8 and 16, far as they are from the labels."""
    anchors = run.last["model"]["model.5.anchors"] * torch.tensor([8.0, 16.0])[:, None, None]
    return anchors.flatten(1).tolist(), FAR_ANCHORS


def registered(run: Watched, _: Watched) -> Sight:
    names = MlflowClient(tracking_uri=f"sqlite:///{run.storage}/mlflow.db").search_registered_models()
    return [(model.name, sorted(model.aliases)) for model in names], [("tiny", ["best"])]


def tracked(run: Watched, _: Watched) -> Sight:
    """A step for each epoch; the last one has the best epoch's numbers, too."""
    if not (run.storage / "mlflow.db").exists():
        return 0, 2
    client = MlflowClient(tracking_uri=f"sqlite:///{run.storage}/mlflow.db")
    (found,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    return len({point.step for point in client.get_metric_history(found.info.run_id, "metrics/mAP50")}), 2


def kept_in(folder: str) -> Callable[[Watched, Watched], Sight]:
    """The decoded images of both splits lie in one file each while training goes on."""
    def look(run: Watched, _: Watched) -> Sight:
        return [sum(folder in file for file in seen.mapped) for seen in run.passes], [2] * len(run.passes)
    return look


def files(folder: Path, *patterns: str) -> set[str]:
    return {path.name for pattern in patterns for path in folder.glob(pattern)}


ONE_STEP = "--data {files}/few.yaml --epochs 1 --workers 0"
BARE = "--freeze 5"  # the head alone is trained: what all other layers begin with is in the last checkpoint

EFFECTS: dict[str, Effect] = {
    # the recipe
    "--data {files}/few.yaml": Effect(lambda run, _: (run.all("run", "num_images"), [11])),
    "--model {files}/wide.yaml": Effect(lambda run, _: (len(rows(run)[0]["model.0.conv.weight"]), 24)),
    "--weights {files}/initial.pt": Effect(lambda run, _: (same(rows(run)[0], initial(run)), True), BARE),
    "--epochs 3": Effect(lambda run, _: (run.all("epoch", "epoch"), [0, 1, 2])),
    "--batch-size 8": Effect(lambda run, _: ([shape[0] for shape in run.shapes], [8, 8, 8, 8, 5] * 2)),
    "--microbatch 4": Effect(lambda run, _: ([shape[0] for shape in run.shapes], [4, 4, 4, 4, 4, 4, 4, 4, 4, 1] * 2)),
    "--imgsz 96": Effect(lambda run, _: ({shape[1:] for shape in run.shapes}, {(96, 96)})),
    "--seed 1": Effect(another_seed, BARE),
    "--precision bf16": Effect(lambda run, _: ({seen.dtype for seen in run.passes}, {torch.bfloat16}),
                               "--precision fp32"),
    "--sync-bn": Effect(lambda run, _: ([shape[0] for shape in run.shapes], [16, 16, 5] * 2), "--microbatch 4"),
    "--exact": Effect(lambda run, _: ({(seen.threads, seen.deterministic) for seen in run.passes}, {(1, True)}),
                      f"{ONE_STEP} --cpus-per-worker 2"),
    "--threads 1": Effect(lambda run, _: ({seen.threads for seen in run.passes}, {1}),
                          f"{ONE_STEP} --cpus-per-worker 2"),
    "--patience 1": Effect(lambda run, _: (run.all("end", "reason"), ["early stop"]),
                           "--epochs 6 --set lr0=1e-6 --set warmup_epochs=0 --set schedule.ema_decay=0"),
    "--freeze 2": Effect(lambda run, _: (unmoved(run), [0, 1]), "--weights {files}/initial.pt"),
    "--freeze 0 3": Effect(lambda run, _: (unmoved(run), [0, 3]), "--weights {files}/initial.pt"),
    "--single-cls": Effect(lambda run, _: ((run.meta["names"], {loss[2] for loss in run.all("step", "loss")}),
                                           (["item"], {0.0}))),
    "--classes 1": Effect(lambda run, _: ([each["train"].per_class[0] for each in run.all("dataset", "splits")], [0])),
    "--fraction 0.5": Effect(lambda run, _: (run.all("run", "num_images"), [18])),
    "--multi-scale": Effect(lambda run, _: ({shape[1:] for shape in run.shapes}, {(64, 64), (96, 96)}),
                            "--epochs 4"),
    "--rect": Effect(rectangles),
    "--quad": Effect(lambda run, _: (run.shapes, [(4, 128, 128), (4, 128, 128), (2, 128, 128)] * 2)),
    "--image-weights": Effect(rare_pictures, "--epochs 8 --noval --set mosaic=0"),
    "--noautoanchor": Effect(anchors_px, "--model {files}/far.yaml"),
    "--noval": Effect(lambda run, _: ([found is not None for found in run.all("epoch", "metrics")], [False, True])),
    "--optimizer Adam": Effect(lambda run, _: (run.optimizers, ["Adam"] * 6)),
    "--optimizer AdamW": Effect(lambda run, _: (run.optimizers, ["AdamW"] * 6)),
    "--cos-lr": Effect(cosine, "--epochs 4 --set warmup_epochs=0"),
    "--label-smoothing 0.2": Effect(smoothed, "--weights {files}/certain.pt"),
    "--set augment.close_mosaic=1": Effect(
        lambda run, _: ([None not in batch for batch in run.shown], [False] * 3 + [True] * 3)),
    "--changes 1:mosaic=0": Effect(lambda run, _: ([None not in batch for batch in run.shown],
                                                   [False] * 3 + [True] * 3)),
    "--config {files}/fast.yaml": Effect(lambda run, _: (run.all("step", "lr")[0][1], 0.02), "--set warmup_epochs=0"),
    "--hyp {files}/hyp.yaml": Effect(lambda run, _: (run.all("step", "lr")[0][1], 0.03),
                                     "--set warmup_epochs=0 --config {files}/fast.yaml"),
    # the placement
    "--workers 1": Effect(lambda run, _: (min(seen.processes for seen in run.passes) > 0, True), ONE_STEP),
    "--cpus-per-worker 2": Effect(lambda run, _: ({seen.threads for seen in run.passes}, {2}), ONE_STEP),
    "--gpus-per-worker 0": Effect(no_gpu, "--config {files}/any_gpu.yaml"),
    "--device cpu": Effect(no_gpu, "--config {files}/any_gpu.yaml"),
    "--cache ram": Effect(kept_in("/dev/shm/")),
    "--cache disk": Effect(kept_in("/cache/images/")),
    "--project mine": Effect(lambda run, _: (str(run.folder.relative_to(run.storage)), "mine/exp")),
    "--name mine": Effect(lambda run, _: (str(run.folder.relative_to(run.storage)), "runs/train/mine")),
    "--storage-path {files}/here": Effect(lambda run, _: (run.folder, run.files / "here" / "runs" / "train" / "exp")),
    "--mlflow-uri sqlite:///{storage}/mlflow.db": Effect(tracked),
    "--registered-name tiny": Effect(registered, "--mlflow-uri sqlite:///{storage}/mlflow.db"),
    "--callbacks {files}/listener.py:Listener": Effect(
        lambda run, _: (files(run.folder, "heard*"), {"heard0", "heard1"})),
    "--save-period 1": Effect(lambda run, _: (files(run.folder / "weights", "epoch*.pt"), {"epoch0.pt", "epoch1.pt"})),
    "--save-steps 1": Effect(lambda run, _: (run.all("checkpoint", "step"), [1, 2, 3, 4, 5, 6])),
    "--save-seconds 0.000001": Effect(lambda run, _: (run.all("checkpoint", "step"), [1, 2, 3, 4, 5, 6])),
    "--keep-checkpoints 1": Effect(lambda run, _: (files(run.folder / "checkpoints", "*"), {"step-6"})),
    "--stop-after 1": Effect(lambda run, _: (run.all("checkpoint", "step"), [3])),
    "--max-hours 0.0000001": Effect(lambda run, _: (run.all("checkpoint", "step"), [1])),
    "--nosave": Effect(lambda run, _: (run.all("checkpoint", "step"), [6])),
    "--noplots": Effect(lambda run, _: (files(run.folder, "*.png", "*.jpg"), set()), "--config {files}/plots.yaml"),
}
"""Words of a flag and how they show."""
