"""Task-aligned assignment against the rules written as loops, and one label by hand."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.ops.test_assign_align import assert_as_the_loops, draw_targets, grid


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num=st.integers(2, 8))
def test_contested_points_go_where_the_loops_say(seed: int, num: int) -> None:
    """Every box has a CIoU of at least 0.12 with every label, so a label is aligned with every point inside and nothing
    is open. Labels that take ten of the same twenty points each contest many of them."""
    generator = torch.Generator().manual_seed(seed)
    places = grid(5, 7)
    low, size = (torch.rand(2, 35, 2, generator=generator) * length for length in (8, 16))
    boxes = torch.cat((low, low + size + 32), 2)
    scores = 0.05 + 0.95 * torch.rand(2, 35, 3, generator=generator)
    low, size = (torch.rand(num, 2, generator=generator) * length for length in (8, 16))
    targets = draw_targets(generator, num, low, size + 32)
    assert not assert_as_the_loops(boxes, scores, places, targets), "an image is left out"
