"""Six landscapes with a trap each, of other forms than `search_landscapes.Formula`.

pairs       fitness is a product over pairs of genes; within a pair, a narrow diagonal valley holds the good values
rising      the noise of a training grows with its fitness: good trials are the least certain
crossing    curves cross: what leads at a third of the training is often not what leads at its end
optimal     the default is the best recipe
false_hill  the default stands near the top of a low hill; the high hill is elsewhere in the space
cliff       choices of optimiser and augmentation, each with its own best learning rate, and a cliff behind it
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.evolution import Gene, GeneValue
from ray_yolo.tune.space import read_space
from tests.benchmarks.evolve_table import coordinates
from tests.benchmarks.record_curves import SPACE

TRAPS = ("pairs", "rising", "crossing", "optimal", "false_hill", "cliff")
START = {"pairs": 0.6, "rising": 0.6, "crossing": 0.6, "optimal": 1.0, "false_hill": 0.6, "cliff": 0.6}
"""Fitness of the default, as a share of the best."""
NOISE = 0.04  # of a whole training, as a share of its fitness, except for `rising`
DIVERGED = 0.02  # fitness behind the cliff, as a share
CHOICES = {"optimizer.name": ("SGD", "AdamW"), "augment.close_mosaic": (0, 5, 10)}


class Trap:
    """A landscape of one of `TRAPS`; each instance has another optimum."""

    epochs, epoch_seconds, best = 27, 10.0, 1.0

    def __init__(self, form: str, instance: int) -> None:
        self.name, self._form, self._instance = form, form, instance
        space = read_space(dict(SPACE), Recipe()).space
        self.genes, self.start = space.genes, dict(space.starts[0])
        if form == "cliff":
            self.genes += tuple(Gene(name, "choice", values=values) for name, values in CHOICES.items())
            self.start |= {name: values[0] for name, values in CHOICES.items()}
        draw = np.random.default_rng([51, instance, *form.encode()])
        origin = coordinates(self.genes, self.start)
        self._numbers = sum(gene.kind != "choice" for gene in self.genes)
        self._weights = draw.permutation(1 / (1 + np.arange(self._numbers)))
        self._optimum = _away(origin[:self._numbers], draw, 0.15, 0.4)
        if form == "optimal":
            self._optimum = origin[:self._numbers]
        if form == "false_hill":
            self._optimum = _away(origin[:self._numbers], draw, 0.35, 0.6)
        self._slow = draw.normal(size=self._numbers)
        self._order = draw.permutation(self._numbers)  # pairs are neighbours in this order
        self._shifts = {value: draw.uniform(-0.25, 0.25) for values in CHOICES.values() for value in values}
        self._worth = {value: draw.uniform(0.0, 0.35) for values in CHOICES.values() for value in values}
        self._false = _away(origin[:self._numbers], draw, 0.02, 0.06)  # top of the low hill
        self._scale = 2.5
        if form not in ("optimal", "false_hill"):
            self._scale = 1.0
            loss = -math.log(max(self._end(self.start), 1e-300))
            self._scale = -math.log(START[form]) / loss

    def _end(self, genes: Mapping[str, GeneValue]) -> float:
        """Fitness at the end of a training without noise."""
        place = coordinates(self.genes, genes)[:self._numbers]
        away = place - self._optimum
        if self._form == "pairs":
            return math.exp(-self._scale * self._valleys(away))
        if self._form == "false_hill":
            low = 0.62 * math.exp(-12 * float((place - self._false) ** 2 @ self._weights))
            high = math.exp(-2.0 * float(away**2 @ self._weights))
            return max(low, high)
        if self._form == "cliff":
            return math.exp(-self._scale * self._loss_of_choices(away, genes))
        return math.exp(-self._scale * float(away**2 @ self._weights))

    def _valleys(self, away: np.ndarray) -> float:
        """Loss as a sum over pairs, which is a product of fitness."""
        loss = 0.0
        for left, right, weight in zip(self._order[::2], self._order[1::2], np.sort(self._weights)[::-1], strict=False):
            across, along = away[left] - away[right], away[left] + away[right]
            loss += weight * (across**2 + 0.1 * along**2)
        return float(loss)

    def _loss_of_choices(self, away: np.ndarray, genes: Mapping[str, GeneValue]) -> float:
        """Each choice has a loss of its own and moves the best learning rate, the first gene."""
        chosen = [genes[name] for name in CHOICES]
        moved = away.copy()
        moved[0] -= sum(self._shifts[value] for value in chosen)
        return float(moved**2 @ self._weights) + 0.5 * sum(self._worth[value] for value in chosen)

    def _is_behind_cliff(self, genes: Mapping[str, GeneValue]) -> bool:
        if self._form != "cliff":
            return False
        place = coordinates(self.genes, genes)[0]
        edge = self._optimum[0] + sum(self._shifts[genes[name]] for name in CHOICES) + 0.15
        start = coordinates(self.genes, self.start)[0]
        edge_of_start = self._optimum[0] + sum(self._shifts[self.start[name]] for name in CHOICES) + 0.15
        return bool(place > edge and (start <= edge_of_start or place > start))

    def observe(self, genes: Mapping[str, GeneValue], key: int, epoch: int) -> float | None:
        """Fitness that the training with this key shows after so many epochs."""
        share, end = epoch / self.epochs, self.truth(genes)
        place = coordinates(self.genes, genes)[:self._numbers]
        tilt = math.tanh(2 * float((place - 0.5) @ self._slow) / math.sqrt(self._numbers))
        pace = 0.25 * math.exp(0.5 * tilt)
        if self._form == "crossing":
            pace = 0.04 + 1.6 * end**2 + 0.1 * (1 + tilt)  # the better the end, the slower the start
        grown = (1 - math.exp(-share / pace)) / (1 - math.exp(-1 / pace))
        common = np.random.default_rng([52, self._instance, key]).standard_normal()
        own = np.random.default_rng([53, self._instance, key, epoch]).standard_normal()
        noise = 0.02 + 0.18 * end**2 if self._form == "rising" else NOISE
        return end * grown * max(0.1, 1 + noise * (2 - share) * (0.8 * common + 0.6 * own))

    def truth(self, genes: Mapping[str, GeneValue]) -> float:
        """Fitness at the end without noise, as a share of the best."""
        end = self._end(genes)
        return DIVERGED * end if self._is_behind_cliff(genes) else end


def _away(origin: np.ndarray, draw: np.random.Generator, least: float, most: float) -> np.ndarray:
    """A place at a distance from `least` to `most` on each axis, on the other side where a border is too near."""
    step = draw.choice([-1, 1], len(origin)) * draw.uniform(least, most, len(origin))
    there = origin + step
    outside = (there < 0.02) | (there > 0.98)
    return np.clip(np.where(outside, origin - step, there), 0.02, 0.98)
