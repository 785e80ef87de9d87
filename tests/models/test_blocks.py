from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ray_yolo.models.batch_norm import BatchNorm
from ray_yolo.models.blocks import C3, SPP, SPPF, Bottleneck, Concat, Conv, avoid_slow_convolutions


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize(("stride", "side"), [(1, 8), (2, 4)])
def test_convolution_keeps_the_size_or_divides_it_by_the_stride(kernel: int, stride: int, side: int) -> None:
    assert Conv(2, 3, kernel, stride)(torch.zeros(1, 2, 8, 8)).shape == (1, 3, side, side)


def test_convolution_is_convolution_norm_and_silu() -> None:
    block, x = Conv(2, 3, 3), torch.randn(4, 2, 8, 8)
    y = nn.functional.conv2d(x, block.conv.weight, padding=1)
    y = (y - y.mean((0, 2, 3), keepdim=True)) / (y.var((0, 2, 3), keepdim=True, unbiased=False) + 1e-3).sqrt()
    torch.testing.assert_close(block(x), y * y.sigmoid(), rtol=1e-4, atol=1e-5)


def test_parameters_of_a_convolution() -> None:
    assert sum(p.numel() for p in Conv(5, 7, 3).parameters()) == 5 * 7 * 3 * 3 + 2 * 7


def test_norms_have_the_published_constants() -> None:
    norm = Conv(1, 1).bn
    assert isinstance(norm, BatchNorm)
    assert (norm.eps, norm.momentum) == (1e-3, 0.03)


def test_evaluation_and_training_activate_alike() -> None:
    """In place without gradients, out of place with them."""
    block, x = Conv(2, 3).eval(), torch.randn(1, 2, 4, 4)
    with torch.no_grad():
        without = block(x)
    torch.testing.assert_close(without, block(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("inputs", "outputs", "shortcut", "adds"), [(4, 4, True, True), (4, 4, False, False), (4, 6, True, False)]
)
def test_a_bottleneck_adds_its_input_when_asked_and_possible(
    inputs: int, outputs: int, shortcut: bool, adds: bool
) -> None:
    block, x = Bottleneck(inputs, outputs, shortcut).eval(), torch.randn(1, inputs, 4, 4)
    inner = block.cv2(block.cv1(x))
    torch.testing.assert_close(block(x), x + inner if adds else inner)


def test_stand_alone_bottlenecks_are_half_as_wide_inside() -> None:
    assert Bottleneck(8, 8).cv1.conv.out_channels == 4
    shapes = {name: tensor.shape for name, tensor in C3(8, 8, 2).state_dict().items()}
    assert shapes["cv1.conv.weight"] == (4, 8, 1, 1)  # C3 halves first, its bottlenecks do not
    assert shapes["m.1.cv1.conv.weight"] == (4, 4, 1, 1)


def test_c3_joins_the_bottleneck_branch_with_the_plain_one() -> None:
    block, x = C3(4, 6, 2).eval(), torch.randn(1, 4, 8, 8)
    joined = torch.cat((block.m(block.cv1(x)), block.cv2(x)), 1)
    torch.testing.assert_close(block(x), block.cv3(joined))


def test_tensor_names_of_blocks() -> None:
    norm = {f"bn.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    conv = {"conv.weight", *norm}
    assert set(Conv(4, 4).state_dict()) == conv
    for block, parts in (
        (Bottleneck(4, 4), ("cv1", "cv2")),
        (SPP(4, 4), ("cv1", "cv2")),
        (SPPF(4, 4), ("cv1", "cv2")),
        (C3(4, 4, 2), ("cv1", "cv2", "cv3", "m.0.cv1", "m.0.cv2", "m.1.cv1", "m.1.cv2")),
    ):
        assert set(block.state_dict()) == {f"{part}.{name}" for part in parts for name in conv}


def test_chained_pools_equal_pools_side_by_side() -> None:
    chained, parallel = SPPF(4, 6, 5).eval(), SPP(4, 6, (5, 9, 13)).eval()
    parallel.load_state_dict(chained.state_dict())
    x = torch.randn(2, 4, 16, 16)
    torch.testing.assert_close(chained(x), parallel(x), rtol=0, atol=0)


def test_concatenation_is_along_channels() -> None:
    assert Concat()(torch.zeros(1, 2, 4, 4), torch.zeros(1, 3, 4, 4)).shape == (1, 5, 4, 4)


def test_no_convolution_is_computed_image_by_image() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        slow, plain = computed(avoid=False)
        found, result = computed(avoid=True)
    finally:
        torch.set_num_threads(threads)
    assert "aten::_slow_conv2d_forward" in slow  # negative control
    assert not [name for name in found if "slow" in name]
    for ours, expected in zip(result, plain, strict=True):
        torch.testing.assert_close(ours, expected)


def computed(avoid: bool) -> tuple[set[str], list[Tensor]]:
    """The operations of a block's forward and backward, and its output and gradients."""
    torch.manual_seed(0)
    block, x = C3(32, 32), torch.rand(4, 32, 32, 32, requires_grad=True)
    if avoid:
        avoid_slow_convolutions(block)
    with torch.autograd.profiler.profile() as profile:
        y = block(x)
        y.square().mean().backward()
    return {event.name for event in profile.function_events}, [y, x.grad, *(p.grad for p in block.parameters())]
