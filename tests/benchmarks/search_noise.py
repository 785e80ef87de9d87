"""Five landscapes on which no genes are better than the default, each with another noise of a training.

flat        no gene has an effect; 8 % of the fitness
growing     2 to 20 %: the better the genes, the less certain their trainings
loud_25     25 %
loud_39     39 %, the largest of a recorded table (`bccd_curves.json`)
collapsing  8 %, and one training in ten ends at a tenth of its fitness

Except for `flat`, fitness falls off around a plateau on which the default stands. Each "better" is therefore wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.evolution import GeneValue
from ray_yolo.tune.space import read_space
from tests.benchmarks.evolve_table import coordinates
from tests.benchmarks.record_curves import SPACE

NOISY = ("flat", "growing", "loud_25", "loud_39", "collapsing")
NOISE = {"loud_25": 0.25, "loud_39": 0.39}  # of a whole training, as a share of its fitness; else 0.08
PLATEAU = 0.05  # weighted squared distance from the default up to which genes are as good
COLLAPSES, REST = 0.1, 0.1  # share of trainings that collapse, and what they keep of their fitness


class Noisy:
    """A landscape of one of `NOISY`; each instance has other weights of its genes and another noise."""

    epochs, epoch_seconds, best = 30, 10.0, 1.0

    def __init__(self, form: str, instance: int) -> None:
        self.name, self._form, self._instance = form, form, instance
        space = read_space(dict(SPACE), Recipe()).space
        self.genes, self.start = space.genes, dict(space.starts[0])
        draw = np.random.default_rng([61, instance, *form.encode()])
        self._origin = coordinates(self.genes, self.start)
        self._weights = draw.permutation(1 / (1 + np.arange(len(self.genes))) ** 1.2)
        self._slow = draw.normal(size=len(self.genes))

    def _noise(self, end: float) -> float:
        if self._form == "growing":
            return 0.02 + 0.18 * end**2
        return NOISE.get(self._form, 0.08)

    def observe(self, genes: Mapping[str, GeneValue], key: int, epoch: int) -> float | None:
        """Fitness that the training with this key shows after so many epochs."""
        share, end = epoch / self.epochs, self.truth(genes)
        away = coordinates(self.genes, genes) - self._origin
        pace = 0.3 * math.exp(0.6 * math.tanh(2 * float(away @ self._slow) / math.sqrt(len(away))))
        grown = (1 - math.exp(-share / pace)) / (1 - math.exp(-1 / pace))
        training = np.random.default_rng([62, self._instance, key])
        common, lot = training.standard_normal(), training.random()
        own = np.random.default_rng([63, self._instance, key, epoch]).standard_normal()
        if self._form == "collapsing" and lot < COLLAPSES:
            end *= REST
        return end * grown * max(0.02, 1 + self._noise(end) * (2 - share) * (0.8 * common + 0.6 * own))

    def truth(self, genes: Mapping[str, GeneValue]) -> float:
        """Fitness at the end without noise, as a share of the best."""
        if self._form == "flat":
            return 1.0
        away = coordinates(self.genes, genes) - self._origin
        return math.exp(-2.5 * max(0.0, float(away**2 @ self._weights) - PLATEAU))
