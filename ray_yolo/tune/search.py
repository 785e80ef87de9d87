"""The settings of a sweep: the trainings, and how a space is searched, what stops a trial early, what counts as good.

Settings only: nothing here imports torch or ray; the schedulers themselves are Ray's classes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.sections import ConfigModel, ObjectiveConfig, objective_field
from ray_yolo.core.errors import ConfigError

SEARCH = "search"  # key of a space file whose value is a `Search`; every other key is a gene
METRICS = ("precision", "recall", "mAP50", "mAP50-95")
RUNGS_SPAN = 9  # the first rung is a ninth of a training, or later


class TunePlacement(Placement):
    """Where each trial is trained."""

    project: str = "runs/evolve"
    """Folder of sweeps."""
    noplots: bool = True
    """Draw no plots for single trials (the sweep's own are always drawn)."""


class SweepConfig(ConfigModel):
    """What is searched, how long, and how much of it at once."""

    space: str = "evolve"
    """Genes and how to search them: a YAML file, or a shipped one (asha, evolve, pbt, quick)."""
    trials: int = Field(300, ge=1, le=100_000)
    """Trainings in all."""
    workers_per_trial: int = Field(1, ge=1, le=4096)
    """Ray workers of each trial."""
    max_concurrent: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Trials at the same time, 1 or more; auto: as many as the cluster has room for."""
    keep_weights: bool = False
    """Keep the weights and checkpoints of every trial; else those of the best one only."""
    warm_start: str = ""
    """Old evolve.csv, hyp file, or folder of hyp files, whose genes are tried first."""


class TuneConfig(ConfigModel):
    """One sweep: every trial is a training of the recipe with some of its fields replaced."""

    recipe: Recipe = Recipe()
    placement: TunePlacement = TunePlacement()
    sweep: SweepConfig = SweepConfig()


class Nothing(ConfigModel):
    """Every trial is trained to its end."""

    name: Literal["none"] = "none"


class Asha(ConfigModel):
    """Asynchronous successive halving: at each rung only the best go on (Ray's ASHAScheduler)."""

    name: Literal["asha"] = "asha"
    grace_epochs: int = Field(0, ge=0)
    """Epochs of the first rung; 0: a ninth of the training."""
    reduction: int = Field(4, ge=2)
    """One in so many goes on, to a rung so many times as long."""


class MedianStop(ConfigModel):
    """Stops a trial that is below the median of the others so far (Ray's MedianStoppingRule)."""

    name: Literal["median"] = "median"
    grace_epochs: int = Field(0, ge=0)
    """Epochs before a trial may be stopped; 0: a ninth of the training."""
    min_trials: int = Field(3, ge=1)
    """Trials that must have come as far before one is stopped."""


class Pbt(ConfigModel):
    """Population based training: the worst go on from a good one's checkpoint with changed genes (Ray's)."""

    name: Literal["pbt"] = "pbt"
    interval_epochs: int = Field(5, ge=1)
    """Epochs between exchanges; each exchange restarts a trial's workers."""
    quantile: float = Field(0.25, gt=0.0, le=0.5)
    """Share of the trials that is replaced, and share that is copied from."""
    resample: float = Field(0.25, ge=0.0, le=1.0)
    """Probability that a gene is drawn anew instead of being moved."""


SCHEDULERS: dict[str, type[ConfigModel]] = {"none": Nothing, "asha": Asha, "median": MedianStop, "pbt": Pbt}


def _by_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class Search(ConfigModel):
    """How a space is searched."""

    algorithm: Literal["evolve", "random", "grid", "tpe"] = "evolve"
    """evolve: children of the best rows; random; grid: every combination; tpe: Optuna's estimator."""
    parent: Literal["single", "mean"] = "single"
    """Parent of a child under evolve: one of the five best rows, or their mean, both weighted by fitness."""
    random_first: int = Field(0, ge=0)
    """Proposals under evolve that are drawn at random before the first child."""
    random_share: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the later proposals under evolve that are drawn at random instead of being children."""
    scheduler: Annotated[Nothing | Asha | MedianStop | Pbt, Field(discriminator="name"),
                         BeforeValidator(_by_name)] = Nothing()
    """What stops trials early: a name, or a name with its settings."""
    objective: dict[str, float] = Field(default={"mAP50": 0.1, "mAP50-95": 0.9})
    """Weights of precision, recall, mAP50 and mAP50-95 in the fitness."""

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, value: dict[str, float]) -> dict[str, float]:
        if unknown := [name for name in value if name not in METRICS]:
            raise ValueError(f"unknown metric {unknown[0]!r}; the metrics are {', '.join(METRICS)}")
        if min(value.values(), default=0) < 0 or not any(value.values()):
            raise ValueError("weights must be 0 or more, and not all 0")
        return value

    def check(self, recipe: Recipe) -> None:
        """Refuse to maximise something else than the trials do, to wait in vain for a fitness at every epoch, and to
        change what is changed.

        Raises:
            ConfigError: if such a search over this recipe was asked for.
        """
        if recipe.objective not in (Recipe().objective, self.recipe_objective):
            raise ConfigError("objective: what a sweep and its trials maximise is the search.objective of its space; "
                              "write it there, and leave objective out")
        if recipe.noval and self.scheduler.name != "none":
            raise ConfigError(f"noval: the scheduler {self.scheduler.name} judges trials by the validation of every "
                              "epoch; leave --noval out, or use scheduler: none")
        if recipe.changes and self.scheduler.name == "pbt":
            raise ConfigError("changes: population based training makes changes of its own; leave --changes out, or "
                              "use another scheduler")

    def fitness(self, metrics: Mapping[str, float | None] | None) -> float | None:
        """The weighted sum of an epoch's metrics; None where one that counts is missing or not finite."""
        return self.recipe_objective.fitness(metrics)

    @property
    def recipe_objective(self) -> ObjectiveConfig:
        """The objective as trials train by it, so that their best weights and their patience are the sweep's."""
        weights = dict.fromkeys(ObjectiveConfig.model_fields, 0.0)
        return ObjectiveConfig(**weights | {objective_field(name): weight for name, weight in self.objective.items()})

    def rungs(self, epochs: int) -> Sequence[int]:
        """The epochs, ascending and before the last, after which a training of so many may be stopped."""
        first = self.first_rung(epochs)
        if isinstance(self.scheduler, MedianStop):
            return range(1, epochs)  # its means go back to the first
        if isinstance(self.scheduler, Asha):
            reduction = self.scheduler.reduction
            return tuple(takewhile(lambda rung: rung < epochs, (first * reduction**power for power in count())))
        return ()

    def rung(self, trained: int, epochs: int, *, stopped: bool) -> int:
        """How many rungs a row had reached when its fitness was measured; one more where it came to its own end.

        Fitness compares among rows of one rung: a short training's says little, and rates that have not fallen yet
        or a lucky start may make it the higher one.
        """
        rungs = self.rungs(epochs)
        if not rungs:
            return 0
        return bisect_right(rungs, trained) if stopped and trained < epochs else len(rungs) + 1

    def first_rung(self, epochs: int) -> int:
        """Epochs before which no trial is stopped: as set, else a ninth of the training, rounded up."""
        return getattr(self.scheduler, "grace_epochs", 0) or math.ceil(epochs / RUNGS_SPAN)

    def rung_warning(self, epochs: int) -> str | None:
        """Why the first rung says little about trainings of so many epochs, if it comes that early."""
        rung = self.first_rung(epochs)
        if self.scheduler.name not in ("asha", "median") or rung * RUNGS_SPAN >= epochs:
            return None
        return (f"{self.scheduler.name}: the first rung, {rung} of {epochs} epochs, is much shorter than the schedule: "
                "warm-up may not be over and the learning rate has hardly begun to fall, so that it prefers fast "
                f"starters to good finishers; grace_epochs {math.ceil(epochs / RUNGS_SPAN)} or more is safer")

    def random_warning(self, trials: int, starts: int) -> str | None:
        """That evolution has no child among so many trials, if all that are no starts are drawn at random."""
        if self.algorithm != "evolve" or not 0 < trials - starts <= self.random_first:
            return None
        return (f"evolve: all of these {trials} trials are starts or drawn at random, none is a child of a better one; "
                f"give more --trials, or a random_first below {self.random_first}")
