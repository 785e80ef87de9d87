"""The latency of the networks of a search space, and the Pareto front of accuracy against latency.

The latency depends on model and image size. It is measured once, before a sweep, and recorded in its ledger, so the
sweep remains a function of the ledger.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ray_yolo.config.commands import DetectConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import canonical
from ray_yolo.core.errors import ConfigError
from ray_yolo.engine.build import local_device
from ray_yolo.inference.predictor import Trained, build_predictor
from ray_yolo.models.families import build_model, find_family, read_model
from ray_yolo.tune.evolution import Space
from ray_yolo.tune.trials import Trial, network_name, overlay

MOST_NETWORKS = 100
_WARM_UP, _IMAGES = 5, 25


class SizedModel(NamedTuple):
    """The properties that determine the latency."""

    model: str | Mapping[str, Any]  # a name, or the mapping of a model YAML
    imgsz: int


class Latency(NamedTuple):
    """The best trial of a network on the Pareto front."""

    milliseconds: float  # per image
    fitness: float
    trial: int
    network: str


def networks(space: Space, recipe: Recipe) -> dict[str, SizedModel]:
    """The networks of a space, by name.

    Raises:
        ConfigError: if there are too many to measure.
    """
    genes = [gene for gene in space.genes if canonical(gene.name) in ("model", "imgsz")]
    values = [gene.values or range(int(gene.low), int(gene.high) + 1) for gene in genes]
    combinations = itertools.product(*values)
    recipes = [overlay(recipe, dict(zip((gene.name for gene in genes), each, strict=True)))
               for each in itertools.islice(combinations, MOST_NETWORKS + 1)]
    if len(recipes) > MOST_NETWORKS:
        raise ConfigError(f"search.limit: the space has more than {MOST_NETWORKS} networks (model x imgsz), too many "
                          "to measure; use choices of fewer values")
    models = {each.model: read_model(each.model) for each in recipes}
    return {network_name(each): SizedModel(models[each.model][1] or models[each.model][0], each.imgsz)
            for each in recipes}


def measure(task: tuple[int, float], networks: Mapping[str, SizedModel]) -> dict[str, float]:
    """Milliseconds per image of each network in this process, in fp32, including suppression: the median of several
    images, one at a time.

    Args:
        task: the number of classes, and the GPUs of this process.
    """
    num_classes, gpus = task
    found, names, device = {}, tuple(map(str, range(num_classes))), local_device(gpus)
    for name, (model, imgsz) in networks.items():
        trained = Trained(build_model(model, num_classes).eval(), find_family(model), names, Recipe(imgsz=imgsz))
        predictor = build_predictor(trained, DetectConfig(), device)
        image = np.full((imgsz, imgsz, 3), 114, np.uint8)
        speeds = [predictor.detect([image])[0].speed for _ in range(_WARM_UP + _IMAGES)][_WARM_UP:]
        found[name] = statistics.median(speed["inference"] + speed["postprocess"] for speed in speeds)
    return found


def pareto(trials: Iterable[Trial], recipe: Recipe, latencies: Mapping[str, float], epochs: int) -> list[Latency]:
    """The trials of `epochs` epochs that no trial with an equally fast network equals, fastest first."""
    rows = [Latency(latencies[name], trial.fitness, trial.number, name) for trial in trials
            if trial.fitness is not None and trial.epochs == epochs
            and (name := network_name(overlay(recipe, trial.genes))) in latencies]
    front: list[Latency] = []
    for row in sorted(rows, key=lambda row: (row.milliseconds, -row.fitness, row.trial)):
        if not front or row.fitness > front[-1].fitness:
            front.append(row)
    return front


def format_pareto(front: Iterable[Latency]) -> str:
    """The text of pareto.csv."""
    rows = (f"{row.milliseconds:.4g},{row.fitness:.5g},{row.trial},{row.network}\n" for row in front)
    return "".join(("latency_ms,fitness,trial,network\n", *rows))
