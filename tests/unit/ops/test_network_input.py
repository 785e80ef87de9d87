"""Bytes become what a network takes, by one operation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ray_yolo.ops.network_input import unit_range


class Operations(TorchDispatchMode):
    """The operations that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_each_byte_is_the_nearest_float_of_its_quotient(memory_format: torch.memory_format) -> None:
    pixels = torch.arange(2 * 3 * 8 * 16).remainder(256).to(torch.uint8).view(2, 3, 8, 16)
    found = unit_range(pixels, memory_format)
    expected = (pixels.numpy().astype(np.float64) / 255).astype(np.float32)
    assert np.array_equal(found.numpy(), expected)
    assert found.is_contiguous(memory_format=memory_format)


def test_pixels_are_read_once_and_the_divisor_is_on_their_device() -> None:
    """A divisor on the host would be a factor on a GPU."""
    with Operations() as called:
        found = unit_range(torch.zeros(1, 3, 4, 4, dtype=torch.uint8, device="meta"))
    assert found.device.type == "meta"
    assert called.names == ["aten.zeros.default", "aten.empty.memory_format", "aten.full.default", "aten.div.out"]
