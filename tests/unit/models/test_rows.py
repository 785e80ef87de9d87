from __future__ import annotations

from typing import ClassVar

import pytest
from torch import Tensor, nn

from ray_yolo.core.errors import ConfigError
from ray_yolo.models.blocks import Channels, Concat, Conv, Count, Kernel
from ray_yolo.models.detector import Architecture
from ray_yolo.models.heads import AnchorFree
from ray_yolo.models.rows import row


class Twice(nn.Module):
    """A block of another package: its signature is all that a table needs to know."""

    true_in_sizes: ClassVar[dict[str, str]] = {"wide": "lx"}

    def __init__(self, inputs: int, outputs: Channels, repeats: Count = 1, kernel: Kernel = 3, wide: bool = False, *,
                 secret: int = 0) -> None:
        super().__init__()
        self.wide, self.repeats = wide, repeats
        self.first = Conv(inputs, outputs, kernel)
        self.second = Conv(outputs, outputs, kernel)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_new_block_is_one_class() -> None:
    table = (row(Conv, 8, 3, 2), row(Twice, 16, repeats=4, kernel=5), row(AnchorFree, source=(1,)))
    block = Architecture(table, None, depth=0.5, width=2.0).build(3).model[1]
    assert isinstance(block, Twice)
    assert (block.repeats, block.second.conv.kernel_size, block.first.conv.in_channels) == (2, (5, 5), 16)
    assert block.second.conv.out_channels == 32


def test_larger_sizes_switch_arguments_on() -> None:
    plain = row(Twice, 16)
    assert plain.of_size("n") is plain
    assert plain.of_size("l") == row(Twice, 16, wide=True)
    assert row(Conv, 16).of_size("x") == row(Conv, 16)


def test_a_row_prints_as_it_is_written() -> None:
    assert str(row(Conv, 8, 3)) == "Conv(8, 3, 1, None, 1)"
    assert str(row(Concat, source=(-1, 6))) == "Concat(1, source=(-1, 6))"


@pytest.mark.parametrize(("positional", "named"), [
    ((), {}), ((8, 200), {}), ((8,), {"kernel": "3"}), ((8, 3, True, 0), {}), ((8,), {"secret": 1}),
    ((8,), {"repeats": 0})])
def test_arguments_that_do_not_fit_are_refused(positional: tuple[object, ...], named: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        row(Twice, *positional, **named)
