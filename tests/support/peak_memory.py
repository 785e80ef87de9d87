"""The most memory that tensors have at once, counted on any device: also on `meta`, whose tensors have only a size."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Bytes of the storages of all tensors that operations have returned and that are still alive.

    What a kernel needs for itself is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0  # the peak
        self._alive: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._alive += [weakref.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._alive = [reference for reference in self._alive if reference() is not None]
        sizes = {}
        for reference in self._alive:
            tensor = reference()
            if tensor is not None:
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
        self.bytes = max(self.bytes, sum(sizes.values()))
        return result
