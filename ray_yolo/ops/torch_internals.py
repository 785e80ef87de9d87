"""Private names of PyTorch: operations on lists of tensors, the tensors of a gradient scaler, and the compiler. The
list operations need few kernels instead of one per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.amp import GradScaler

from ray_yolo.core.internals import internal


def _in_place(name: str, left: Sequence[Tensor], *arguments: Sequence[Tensor] | float) -> None:
    internal("torch", name)(left, *arguments)


add_ = partial(_in_place, "_foreach_add_")  # (left, right): left[i] += right[i], or the number `right`
mul_ = partial(_in_place, "_foreach_mul_")  # (left, factor): left[i] *= factor
copy_ = partial(_in_place, "_foreach_copy_")  # (left, right): left[i] = right[i]
lerp_ = partial(_in_place, "_foreach_lerp_")  # (left, right, weight): left[i] += weight (right[i] - left[i])


def scaler_tensors(scaler: GradScaler) -> list[Tensor]:
    """The scale of a scaler and its steps since the last change, which `update` changes in place; none if disabled."""
    return [vars(scaler)[name] for name in ("_scale", "_growth_tracker")] if scaler.is_enabled() else []


def import_compiler() -> None:
    """Import the compiler, which DDP's constructor needs; this takes seconds."""
    internal("torch._dynamo", "disable")
