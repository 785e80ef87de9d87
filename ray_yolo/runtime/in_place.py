"""What Ray Train needs so that it replaces a lost worker alone, and leaves the others to themselves."""

from __future__ import annotations

from typing import Any

from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

from ray_yolo.config.placement import Placement


class _Backend(_TorchBackend):
    """Workers that form their process groups themselves, so that Ray may replace one and leave the others alone."""

    has_replica_groups = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None: ...
    def on_training_start(self, worker_group: Any, backend_config: Any) -> None: ...
    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None: ...


class InPlaceConfig(TorchConfig):
    """What such workers are asked for with."""

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        """Asked for by Ray."""
        return _Backend


def replaces_in_place(placement: Placement, gpus: float) -> bool:
    """Whether Ray Train replaces a lost worker while the others go on: a fixed number of them, where it can at all."""
    return isinstance(placement.num_workers, int) and placement.num_workers > 1 and can_replace(gpus)


def can_replace(gpus: float) -> bool:
    """Whether Ray can put one worker in the place of a lost one, and collectives that lack one end by themselves."""
    return not gpus and hasattr(_TorchBackend, "has_replica_groups")
