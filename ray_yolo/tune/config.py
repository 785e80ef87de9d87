"""The configuration of `ray_yolo.tune`: a base recipe, a placement for each trial, and the sweep over it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.sections import Frozen


class TunePlacement(Placement):
    """Where each trial is trained."""

    project: str = "runs/evolve"
    """Folder of sweeps."""
    noplots: bool = True
    """Draw no plots for single trials (the sweep's own are always drawn)."""


class Sweep(Frozen):
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


class TuneConfig(Frozen):
    """One sweep: every trial is a training of the recipe with some of its fields replaced."""

    recipe: Recipe = Recipe()
    placement: TunePlacement = TunePlacement()
    sweep: Sweep = Sweep()
