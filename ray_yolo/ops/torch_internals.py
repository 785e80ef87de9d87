"""Private names of PyTorch: operations on lists of tensors, which need few kernels instead of one per tensor; the
tensors of a gradient scaler; the processes of a loader; and the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import wait

from torch import Tensor
from torch.amp import GradScaler

from ray_yolo.core.internals import internal


def add_(left: Sequence[Tensor], right: Sequence[Tensor] | float) -> None:
    """left[i] += right[i], or the number."""
    internal("torch", "_foreach_add_")(left, right)


def mul_(left: Sequence[Tensor], factor: float) -> None:
    """left[i] *= factor."""
    internal("torch", "_foreach_mul_")(left, factor)


def copy_(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """left[i] = right[i], in place."""
    internal("torch", "_foreach_copy_")(left, right)


def lerp_(left: Sequence[Tensor], right: Sequence[Tensor], weight: float | Sequence[Tensor]) -> None:
    """left[i] += weight (right[i] - left[i]); weight[i] of a sequence."""
    internal("torch", "_foreach_lerp_")(left, right, weight)


def scaler_tensors(scaler: GradScaler) -> list[Tensor]:
    """The scale of a scaler and its steps since the last change, which `update` changes in place; none if disabled."""
    return [vars(scaler)[name] for name in ("_scale", "_growth_tracker")] if scaler.is_enabled() else []


def exit_codes(batches: object, seconds: float) -> list[int]:
    """The exit codes of a data loader's processes that have ended, or end within some seconds, from an iterator over
    its batches."""
    processes = getattr(batches, "_workers", ())  # an iterator without processes has none
    wait([process.sentinel for process in processes], seconds)
    return [process.exitcode for process in processes if process.exitcode is not None]


def import_compiler() -> None:
    """Import the compiler, which DDP's constructor needs; this takes seconds."""
    internal("torch._dynamo", "disable")
