"""Triton's kernels for BatchNorm and SiLU against torch in fp64, by Triton's interpreter on a CPU."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ray_yolo.models.batch_norm import Statistics, plain_norm
from ray_yolo.models.blocks import Conv
from tests.benchmarks.launch_counter import Counter
from tests.support.interpreted import interpreted

triton = pytest.importorskip("triton", reason="torch for CPUs comes without Triton")

NAME = "ray_yolo.ops.norm_kernel"
KERNELS = ("_part_statistics", "_all_statistics", "_normalise", "_part_gradients", "_all_gradients", "_input_gradient")
EPS = 1e-3
# Fewer channels than a tile has, and more; one part of a tile, and several of which the last is short
SHAPES = [(2, 24, 6, 10), (3, 80, 9, 7), (2, 3, 40, 40), (1, 65, 7, 1)]


@pytest.fixture
def kernels() -> Iterator[ModuleType]:
    with interpreted(NAME) as module:
        yield module


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, weight, bias, and the gradient of the result. Means are not 0."""
    draw = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(shape, generator=draw).to(memory_format=torch.channels_last) for _ in range(2))
    weight, bias = torch.rand(2, shape[1], generator=draw)
    return (3 * x + 5).to(dtype), weight + 0.5, bias - 0.5, gradient.to(dtype)


def passes(normalise: Any, x: Tensor, weight: Tensor, bias: Tensor, gradient: Tensor, silu: bool) -> list[Tensor]:
    """Result, statistics and gradients."""
    inputs = [part.detach().clone().requires_grad_() for part in (x, weight, bias)]
    mean, var = torch.zeros(2, len(weight), dtype=weight.dtype)
    output = normalise(*inputs, mean, var, EPS, silu=silu)
    return [output.detach(), mean, var, *torch.autograd.grad(output, inputs, gradient.to(output.dtype))]


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_passes_are_torchs_up_to_rounding(
        kernels: ModuleType, shape: tuple[int, ...], dtype: torch.dtype, limit: float, silu: bool) -> None:
    inputs = drawn(shape, dtype)
    found = passes(kernels.fused_norm, *inputs, silu)
    expected = passes(plain_norm, *(part.double() for part in inputs), silu)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert float((one - other).abs().max() / other.abs().max()) < limit, number
    assert found[0].dtype == found[3].dtype == dtype
    assert found[0].stride() == found[3].stride() == inputs[0].stride()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of places outside, which are not stored
def test_sums_do_not_cancel_far_from_zero(kernels: ModuleType) -> None:
    """E[x^2] - E[x]^2 in fp32 would have no digit left: the mean is 1,000 times the deviation."""
    x, weight, bias, gradient = drawn((2, 3, 40, 40), torch.float32)
    found = passes(kernels.fused_norm, x + 3000, weight, bias, gradient, True)
    expected = passes(plain_norm, *(part.double() for part in (x + 3000, weight, bias, gradient)), True)
    assert torch.allclose(found[2].double(), expected[2], rtol=1e-4)


def test_a_gradient_need_not_be_dense(kernels: ModuleType) -> None:
    """Those of a concatenation's inputs are parts of a wider one, that of a mean is one number, others are NCHW."""
    x, weight, bias, gradient = drawn((2, 24, 6, 10), torch.float32)
    wider = torch.cat((gradient, gradient, gradient), 1)[:, 24:48]
    assert not wider.is_contiguous(memory_format=torch.channels_last)
    seen = []
    for one in (gradient, wider, gradient.contiguous()):
        seen.append(passes(kernels.fused_norm, x, weight, bias, one, True))
        assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[-1], strict=True))
    one, two = (passes(kernels.fused_norm, x, weight, bias, part, True) for part in (
        torch.ones(()).expand(x.shape), torch.ones_like(x)))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    _, stride = kernels._with_rows(wider)
    assert stride == 3 * 24  # read where it is


def test_a_block_trains_by_the_kernels_as_by_torch(kernels: ModuleType) -> None:
    """Convolution, BatchNorm and SiLU, whose input needs no gradient, as in a network's first block."""
    found = []
    for normalise in (plain_norm, kernels.fused_norm):
        torch.manual_seed(0)
        block = Conv(3, 8, 3).train()
        statistics = Statistics(block, normalise)
        output = block(torch.randn(2, 3, 8, 8))
        output.square().sum().backward()
        found.append([output.detach(), statistics.recorded(0), *(part.grad for part in block.parameters())])
    for one, other in zip(*found, strict=True):
        assert float((one - other).abs().max() / other.abs().max()) < 3e-6


def test_kernels_carry_sixteen_bytes_for_an_element(kernels: ModuleType) -> None:
    """Each launch reads and writes its tensors once. torch's five operations are counted alike, without the second
    reading of the statistics' values by its BatchNorm, which they do in each pass."""
    x, weight, bias, gradient = drawn((1, 8, 128, 128), torch.bfloat16)
    carried: list[int] = []

    class Noted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **named: Any) -> None:
                carried.append(sum(each.nbytes for each in arguments if isinstance(each, Tensor)))
                self.kernel[grid](*arguments, **named)
            return launch

    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            patch.setattr(kernels, name, Noted(getattr(kernels, name)))
        passes(kernels.fused_norm, x, weight, bias, gradient, True)
    assert len(carried) == 6
    assert 16 <= sum(carried) / x.numel() < 16.2
    inputs = [part.requires_grad_() for part in (x, weight, bias)]
    mean, var = torch.zeros(2, 8)
    with Counter() as counter:
        torch.autograd.grad(F.silu(F.batch_norm(x, mean, var, weight, bias, True, 1.0, EPS)), inputs, gradient)
    assert counter.bytes / x.numel() + 2 + 4 == pytest.approx(26, abs=0.1)


def test_parts_follow_from_the_shape_and_cover_all_rows(kernels: ModuleType) -> None:
    for rows in (1, 63, 64, 65, 32_768, 32_769, 1_638_400, 26_214_400):
        for channels in (1, 16, 64, 80, 1024):
            tile_channels, tile_rows, parts, part_rows = kernels._tiles(rows, channels)
            assert tile_channels * tile_rows == 4096
            assert part_rows % tile_rows == 0
            assert (parts - 1) * part_rows < rows <= parts * part_rows
            assert parts <= 512


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("values", ["bf16", "fp32"])
def test_the_kernels_compile_for_a_gpu_and_add_without_atomics(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, values: str) -> None:
    """It needs no GPU. The interpreter accepts more than the compiler."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = importlib.import_module(NAME)
    defined = getattr(module, name)
    constants = {"tile_rows": 64, "tile_channels": 16 if name.startswith("_all") else 64, "most_parts": 512,
                 "silu": True}
    types = dict.fromkeys(("rows", "channels", "parts", "part_rows", "stride"), "i32") | dict.fromkeys(
        constants, "constexpr") | dict.fromkeys(("x", "output", "gradient", "of_input"), f"*{values}") | {"eps": "fp32"}
    signature = {argument: types.get(argument, "*fp32") for argument in defined.arg_names}
    given = {(number,): constants[argument] for number, argument in enumerate(defined.arg_names)
             if argument in constants}
    compiled = triton.compile(ASTSource(defined, signature, given), target=GPUTarget("cuda", 90, 32),
                              options=module._OPTIONS)
    assert not re.search(r"\b(atom|red)\.", compiled.asm["ptx"])
