"""Search spaces: from what a user wrote to genes with limits, every one a field of the recipe.

    search: {algorithm: evolve, scheduler: asha}      how to search; everything else names a gene:
    lr0: {low: 1e-5, high: 0.1, gain: 1}              a range; gain is how far evolution moves it
    loss.box: {type: loguniform, low: 0.02, high: 0.2}
    momentum: [0.6, 0.98]                             short for a range; [0.001, 0.1, log] for loguniform
    optimizer.name: {type: choice, values: [SGD, AdamW]}
    mosaic: {type: fixed, value: 1.0}

A space is checked against the recipe that it will be laid over, so that no trial can fail for its values. Nothing
here runs a trial.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from ray_yolo.config import Frozen, Placement, Recipe
from ray_yolo.config_fields import canonical, config_fields, did_you_mean, explain_unknown
from ray_yolo.errors import ConfigError
from ray_yolo.genes import GENES, LEGACY_GENES
from ray_yolo.ops.evolution import Gene, Genes, GeneValue, Space, can_move
from ray_yolo.yaml_files import load_yaml

SEARCH = "search"  # the one key of a space that is not a gene
METRICS = ("precision", "recall", "mAP50", "mAP50-95")
SHORT_NAMES = {path: gene for gene, path in GENES.items()}

_RECIPE = config_fields(Recipe)
_PLACEMENT = config_fields(Placement)

Where = Callable[..., str]  # keys of a value -> 'file:line', for error messages


class Asha(Frozen):
    """Asynchronous successive halving: at each rung only the best go on (Ray's ASHAScheduler)."""

    name: Literal["asha"] = "asha"
    grace_epochs: int = Field(0, ge=0)
    """Epochs of the first rung; 0: a ninth of the training."""
    reduction: int = Field(3, ge=2)
    """One in so many goes on, to a rung so many times as long."""


class MedianStop(Frozen):
    """Stops a trial that is below the median of the others' averages (Ray's MedianStoppingRule)."""

    name: Literal["median"] = "median"
    grace_epochs: int = Field(0, ge=0)
    """Epochs before a trial may be stopped; 0: a ninth of the training."""
    min_trials: int = Field(3, ge=1)
    """Trials that must have come as far before one is stopped."""


class Pbt(Frozen):
    """Population based training: the worst go on from the best one's checkpoint with changed genes."""

    name: Literal["pbt"] = "pbt"
    interval_epochs: int = Field(5, ge=1)
    """Epochs between exchanges; each one restarts a trial's workers."""
    quantile: float = Field(0.25, gt=0.0, le=0.5)
    """Share of the trials that is replaced, and share that is copied from."""
    resample: float = Field(0.25, ge=0.0, le=1.0)
    """Probability that a gene is drawn anew instead of being moved."""


class Nothing(Frozen):
    """Every trial is trained to its end."""

    name: Literal["none"] = "none"


def _by_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class Search(Frozen):
    """How a space is searched."""

    algorithm: Literal["evolve", "random", "grid", "tpe"] = "evolve"
    """evolve: children of the best rows; random; grid: every combination; tpe: Optuna's estimator."""
    parent: Literal["single", "mean"] = "single"
    """A child's parent: one of the five best, or their mean, both weighted by fitness (evolve)."""
    scheduler: Annotated[Nothing | Asha | MedianStop | Pbt, Field(discriminator="name"),
                         BeforeValidator(_by_name)] = Nothing()
    """What stops trials early, by name or with its settings."""
    objective: dict[str, float] = Field({"mAP50": 0.1, "mAP50-95": 0.9}, validate_default=True)
    """Fitness: weights of precision, recall, mAP50, mAP50-95."""

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, value: dict[str, float]) -> dict[str, float]:
        if unknown := [name for name in value if name not in METRICS]:
            raise ValueError(f"unknown metric {unknown[0]!r}; the metrics are {', '.join(METRICS)}")
        if min(value.values(), default=0) < 0 or not sum(value.values()) > 0:
            raise ValueError("weights must be 0 or more, and not all 0")
        return value

    def fitness(self, metrics: Mapping[str, float | None] | None) -> float | None:
        """The weighted sum of a row's metrics; None where one that counts was not measured or is not finite."""
        values = [(weight, (metrics or {}).get(name)) for name, weight in self.objective.items() if weight]
        terms = [weight * value for weight, value in values if value is not None and math.isfinite(value)]
        return sum(terms) if len(terms) == len(values) else None


class TuneSpace(NamedTuple):
    """What is searched and how; `warnings` are for the user and stop nothing."""

    space: Space
    search: Search
    warnings: tuple[str, ...]
