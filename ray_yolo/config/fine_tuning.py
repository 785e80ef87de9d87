"""The optimiser of a short training that starts from weights.

YOLOv5's defaults (SGD, learning rate 0.01, bias warm-up from 0.1) are made for hundreds of epochs from scratch. Weights
that are trained already need smaller steps, and a few hundred optimiser steps need a faster optimiser. Measured:
docs/results.md, "Fine-tuning".
"""

from __future__ import annotations

import math
from operator import attrgetter

from ray_yolo.config.recipe import AUTO_BATCH, Recipe

MOST_STEPS = 10_000  # optimiser steps; a longer training has the defaults
OPTIMIZER_SETTINGS = ("optimizer.name", "optimizer.lr0", "optimizer.momentum", "schedule.warmup_bias_lr")
"""The settings, by config path, that depend on one another: a user who gives one of them decides about all."""


def fine_tuned(recipe: Recipe, num_images: int, num_classes: int) -> Recipe:
    """The recipe with the optimiser that a short training from weights has; unchanged in all other cases.

    | setting | value |
    |---|---|
    | optimizer.name | AdamW |
    | optimizer.lr0 | 0.002 x 5 / (4 + classes), to six decimals |
    | optimizer.momentum (beta1) | 0.9 |
    | schedule.warmup_bias_lr | 0 |

    This is Ultralytics' rule for trainings of at most 10,000 steps. It holds if `weights` is given, and none of these
    settings. Steps are counted as ceil(images / max(batch_size, nominal_batch)) x epochs.

    Args:
        num_images: that are trained, of the training set.
    """
    if not recipe.weights or _are_given(recipe) or _num_steps(recipe, num_images) > MOST_STEPS:
        return recipe
    optimizer = {"name": "AdamW", "lr0": round(0.002 * 5 / (4 + num_classes), 6), "momentum": 0.9}
    schedule = {"warmup_bias_lr": 0.0}
    return recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update=optimizer),
                                     "schedule": recipe.schedule.model_copy(update=schedule)})


def _are_given(recipe: Recipe) -> bool:
    """Whether any of the settings comes from a user, a file or another recipe; a default does not count."""
    for path in OPTIMIZER_SETTINGS:
        section, name = path.split(".")
        if name in attrgetter(section)(recipe).model_fields_set:
            return True
    return False


def _num_steps(recipe: Recipe, num_images: int) -> int:
    batch = recipe.optimizer.nominal_batch
    if recipe.batch_size not in (None, AUTO_BATCH):
        batch = max(batch, recipe.batch_size)
    return math.ceil(num_images / batch) * recipe.epochs
