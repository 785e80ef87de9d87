"""The device of a process, and its name."""

from __future__ import annotations

from typing import Literal

import torch

from ray_yolo.core.errors import ResourcesError
from ray_yolo.core.system import processor_name


def local_device(gpus_per_worker: float | Literal["auto"]) -> torch.device:
    """The device of this process: a GPU if there is one, unless `gpus_per_worker` is 0.

    Raises:
        ResourcesError: if a number of GPUs was requested, and there is none.
    """
    if gpus_per_worker not in ("auto", 0) and not torch.cuda.is_available():
        raise ResourcesError(f"gpus_per_worker: {gpus_per_worker:g} was requested, but this machine has no GPU that "
                             "torch can use; use --gpus-per-worker 0 (or auto), or a machine with one")
    return torch.device("cuda" if gpus_per_worker and torch.cuda.is_available() else "cpu")


def gpus_held(device: torch.device, gpus_per_worker: float | Literal["auto"]) -> float:
    """The number of GPUs that a worker on this device holds: it may hold more than it uses, or a part of one."""
    if device.type != "cuda":
        return 0.0
    return 1.0 if gpus_per_worker == "auto" else float(gpus_per_worker)


def device_name(device: torch.device) -> str:
    """The name of a GPU, or of this machine's processor. Kernels, and so the last bits of a result, depend on it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
