"""Counts the operations that a device computes. torch alone: the peers' Python runs it as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NOTHING = {f"aten.{name}" for name in ("empty.memory_format", "empty_like.default", "new_empty.default",
                                        "empty_strided.default")}
_WAITS = {f"aten.{name}" for name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim",
                                      "unique_consecutive", "bincount")}
_BY_MASK = {"aten.index.Tensor", "aten.index_put_.default", "aten.index_put.default", "aten._index_put_impl_.default"}


class Counter(TorchDispatchMode):
    """Counts operations that compute something, and those among them whose result the host needs.

    `bytes` counts the inputs and outputs of each operation once: what memory carries if no cache helps.

    On a GPU each operation is at least one kernel launch; views and new memory are none. The host waits where a value
    becomes a number of Python, or where the shape of a result depends on values, as of a mask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = self.waits = self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        computes = not function.is_view and name not in _NOTHING
        self.count += computes
        self.waits += name.rpartition(".")[0] in _WAITS or (name in _BY_MASK and _has_mask(args[1]))
        result = function(*args, **(kwargs or {}))
        if computes:
            self.bytes += sum(_distinct_bytes(leaf) for leaf in tree_leaves((args, kwargs, result)))
        return result


def _distinct_bytes(leaf: Any) -> int:
    """Of a tensor's memory; an expanded one has less of it than elements."""
    return min(leaf.nbytes, leaf.untyped_storage().nbytes()) if isinstance(leaf, Tensor) else 0


def _has_mask(indices: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(indices))


class Phases:
    """The operations and waits of the phases of a step."""

    def __init__(self) -> None:
        self.launches: dict[str, int] = {}
        self.waits: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context whose operations are counted under a name."""
        with Counter() as counter:
            yield
        self.launches[name], self.waits[name] = counter.count, counter.waits
