"""Landscapes on which searches are compared: curves of recorded trainings, and formulas.

A landscape has the genes and the start of a search, and says what a training would show after so many epochs, and what
its genes are truly worth at the end, as a share of the best.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.evolution import Gene, GeneValue, Space
from ray_yolo.tune.space import load_space, read_space
from tests.benchmarks.evolve_table import Surface, coordinates, read_table
from tests.benchmarks.record_curves import SPACE
from tests.benchmarks.search_costs import Costly
from tests.benchmarks.search_noise import NOISY, Noisy
from tests.benchmarks.search_traps import TRAPS, Trap

HERE = Path(__file__).parent
TABLES = ("yolo_curves", "tuned_curves", "yolo11n_curves", "bccd_curves")
"""Recorded trainings (`record_curves.py`)."""
LATER_TABLES = ("yolov5n_bccd_27_curves", "yolov5n_cards_12_curves", "yolo11n_bccd_12_curves",
                "yolo11n_cards_27_curves")
"""Those that were recorded when the search was as it is today: nothing of it was chosen on any of them."""
SEEDS = json.loads((HERE / "seeds.json").read_text())  # measured noise of a training
CLAIMED = ("hill", "level")  # by `--claims` alone
TUNED = ("yolo_curves", "bccd_curves", "tent", "good", "early", "pairs", "optimal", "false_hill")
"""The landscapes on which the default search was chosen. The others, and those of files, only judge it."""


class Landscape(Protocol):
    """`start` are the default's genes, `epochs` those of a whole training."""

    name: str
    genes: tuple[Gene, ...]
    start: Mapping[str, GeneValue]
    epochs: int
    epoch_seconds: float

    def observe(self, genes: Mapping[str, GeneValue], key: int, epoch: int) -> float | None:
        """Fitness that the training with this key shows after so many epochs; None: it failed."""

    def truth(self, genes: Mapping[str, GeneValue]) -> float:
        """Fitness at the end without noise, as a share of the best."""

    best: float
    """The fitness whose share `truth` is."""


def noise_key(search_seed: int, trial: int, seed: int) -> int:
    """The noise of a training: another one for each trial and each training seed."""
    return (search_seed * 100 + seed) * 10_000 + trial


def training_seed(key: int) -> int:
    """What trainings on one seed have in common."""
    return key // 10_000


@cache
def _surface(table: str) -> Surface:
    return Surface(read_table(HERE / f"{table}.json"))


class Recorded:
    """A surface through recorded trainings."""

    def __init__(self, name: str, instance: int) -> None:
        self._surface, self._instance = _surface(name), instance
        table = self._surface.table
        self.name, self.genes, self.start = name, table.space.genes, table.space.starts[0]
        self.epochs, self.epoch_seconds = table.epochs, float(table.epoch_seconds.mean())
        self.best = self._surface.best

    def observe(self, genes: Mapping[str, GeneValue], key: int, epoch: int) -> float | None:
        return float(self._surface.observe(genes, self._instance, key)[epoch - 1])

    def truth(self, genes: Mapping[str, GeneValue]) -> float:
        return float(self._surface.curve(genes)[-1]) / self._surface.best


class Formula:
    """Fitness by formula: each form has another shape around its optimum, other noise, and another start.

    tent      falls off linearly and at once; ridge: a curved valley leads to the optimum
    good      a plateau: the default is on its edge, and hardly anything is better
    early     genes that learn fast end lower; wide: 27 genes, of which four matter
    fragile   a third of the space diverges, close to the optimum
    hill      a parabola with the noise of `seeds.json`, of which trainings on one seed share a part
    level     `good` with that noise
    """

    FORMS: Mapping[str, Mapping[str, float]] = {
        "tent": {"noise": 0.04, "start": 0.55}, "ridge": {"noise": 0.04, "start": 0.6},
        "good": {"noise": 0.04, "start": 0.97}, "early": {"noise": 0.03, "start": 0.6},
        "wide": {"noise": 0.06, "start": 0.65}, "fragile": {"noise": 0.08, "start": 0.6},
        "hill": {"noise": SEEDS["noise"], "start": 0.6}, "level": {"noise": SEEDS["noise"], "start": 0.97}}
    epoch_seconds, best = 10.0, 1.0

    def __init__(self, form: str, instance: int) -> None:
        self.name, self._form, self._instance = form, form, instance
        self.epochs = 30
        space = _space(form == "wide")
        self.genes, self.start = space.genes, space.starts[0]
        rng = np.random.default_rng([31, instance, *form.encode()])
        count = len(self.genes)
        origin = coordinates(self.genes, self.start)
        self._weights = rng.permutation(np.r_[[1, 0.7, 0.5, 0.4], 0.04 * rng.random(count - 4)] if form == "wide"
                                        else 1 / (1 + np.arange(count)) ** 1.2)
        away = rng.choice([-1, 1], count) * rng.uniform(0.1, 0.4, count)
        self._optimum = origin + np.where((origin + away < 0.02) | (origin + away > 0.98), -away, away)
        self._fast = rng.normal(0, 1, count) * self._weights
        self._normal = rng.normal(0, 1, count) * (rng.random(count) < 0.3)
        self._scale = 1.0
        self._scale = -math.log(self.FORMS[form]["start"]) / self._distance(origin)

    def _distance(self, place: np.ndarray) -> float:
        away = place - self._optimum
        if self._form == "tent":
            return self._scale * float(np.abs(away) @ self._weights)
        if self._form == "ridge":
            half = len(away) // 2
            valley = (away[half:2 * half] - 2 * away[:half] ** 2) ** 2 + 0.25 * away[:half] ** 2
            return self._scale * float(valley @ self._weights[:half])
        if self._form in ("good", "level"):
            return self._scale * max(0.0, float((away**2) @ self._weights) - 0.05 * self._weights.sum() * 0.3)
        return self._scale * float((away**2) @ self._weights)

    def _end(self, place: np.ndarray) -> float:
        return math.exp(-self._distance(place))

    def observe(self, genes: Mapping[str, GeneValue], key: int, epoch: int) -> float | None:
        place = coordinates(self.genes, genes)
        if self._form == "fragile" and (place - self._optimum) @ self._normal > 0.35:
            return None
        end, share = self._end(place), epoch / self.epochs
        pace = 0.3 * math.exp(0.6 * math.tanh(2 * float((place - self._optimum) @ self._fast)))
        if self._form == "early":
            pace *= 0.5 + 1.2 * end
        common = np.random.default_rng([32, self._instance, key]).standard_normal()
        own = np.random.default_rng([33, self._instance, key, epoch]).standard_normal()
        noise = 0.8 * common + 0.6 * own
        if self._form in CLAIMED:
            pair = np.random.default_rng([34, self._instance, training_seed(key)]).standard_normal()
            noise = math.sqrt(SEEDS["correlation"]) * pair + math.sqrt(1 - SEEDS["correlation"]) * noise
        noise *= self.FORMS[self._form]["noise"] * (2 - share)
        return end * (1 - math.exp(-share / pace)) / (1 - math.exp(-1 / pace)) * max(0.1, 1 + noise)

    def truth(self, genes: Mapping[str, GeneValue]) -> float:
        if self.observe(genes, 0, 1) is None:
            return 0.0
        return self._end(coordinates(self.genes, genes))


@cache
def _space(wide: bool) -> Space:
    if wide:
        return load_space("evolve", Recipe()).space
    return read_space(dict(SPACE), Recipe()).space


class Foreign:
    """A landscape of a file with `KINDS` and `make(kind, instance)`."""

    def __init__(self, module: Any, kind: str, instance: int) -> None:
        self._module, self._land = module, module.make(kind, instance)
        self.name, self.genes, self.start = kind, tuple(self._land.genes), self._land.start
        self.epochs, self.epoch_seconds, self.best = self._land.E, self._land.epoch_s, self._land.best

    def observe(self, genes: Mapping[str, GeneValue], key: int, epoch: int) -> float | None:
        return float(self._land.obs(self._module.to_x(self.genes, genes), key, epoch))

    def truth(self, genes: Mapping[str, GeneValue]) -> float:
        return float(self._land.final(self._module.to_x(self.genes, genes)))


def load_landscapes(file: str, instance: int, only: str = "") -> Iterator[Landscape]:
    """Our own landscapes, or those of a file, one instance of each."""
    if file:
        module = _module(file)
        yield from (Foreign(module, kind, instance) for kind in module.KINDS if only in ("", kind))
        return
    yield from (Recorded(table, instance) for table in (*TABLES, *LATER_TABLES) if only in ("", table))
    yield from (Formula(form, instance) for form in Formula.FORMS if only == form or (not only and form not in CLAIMED))
    yield from (Trap(form, instance) for form in TRAPS if only in ("", form))
    if only in ("", Costly.name):
        yield Costly(instance)
    yield from (Noisy(form, instance) for form in NOISY if only == form)


@cache
def _module(file: str) -> Any:
    spec = importlib.util.spec_from_file_location("landscapes_of_a_file", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
