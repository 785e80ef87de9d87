"""The identity of a study: digests of everything that its results depend on and that its settings only name.

    data set, validation set    the labels of both splits (`AnnotationIndex.digest`)
    base recipe                 the recipe as requested
    model NAME, weights NAME    the contents of a model YAML or of a weights file, of the base recipe or of a gene
    ray_yolo, torch             the versions that train; sweeps up to 0.2.0 have not noted them
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import ray_yolo
from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.tune.evolution import Space

DATA, BASE = "data set", "base recipe"
_VALIDATION = "validation set"
_RAY_YOLO, _TORCH = "ray_yolo", "torch"


def versions() -> dict[str, str]:
    """The versions that train, as parts of an identity: the weights of others may differ."""
    return {_RAY_YOLO: ray_yolo.__version__, _TORCH: version("torch")}


def identity_of(recipe: Recipe, space: Space, train: AnnotationIndex, val: AnnotationIndex) -> dict[str, str]:
    """The identity of a sweep of a space over `recipe`, without `versions`.

    Raises:
        CheckpointError: if a weights file cannot be downloaded.
    """
    identity = {DATA: train.digest, _VALIDATION: val.digest, BASE: recipe_digest(recipe)}
    models, weights = {recipe.model}, {recipe.weights}
    for gene in space.genes:
        if gene.name == "model":
            models.update(str(value) for value in gene.values)
        if gene.name == "weights":
            weights.update(str(value) for value in gene.values)
    for name in sorted(models):
        if Path(name).is_file():  # other names are those of built-in models
            identity[f"model {name}"] = _file_digest(Path(name))
    from ray_yolo.checkpoints.weights_file import local_file  # here: it needs torch, and readers of a ledger do not

    for name in sorted(weights - {""}):
        identity[f"weights {name}"] = _file_digest(local_file(name))
    return identity


def changed_parts(recorded: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """What differs between a recorded identity and that of a command. A ledger of an earlier release has fewer parts,
    so only recorded ones are compared.
    """
    return [part for part, digest in recorded.items() if current.get(part) != digest]


def has_same_inputs(other: Mapping[str, str], own: Mapping[str, str]) -> bool:
    """Whether equal trainings of two sweeps give equal results: both sets and all versions are equal, and each file
    that both name. Without versions, a sweep has those of other sweeps without them."""
    if any(other.get(part) != own.get(part) for part in (DATA, _VALIDATION, _RAY_YOLO, _TORCH)):
        return False
    files = other.keys() & own.keys() - {DATA, _VALIDATION, BASE}
    return all(other[file] == own[file] for file in files)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
