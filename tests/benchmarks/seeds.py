"""Noise of trainings, and how much of it a pair on one seed shares: the default and three neighbours, eight seeds each.

    python tests/benchmarks/run.py seeds --table tests/benchmarks/seeds.json

The trainings are those of `record_curves.py`. `noise` is the standard deviation of the last epoch's fitness over seeds
as a share of its mean, `correlation` that of two recipes over the seeds (mean of all pairs of recipes).
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ray_yolo.tune.evolution import mutate
from ray_yolo.tune.space import read_space
from ray_yolo.tune.trials import overlay
from tests.benchmarks.harness import machine
from tests.benchmarks.record_curves import BASE, SPACE, base_weights, train_missing

NEIGHBOURS, SEEDS = 3, 8


def summary(fitness: np.ndarray) -> dict[str, Any]:
    """Noise and correlation of (recipes, seeds) fitness, with the spread of the correlation over pairs of recipes."""
    noise = fitness.std(axis=1, ddof=1) / fitness.mean(axis=1)
    pairs = [float(np.corrcoef(*pair)[0, 1]) for pair in itertools.combinations(fitness, 2)]
    return {"noise": round(float(np.sqrt((noise**2).mean())), 4), "correlation": round(float(np.mean(pairs)), 3),
            "of pairs": [round(pair, 2) for pair in pairs]}


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is missing, write the table, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--cpus", type=float, default=1.0, help="threads of a training")
    options = parser.parse_args(argv)
    base = BASE.model_copy(update={"weights": base_weights(options.work, options.cpus)})
    space = read_space(SPACE, base).space
    genes = tuple(replace(gene, gain=2 * gene.gain) for gene in space.genes)
    near = [mutate(genes, space.starts[0], np.random.default_rng([14, number])) for number in range(NEIGHBOURS)]
    recipes = [overlay(base, values) for values in (space.starts[0], *near)]
    wanted = [recipe.model_copy(update={"seed": seed}) for seed in range(options.seeds) for recipe in recipes]
    rows = list(train_missing(options.work, wanted, options.cpus))
    fitness = np.array([row["fitness"][-1] if row["fitness"] else np.nan for row in rows])
    found = summary(fitness.reshape(options.seeds, -1).T)
    line = {"id": "seeds", **found, "genes": [dict(space.starts[0]), *near],
            "fitness": fitness.reshape(options.seeds, -1).T.tolist(), "seconds": sum(rows[0]["seconds"]),
            "command": "python tests/benchmarks/run.py seeds", "machine": machine()}
    options.table.write_text(json.dumps(line, indent=1) + "\n")
    print(json.dumps(line))


if __name__ == "__main__":
    main()
