"""Distributed training of YOLO detectors on Ray.

The Python interface is `from ray_yolo import YOLO`; the commands are `python -m ray_yolo.train`, `val` and so on.
Importing the package imports neither torch nor ray.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_yolo.api import YOLO

__all__ = ["YOLO", "__version__"]


def __dir__() -> list[str]:
    return sorted(__all__)  # what completion shows: modules and commands are not for users of Python


def __getattr__(name: str) -> Any:
    if name == "YOLO":
        from ray_yolo.api import YOLO

        return YOLO
    if name == "__version__":
        try:
            return importlib.metadata.version(__name__)
        except importlib.metadata.PackageNotFoundError:  # it runs from its source tree, as in a Ray job
            return "0+source"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
