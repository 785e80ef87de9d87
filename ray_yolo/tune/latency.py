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
from ray_yolo.engine.devices import local_device
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

    milliseconds: float  # one image takes them
    fitness: float
    trial: int
    network: str


def networks(space: Space, recipe: Recipe) -> dict[str, SizedModel]:
    """The networks of a space, by name.

    Raises:
        ConfigError: if there are too many to measure.
    """
    genes = [gene for gene in space.genes if canonical(gene.name) in ("model", "imgsz")]
    names = [gene.name for gene in genes]
    values = [gene.values or range(int(gene.low), int(gene.high) + 1) for gene in genes]
    recipes = []
    for combination in itertools.islice(itertools.product(*values), MOST_NETWORKS + 1):  # there may be millions
        recipes.append(overlay(recipe, dict(zip(names, combination, strict=True))))
    if len(recipes) > MOST_NETWORKS:
        raise ConfigError(f"search.limit: the space has more than {MOST_NETWORKS} networks (model x imgsz), too many "
                          "to measure; use choices of fewer values")
    models = {each.model: read_model(each.model) for each in recipes}  # each file is read once
    found = {}
    for each in recipes:
        name, mapping = models[each.model]
        found[network_name(each)] = SizedModel(mapping or name, each.imgsz)
    return found


def measure(task: tuple[int, float], networks: Mapping[str, SizedModel]) -> dict[str, float]:
    """Milliseconds per image of each network in this process, in fp32, including suppression: the median of several
    images, one at a time.

    Args:
        task: the number of classes, and the GPUs of this process.
    """
    num_classes, gpus = task
    device = local_device(gpus)
    class_names = tuple(map(str, range(num_classes)))
    found = {}
    for name, (model, imgsz) in networks.items():
        network = build_model(model, num_classes).eval()
        trained = Trained(network, find_family(model), class_names, Recipe(imgsz=imgsz))
        predictor = build_predictor(trained, DetectConfig(), device)
        image = np.full((imgsz, imgsz, 3), 114, np.uint8)
        times = []
        for number in range(_WARM_UP + _IMAGES):
            speed = predictor.detect([image])[0].speed
            if number >= _WARM_UP:
                times.append(speed["inference"] + speed["postprocess"])
        found[name] = statistics.median(times)
    return found


def pareto(trials: Iterable[Trial], recipe: Recipe, latencies: Mapping[str, float], epochs: int) -> list[Latency]:
    """The trials of `epochs` epochs that no trial with an equally fast network equals, fastest first."""
    rows = []
    for trial in trials:
        if trial.fitness is None or trial.epochs != epochs:
            continue
        name = network_name(overlay(recipe, trial.genes))
        if name in latencies:
            rows.append(Latency(latencies[name], trial.fitness, trial.number, name))
    front: list[Latency] = []
    for row in sorted(rows, key=lambda row: (row.milliseconds, -row.fitness, row.trial)):
        if not front or row.fitness > front[-1].fitness:
            front.append(row)
    return front


def format_pareto(front: Iterable[Latency]) -> str:
    """The text of pareto.csv."""
    rows = (f"{row.milliseconds:.4g},{row.fitness:.5g},{row.trial},{row.network}\n" for row in front)
    return "".join(("latency_ms,fitness,trial,network\n", *rows))
