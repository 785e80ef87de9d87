"""The settings of a sweep: its trainings, search algorithm, scheduler and objective.

This module imports neither torch nor ray; Ray's classes implement the schedulers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.sections import ConfigModel, ObjectiveConfig, objective_field
from ray_yolo.core.errors import ConfigError
from ray_yolo.core.events import METRICS

SEARCH = "search"  # key of a space file whose value is a `Search`; every other key is a gene
DEFAULT_TRIALS, MOST_TRIALS = 300, 100_000

OF_ONE_TRAINING = {
    "resume": "a {study} continues by its own command, and never a training; leave it out",
    "stop_after": "a {study} decides how far its trainings go; leave it out",
    "max_hours": "the time of a {study} is {study}.hours (--hours); leave it out",
}
"""Settings of a training alone, each with the reason why a sweep or a comparison refuses it."""


def check_placement(placement: Placement, study: str, setting: str, workers: int) -> None:
    """Refuse settings of a training alone, and another number of workers than that of the study's trainings.

    Args:
        placement: as given.
        study: what it is, and the section of its settings: sweep or comparison.
        setting: which says how many workers each training has.
        workers: its value.

    Raises:
        ConfigError: naming the setting.
    """
    if placement.num_workers not in ("auto", workers):  # the settings that a study has written have its number
        raise ConfigError(f"num_workers: each training of a {study} has as many workers as {setting} says, {workers}; "
                          "leave num_workers out")
    for name, reason in OF_ONE_TRAINING.items():
        if getattr(placement, name):
            raise ConfigError(f"{name}: {reason.format(study=study)}")


class TunePlacement(Placement):
    """Where each trial is trained."""

    project: str = "runs/evolve"
    """Folder of sweeps."""
    noplots: bool = True
    """Draw no plots for single trials (the sweep's own are always drawn)."""


class SweepConfig(ConfigModel):
    """The space, the budget, and the number of parallel trials."""

    space: str = "ladder"
    """Genes and how to search them: a YAML file, or a shipped one (evolve, ladder, quick)."""
    trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] | Literal["auto"] = "auto"
    """Total number of trials, 1 or more; auto: as many as fit into --hours, or 300 without it."""
    hours: float = Field(0.0, ge=0.0)
    """Hours until the sweep ends, its confirmation included, over all its starts; 0: no limit."""
    workers_per_trial: int = Field(1, ge=1, le=4096)
    """Ray workers of each trial."""
    max_concurrent: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Trials at the same time, 1 or more; auto: as many as fit into the cluster."""
    min_slots: int = Field(1, ge=1)
    """Trials at the same time whose workers stay if other jobs of the cluster wait; fewer if fewer fit at the start."""
    virtual_slots: int = Field(0, ge=0, le=4096)
    """Trials at the same virtual time, which determine the results that a proposal can use. Equal numbers make equal
    sweeps on any cluster; 0: chosen by the first start for its cluster."""
    keep_weights: bool = False
    """Keep the weights and checkpoints of every trial, not only those of the best one and of paused ones."""
    drop_paused_weights: bool = False
    """Remove the weights and checkpoints of paused trials, too, once the sweep has its claim; if it is extended later,
    those that go on train again from their first epoch."""
    warm_start: str = ""
    """Old evolve.csv, hyp file, or folder of hyp files: their genes are tried first."""

    @model_validator(mode="after")
    def _fits_together(self) -> SweepConfig:
        if self.max_concurrent != "auto" and self.min_slots > self.max_concurrent:
            raise ValueError(f"min_slots {self.min_slots} is more than max_concurrent {self.max_concurrent}; lower it, "
                             "or leave max_concurrent out")
        if self.keep_weights and self.drop_paused_weights:
            raise ValueError("keep_weights keeps those that drop_paused_weights removes; leave one of them out")
        return self

    @property
    def most_trials(self) -> int:
        """The number of trials at which exploration ends."""
        if self.trials != "auto":
            return self.trials
        return MOST_TRIALS if self.hours else DEFAULT_TRIALS


class TuneConfig(ConfigModel):
    """One sweep: every trial is a training of the recipe with some of its fields replaced."""

    recipe: Recipe = Recipe()
    placement: TunePlacement = TunePlacement()
    sweep: SweepConfig = SweepConfig()


class NoStopping(ConfigModel):
    """Trains every trial to its end."""

    name: Literal["none"] = "none"


class Ladder(ConfigModel):
    """Pauses every trial at each rung. One in four continues, and fresh seeds decide at the end."""

    name: Literal["ladder"] = "ladder"
    first_epochs: int = Field(0, ge=0)
    """Epochs of the only rung; 0: rungs at a ninth and at four ninths of the training."""


class Limit(ConfigModel):
    """Limits of a trial's network; a network that exceeds one is not trained."""

    latency_ms: float = Field(gt=0.0)
    """Milliseconds for one image on one worker, in fp32, suppression included."""


SCHEDULERS: dict[str, type[ConfigModel]] = {"none": NoStopping, "ladder": Ladder}


def _scheduler_settings(value: object) -> object:
    """A scheduler's settings, of which the name alone may be given; schedulers that are gone are refused."""
    name = value["name"] if isinstance(value, dict) and "name" in value else value
    if name in ("asha", "median"):
        raise ValueError("trials pause now and are not stopped; write scheduler: ladder")
    if name == "pbt":
        raise ValueError("ray_yolo has had population based training up to 0.2.0; write scheduler: ladder, and search "
                         "what changes during a training as lrf and warmup_epochs")
    return {"name": value} if isinstance(value, str) else value


_DEFAULT_SEARCH = {"algorithm": "gp", "parent": "mean", "scheduler": "ladder"}
"""Of a space that names no algorithm. With an algorithm each trial trains to its end, unless there is a scheduler."""


class Search(ConfigModel):
    """Algorithm, scheduler and objective of a search; without an algorithm it is the default search."""

    algorithm: Literal["gp", "evolve", "random", "grid"] = "gp"
    """gp: a Gaussian process, evolve and random by turns; evolve: children of the best rows; random; grid: each
    combination."""
    parent: Literal["single", "mean"] = "single"
    """Parent of a child: one of the five best rows, or their mean, both weighted by fitness."""
    random_first: int = Field(0, ge=0)
    """Proposals under evolve that are drawn at random before the first child."""
    random_share: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the later proposals under evolve that are drawn at random."""
    scheduler: Annotated[NoStopping | Ladder, Field(discriminator="name"),
                         BeforeValidator(_scheduler_settings)] = NoStopping()
    """Rule that pauses trials: a name, or a name with its settings."""
    objective: dict[str, float] = Field(default={"mAP50": 0.1, "mAP50-95": 0.9})
    """Weights of precision, recall, mAP50 and mAP50-95 in the fitness."""
    limit: Limit | None = None
    """Limit on the networks that are trained."""

    @model_validator(mode="before")
    @classmethod
    def _default(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "algorithm" in data:
            return data
        return {**_DEFAULT_SEARCH, **data}

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, value: dict[str, float]) -> dict[str, float]:
        if unknown := [name for name in value if name not in METRICS]:
            raise ValueError(f"unknown metric {unknown[0]!r}; the metrics are {', '.join(METRICS)}")
        if min(value.values(), default=0) < 0 or not any(value.values()):
            raise ValueError("weights must be 0 or more, and not all 0")
        return value

    def check(self, recipe: Recipe) -> None:
        """Check that the base recipe fits the search.

        Raises:
            ConfigError: if the recipe has another objective or validates too seldom for the scheduler.
        """
        if recipe.objective not in (Recipe().objective, self.recipe_objective):  # the default one was not given
            raise ConfigError("objective: a sweep and its trials maximise the search.objective of the space; write it "
                              "there, and leave objective out")
        if recipe.noval and self.scheduler.name != "none":
            raise ConfigError(f"noval: the scheduler {self.scheduler.name} judges trials by the validation of every "
                              "epoch; leave --noval out, or use scheduler: none")

    @property
    def recipe_objective(self) -> ObjectiveConfig:
        """The same objective as a section of the recipe, for the best weights and the patience of trials."""
        weights = dict.fromkeys(ObjectiveConfig.model_fields, 0.0)
        return ObjectiveConfig(**weights | {objective_field(name): weight for name, weight in self.objective.items()})
