"""A landscape on which better genes cost more: larger images, and a smaller batch.

The pixels are known to a search beforehand. What the batch costs shows only when a trial has trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ray_yolo.tune.evolution import Gene, GeneValue
from tests.benchmarks.evolve_table import coordinates

SIZES, BATCHES = {64: 0.6, 96: 0.8, 128: 1.0}, {4: 1.0, 16: 0.85}  # what they are worth
BATCH_COST = {4: 1.6, 16: 1.0}
NOISE = 0.06  # of a whole training, as a share of its fitness


class Costly:
    """The landscape; each instance has another best learning rate."""

    name, epochs, epoch_seconds, best = "costly", 27, 10.0, 1.0
    genes = (Gene("imgsz", "choice", values=tuple(SIZES)), Gene("batch_size", "choice", values=tuple(BATCHES)),
             Gene("lr0", low=0.001, high=0.1, log=True))
    start: Mapping[str, GeneValue] = {"imgsz": 64, "batch_size": 16, "lr0": 0.01}

    def __init__(self, instance: int) -> None:
        self._instance = instance
        self._optimum = np.random.default_rng([71, instance]).uniform(0.2, 0.8)

    def cost(self, genes: Mapping[str, GeneValue]) -> float:
        """The time of an epoch; 1 for the default."""
        return (float(genes["imgsz"]) / 64) ** 2 * BATCH_COST[int(genes["batch_size"])]

    def observe(self, genes: Mapping[str, GeneValue], key: int, epoch: int) -> float | None:
        """Fitness that the training with this key shows after so many epochs."""
        share = epoch / self.epochs
        common = np.random.default_rng([72, self._instance, key]).standard_normal()
        own = np.random.default_rng([73, self._instance, key, epoch]).standard_normal()
        grown = (1 - math.exp(-3 * share)) / (1 - math.exp(-3))
        return self.truth(genes) * grown * max(0.05, 1 + NOISE * (2 - share) * (0.8 * common + 0.6 * own))

    def truth(self, genes: Mapping[str, GeneValue]) -> float:
        """Fitness at the end without noise, as a share of the best."""
        rate = coordinates(self.genes, genes)[2]
        return SIZES[int(genes["imgsz"])] * BATCHES[int(genes["batch_size"])] * math.exp(-((rate - self._optimum) ** 2))
