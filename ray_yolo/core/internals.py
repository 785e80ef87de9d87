"""Private names of other packages, looked up when they are used: a release without one stops only what needs it.

One file for each package uses this: ops/torch_internals, runtime/ray_internals and runlog/mlflow_client.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

from ray_yolo.core.errors import InputError

NEEDED = {"torch": "PyTorch 2.11 to 2.15", "ray": "Ray 2.60", "mlflow": "MLflow 3.17"}
"""Releases whose private names the contract tests have seen. pyproject.toml allows later ones, too."""


def internal(module: str, name: str) -> Any:
    """The object `name` of a module.

    Raises:
        InputError: if this release of the package does not have it.
    """
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        package = module.partition(".")[0]
        raise InputError(f"{package} {version(package)} has no {module}.{name}; this needs {NEEDED[package]}: install "
                         "the versions of constraints.txt") from error
