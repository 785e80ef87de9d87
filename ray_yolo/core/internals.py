"""Private names of other packages, looked up on use: a release without one breaks only the code that needs it.

One module per package uses this: ops/torch_internals, runtime/ray_internals and sinks/mlflow_client. Those of
process groups are in engine/collectives.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

from ray_yolo.core.errors import InputError

NEEDED = {"torch": "PyTorch 2.11 to 2.15", "ray": "Ray 2.60", "mlflow": "MLflow 3.17"}
"""Releases that the contract tests cover. pyproject.toml also allows later ones."""


def internal(module: str, name: str) -> Any:
    """The attribute `name` of a module.

    Raises:
        InputError: if the installed release does not have it.
    """
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        package = module.partition(".")[0]
        raise InputError(f"{package} {version(package)} has no {module}.{name}; this needs {NEEDED[package]}: install "
                         "the versions of constraints.txt") from error
