"""What a cheaper training says about a whole one: 24 recipes, each trained whole and cheaper in several ways.

    python tests/benchmarks/run.py fidelity --table tests/benchmarks/fidelity.json

The trainings are those of `record_curves.py`. For each way: Spearman's rank correlation of its fitness with that of the
whole training, and its cost as a share of the whole one's epochs x images x pixels.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ray_yolo.tune.evolution import draw, mutate
from ray_yolo.tune.space import read_space
from ray_yolo.tune.trials import overlay
from tests.benchmarks.harness import machine
from tests.benchmarks.record_curves import BASE, SPACE, base_weights, train_missing

RECIPES = 24
NINTH, THIRD = math.ceil(BASE.epochs / 9), math.ceil(BASE.epochs / 3)
SMALL = 64  # half of the pixels, nearly: sizes are multiples of 32
WAYS = {"whole schedule of a ninth": {"epochs": NINTH}, "whole schedule of a third": {"epochs": THIRD},
        "a ninth of the images": {"fraction": 1 / 9}, "a third of the images": {"fraction": 1 / 3},
        f"imgsz {SMALL} of {BASE.imgsz}": {"imgsz": SMALL}}


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank. 0 if all values on a side are equal."""
    first, second = centred_ranks(left), centred_ranks(right)
    norm = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / norm if norm else 0.0


def centred_ranks(values: Sequence[float]) -> np.ndarray:
    """The ranks of values from 1, less their mean; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)  # for each distinct value, the rank of its last occurrence
    ranks = (last - (counts - 1) / 2)[inverse]
    return np.asarray(ranks - ranks.mean())


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is missing, write the table, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/fidelity"))
    parser.add_argument("--recipes", type=int, default=RECIPES)
    parser.add_argument("--cpus", type=float, default=1.0, help="threads of a training")
    options = parser.parse_args(argv)
    base = BASE.model_copy(update={"weights": base_weights(options.work, options.cpus)})
    space = read_space(SPACE, base).space
    recipes = []
    for number in range(options.recipes):  # half near the default, half anywhere
        rng = np.random.default_rng([15, number])
        genes = mutate(space.genes, space.starts[0], rng) if number % 2 else {
            gene.name: draw(gene, rng.random()) for gene in space.genes}
        recipes.append(overlay(base, genes).model_copy(update={"seed": number}))
    wanted = [recipe.model_copy(update=way) for recipe in recipes for way in ({}, *WAYS.values())]
    rows = list(train_missing(options.work, wanted, options.cpus))
    curves = [row["fitness"] or [0.0] for row in rows]
    whole = [curve[-1] for curve in curves[::1 + len(WAYS)]]
    prefixes = {f"prefix of {name}": ([curve[min(epochs, len(curve)) - 1] for curve in curves[::1 + len(WAYS)]],
                                      epochs / base.epochs)
                for name, epochs in (("a ninth", NINTH), ("a third", THIRD))}
    cheaper = {name: ([curve[-1] for curve in curves[number::1 + len(WAYS)]], cost(way))
               for number, (name, way) in enumerate(WAYS.items(), 1)}
    found = {name: {"correlation": round(spearman(fitness, whole), 3), "cost": round(share, 3), "fitness": fitness}
             for name, (fitness, share) in (prefixes | cheaper).items()}
    line = {"id": "fidelity", "ways": found, "whole": whole, "command": "python tests/benchmarks/run.py fidelity",
            "machine": machine()}
    options.table.write_text(json.dumps(line, indent=1) + "\n")
    print(json.dumps({**line, "ways": {name: {**way, "fitness": None} for name, way in found.items()}}))


def cost(way: dict[str, float]) -> float:
    """Epochs x images x pixels of a way to train, as a share of the whole training's."""
    return (way.get("epochs", BASE.epochs) / BASE.epochs * way.get("fraction", 1.0)
            * (way.get("imgsz", BASE.imgsz) / BASE.imgsz) ** 2)


if __name__ == "__main__":
    main()
