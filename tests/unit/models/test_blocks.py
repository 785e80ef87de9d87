from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from ray_yolo.models.batch_norm import BatchNorm
from ray_yolo.models.blocks import C3, SPP, SPPF, Attention, Bottleneck, Concat, Conv, avoid_slow_convolutions


def test_convolution_keeps_the_size_or_divides_it_by_the_stride() -> None:
    for kernel, (stride, side) in product((1, 3, 5), ((1, 8), (2, 4))):
        assert Conv(2, 3, kernel, stride)(torch.zeros(1, 2, 8, 8)).shape == (1, 3, side, side), (kernel, stride, side)


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


def plain_attention(channels: int, heads: int, key_share: float = 0.5, kernel: int = 3) -> Attention:
    """Attention whose convolutions add nothing of their own: no norm, `proj` passes on, `pe` gives nothing."""
    block = Attention(channels, heads, key_share, kernel).eval()
    for convolve in (block.qkv, block.proj, block.pe):
        convolve.bn = nn.Identity()
    with torch.no_grad():
        block.proj.conv.weight.copy_(torch.eye(channels)[..., None, None])
        block.pe.conv.weight.zero_()
    return block


def test_attention_of_two_cells_by_hand() -> None:
    """One head: query and key are the first channel, values are both."""
    block = plain_attention(2, 1)
    assert block.widths == (1, 1, 2)
    with torch.no_grad():
        block.qkv.conv.weight.copy_(torch.tensor([[1.0, 0], [1, 0], [1, 0], [0, 1]])[..., None, None])
    x = torch.tensor([[[[1.0, 2.0]], [[10.0, 20.0]]]])
    first, second = torch.tensor([1.0, 2.0]).softmax(0), torch.tensor([2.0, 4.0]).softmax(0)  # scale 1 / sqrt(1)
    values = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    torch.testing.assert_close(block(x)[0, :, 0], torch.stack((values @ first, values @ second), 1))


def test_heads_hold_their_queries_keys_and_values_side_by_side() -> None:
    """The second of two heads has nothing but zeros: its half of the channels is the mean of its values, 0."""
    block = plain_attention(8, 2)
    with torch.no_grad():
        block.qkv.conv.weight[8:].zero_()
    y = block(torch.randn(1, 8, 3, 2))
    assert y[:, 4:].eq(0).all()
    assert y[:, :4].ne(0).all()


def test_attention_adds_a_convolution_of_the_values_and_not_of_the_input() -> None:
    block = plain_attention(2, 1)
    with torch.no_grad():
        block.qkv.conv.weight.zero_()
        block.qkv.conv.weight[3, 0] = 5.0  # values of the second channel; the others are 0
        block.pe.conv.weight[:, 0, 1, 1] = 1.0
    x = torch.randn(1, 2, 3, 4)
    y = block(x)
    assert y[:, 0].eq(0).all()
    torch.testing.assert_close(y[:, 1], 5 * x[:, 0] + (5 * x[:, 0]).mean())


def test_cells_of_other_areas_are_not_seen() -> None:
    block = plain_attention(32, 1, key_share=1.0, kernel=7)
    x = torch.randn(1, 32, 4, 4)
    changed = x.clone()
    changed[:, :, 2:] += 1.0  # the second of two areas
    assert torch.equal(block(x, 2)[:, :, :2], block(changed, 2)[:, :, :2])
    assert not torch.equal(block(x, 1)[:, :, :2], block(changed, 1)[:, :, :2])


def test_attention_keeps_rows_and_columns_apart_in_any_memory_order() -> None:
    block, x = Attention(64, 1).eval(), torch.randn(2, 64, 3, 2)
    torch.testing.assert_close(block(x.contiguous(memory_format=torch.channels_last)), block(x), rtol=1e-4, atol=1e-5)
    shifted = block(x.flip(3)).flip(3) - block(x)
    assert block(x).shape == x.shape
    assert shifted.abs().max() > 0  # `pe` sees where a cell is


def test_a_pooling_block_with_a_residual_adds_its_input_and_is_linear_at_first() -> None:
    block, x = SPPF(4, 4, residual=True).eval(), torch.randn(1, 4, 6, 6)
    plain = SPPF(4, 4).eval()
    plain.load_state_dict(block.state_dict())
    plain.cv1.active = False
    torch.testing.assert_close(block(x), x + plain(x))
