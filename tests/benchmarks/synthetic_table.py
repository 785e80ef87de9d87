"""A table of curves made by formula instead of by training: to test the simulation and to try settings of a search.

Fitness at the end falls off around a hidden optimum at some distance from the start, steeply for a few genes and
hardly for most (as hyper-parameters do); curves rise at a speed that depends on the genes, so that they cross.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.evolution import GeneValue, Space
from ray_yolo.tune.space import read_space
from tests.benchmarks.evolve_table import coordinates
from tests.benchmarks.record_curves import FORMAT, SPACE, configurations


class Landscape:
    """The formula. `start` and `top` are the fitness of the base recipe and of the optimum."""

    def __init__(self, space: Space, seed: int, *, start: float = 0.3, top: float = 0.5, shift: float = 0.25,
                 noise: float = 0.03, epochs: int = 18) -> None:
        rng = np.random.default_rng([8, seed])
        self.space, self.top, self.noise, self.epochs = space, top, noise, epochs
        count = len(space.genes)
        origin = coordinates(space.genes, space.starts[0])
        self.importance = rng.permutation(np.exp(-np.arange(count) / (count / 5)))
        self.optimum = np.clip(origin + rng.normal(0, shift, count), 0.05, 0.95)
        self.steepness = math.log(top / start) / float(((origin - self.optimum) ** 2) @ self.importance)
        self.haste = rng.normal(0, 1, count) * self.importance

    def curve(self, genes: Mapping[str, GeneValue]) -> np.ndarray:
        """(epochs,) fitness without noise."""
        away = coordinates(self.space.genes, genes) - self.optimum
        end = self.top * math.exp(-self.steepness * float((away ** 2) @ self.importance))
        slowness = 0.35 * math.exp(float(np.clip(away @ self.haste, -0.7, 0.7)))
        progress = np.arange(1, self.epochs + 1) / self.epochs
        return end * (1 - np.exp(-((progress / slowness) ** 1.5)))

    def record(self, genes: Mapping[str, GeneValue], seed: int, number: int) -> list[float]:
        """(epochs,) what a training would report: the curve with a common and a jittering relative error."""
        rng = np.random.default_rng([9, seed, number])
        error = 1 + self.noise * (rng.standard_normal() + 0.5 * rng.standard_normal(self.epochs))
        return [float(value) for value in np.round(self.curve(genes) * error, 5)]


def synthetic_table(seed: int, *, num_random: int = 110, num_near: int = 80, num_repeats: int = 8,
                    space: Mapping[str, Any] = SPACE, **shape: Any) -> tuple[dict[str, Any], Landscape]:
    """The content of a table's file, in the mixture that `record_curves.py` records, and its formula."""
    recipe = Recipe(epochs=shape.get("epochs", 18))
    read = read_space(dict(space), recipe).space
    landscape = Landscape(read, seed, **shape)
    rows = [{"genes": genes, "seed": repeat, "fitness": landscape.record(genes, repeat, number),
             "seconds": [0.8] * landscape.epochs}
            for number, (genes, repeat) in enumerate(configurations(read, num_random, num_near, num_repeats))]
    content = {"format": FORMAT, "about": {"made by": "synthetic_table.py"}, "space": dict(space),
               "recipe": recipe.model_dump(mode="json"), "epochs": landscape.epochs, "start_seconds": 1.0, "rows": rows}
    return content, landscape
