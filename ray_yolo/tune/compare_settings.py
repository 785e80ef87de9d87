"""The settings of a comparison. This module imports neither torch, Ray nor NumPy: help must not wait for these."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.sections import ConfigModel

FEWEST_PAIRS = 4  # the first claim needs this many: three that one side wins are no rare event
MOST_PAIRS = 1000

Words = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]


class ComparePlacement(Placement):
    """Where each training of a comparison runs."""

    project: str = "runs/compare"
    """Folder of comparisons."""
    noplots: bool = True
    """Draw no plots for single trainings (the comparison's own are always drawn)."""


class PairsConfig(ConfigModel):
    """The two sides, and when their comparison ends."""

    a: str
    """Side A, one word: base (the settings of the flags alone), a YAML file of settings, a named recipe, the folder of
    a run (its recipe), a data set (YAML or folder), initial weights (.pt, .safetensors), or PATH=VALUE."""
    b: str
    """Side B, the same."""
    set_a: Words = ()
    """More settings of side A alone, over all others: PATH=VALUE, several times."""
    set_b: Words = ()
    """More settings of side B alone."""
    pairs: int = Field(10, ge=FEWEST_PAIRS, le=MOST_PAIRS)
    """Most pairs. A pair trains A and B on one fresh seed; seeds follow from --seed."""
    hours: float = Field(0.0, ge=0.0)
    """Hours after which no new pair starts, over all starts of this comparison; 0: no limit."""
    workers_per_training: int = Field(1, ge=0, le=4096)
    """Ray workers of each training; as many trainings run at once as fit on the cluster. 0: no Ray, one training after
    the other on this machine."""


class CompareConfig(ConfigModel):
    """One comparison: both sides are the recipe with settings of their own."""

    comparison: PairsConfig
    recipe: Recipe = Recipe()
    placement: ComparePlacement = ComparePlacement()
