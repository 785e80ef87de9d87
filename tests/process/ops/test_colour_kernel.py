"""The kernel of Triton for colours against OpenCV's bytes and torch's division, by Triton's interpreter on a CPU."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ray_yolo.data.augment import colour_tables, recolour, scaled_hsv
from ray_yolo.ops.network_input import unit_range
from ray_yolo.ops.recolour import ColourTables, RecolouredInput, recoloured_input
from tests.benchmarks.launch_counter import Counter
from tests.support.interpreted import interpreted

triton = pytest.importorskip("triton", reason="torch for CPUs comes without Triton")

KERNEL = "ray_yolo.ops.colour_kernel"
GAINS = [(1.01, 1.2, 0.8), (0.99, 0.5, 1.3), (1.9, 1.0, 1.0)]
FORMATS = pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])


@pytest.fixture(scope="module")
def tables() -> ColourTables:
    return colour_tables()


@pytest.fixture
def kernel() -> Iterator[RecolouredInput]:
    with interpreted(KERNEL) as module:
        yield module.recoloured_input


def drawn(height: int, width: int) -> tuple[np.ndarray, Tensor]:
    """Random images (B, H, W, 3), and what becomes of their hues, saturations and values."""
    images = np.random.default_rng(0).integers(0, 256, (len(GAINS), height, width, 3), np.uint8)
    return images, torch.from_numpy(np.stack([scaled_hsv(gains) for gains in GAINS]))


@FORMATS
def test_bytes_and_quotients_are_the_hosts(
        kernel: RecolouredInput, tables: ColourTables, memory_format: torch.memory_format) -> None:
    images, scaled = drawn(32, 64)  # two whole blocks; whole vectors of OpenCV
    found = kernel(tables, torch.from_numpy(images.copy()).permute(0, 3, 1, 2), scaled, memory_format)
    for image, gains in zip(images, GAINS, strict=True):
        recolour(image, gains)
    expected = unit_range(torch.from_numpy(images).permute(0, 3, 1, 2), memory_format)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


@FORMATS
def test_an_image_that_ends_within_a_block(
        kernel: RecolouredInput, tables: ColourTables, memory_format: torch.memory_format) -> None:
    """The places after its end are other images, or no memory of the tensors."""
    images, scaled = drawn(30, 37)
    for pixels in (torch.from_numpy(images).permute(0, 3, 1, 2),
                   torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()):
        found = kernel(tables, pixels, scaled, memory_format)
        assert torch.equal(found, recoloured_input(tables, pixels, scaled, memory_format))


def test_every_byte_is_divided_as_on_a_cpu(kernel: RecolouredInput, tables: ColourTables) -> None:
    """Grey stays grey, so all 256 quotients are among the results."""
    grey = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16).contiguous()
    same = torch.from_numpy(scaled_hsv((1.0, 1.0, 1.0)))[None]
    found = kernel(tables, grey, same, torch.channels_last)
    assert torch.equal(found, unit_range(grey))
    assert len(found.unique()) == 256


def test_a_batch_without_images(kernel: RecolouredInput, tables: ColourTables) -> None:
    pixels = torch.zeros(0, 3, 4, 4, dtype=torch.uint8)
    found = kernel(tables, pixels, torch.zeros(0, 3, 256, dtype=torch.uint8), torch.channels_last)
    assert found.shape == (0, 3, 4, 4)


def test_the_kernel_is_the_only_launch(tables: ColourTables, kernel: RecolouredInput) -> None:
    """torch's way needs more than fifty."""
    images, scaled = drawn(8, 8)
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    with Counter() as counter:
        recoloured_input(tables, pixels, scaled, torch.channels_last)
    assert counter.count > 50
    module = sys.modules[KERNEL]
    with pytest.MonkeyPatch.context() as patch, Counter() as counter:
        launches = []
        patch.setattr(module, "_recolour", {(1, 3): lambda *args, **named: launches.append(args)})
        kernel(tables, pixels, scaled, torch.channels_last)
    assert (counter.count, len(launches)) == (0, 1)


def test_the_kernel_compiles_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It needs no GPU. The interpreter accepts more than the compiler, and has one way to divide."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    defined = importlib.import_module(KERNEL)._recolour
    pointers = {"pixels": "*u8", "scaled": "*u8", "to_hsv": "*i32", "to_rgb": "*i32", "images": "*fp32"}
    signature = {name: pointers.get(name, "i32") for name in defined.arg_names} | {"block": "constexpr"}
    source = ASTSource(defined, signature, {(len(signature) - 1,): 1024})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    divisions = re.findall(r"\bdiv\.[\w.]+", compiled.asm["ptx"])
    assert set(divisions) == {"div.rn.f32"}
