"""The kernel of Triton that renders views against plain arithmetic and against the host's pictures, by Triton's
interpreter on a CPU."""

from __future__ import annotations

import importlib
import mmap
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ray_yolo.config.sections import AugmentConfig
from ray_yolo.core.structures import AnnotationIndex, SampleKey
from ray_yolo.data.augment import colour_tables, draw_affine, scaled_hsv
from ray_yolo.data.dataset import TrainDataset
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.index import read_index
from ray_yolo.data.mosaic import snap
from ray_yolo.data.views import ViewDataset
from ray_yolo.ops.network_input import unit_range
from ray_yolo.ops.recolour import ColourTables, recolour
from ray_yolo.ops.views import Source, mirror_view, view_of
from tests.support.interpreted import interpreted
from tests.support.pictures import write_dataset
from tests.support.rendered import picture

triton = pytest.importorskip("triton", reason="torch for CPUs comes without Triton")

KERNELS = ("ray_yolo.ops.render_kernel", "ray_yolo.ops.colour_kernel")
QUADRANTS = ((True, True), (False, True), (True, False), (False, False))
SHAPES = ((20, 27), (31, 9), (24, 32), (5, 1))  # the last one has a single column
DATA = Path(__file__).parents[4] / "shared" / "data"
Kernel = Callable[..., Tensor]


@pytest.fixture(scope="module")
def tables() -> ColourTables:
    return colour_tables()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with interpreted(*KERNELS) as module:
        yield module.rendered_input


def noise(shapes: tuple[tuple[int, int], ...] = SHAPES) -> tuple[np.ndarray, list[int]]:
    """Random images back to back, and the first byte of each."""
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 256, 3 * height * width, np.uint8) for height, width in shapes]
    return np.concatenate(images), np.cumsum([0, *map(len, images)])[:-1].tolist()


def drawn_view(seed: int, size: tuple[int, int], starts: list[int], **augment: float) -> np.ndarray:
    """A random view of images in all quadrants, of one alone, or of none on one side."""
    draw = np.random.default_rng(seed)
    canvas = (64, 64)
    seam = tuple(draw.integers(16, 49, 2).tolist())
    matrix = snap(draw_affine(draw, AugmentConfig.model_validate(augment), canvas, size)[0], seam)
    sources = [Source(start, shape, before, (40, 13)) for start, shape, before
               in zip(starts, SHAPES, QUADRANTS, strict=True)]
    view = view_of(size, sources[:1 + 3 * (seed % 2)], seam, matrix)
    mirror_view(view, (seed % 4 > 1, seed % 8 > 3))
    return view


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("augment", [
    {"scale": 0.0, "translate": 0.0}, {"scale": 0.95, "translate": 0.3}, {"degrees": 180.0, "shear": 45.0}],
    ids=["plain", "zoomed", "turned"])
def test_every_bit_is_that_of_plain_arithmetic(
        kernel: Kernel, tables: ColourTables, augment: dict[str, float], memory_format: torch.memory_format) -> None:
    """Pictures that end within a block, with colours and without."""
    held, starts = noise()
    views = np.stack([drawn_view(seed, (30, 37), starts, **augment) for seed in range(8)])
    pixels = torch.from_numpy(np.stack([picture(held, view) for view in views])).permute(0, 3, 1, 2)
    assert len(pixels.unique()) > 200
    gains = np.random.default_rng(1).uniform(0.5, 1.5, (8, 3)).tolist()
    scaled = torch.from_numpy(np.stack([scaled_hsv(tuple(each)) for each in gains]))
    given = (torch.from_numpy(held), torch.from_numpy(views), (30, 37), memory_format)
    for own_tables, own_scaled, expected in (
            (None, None, pixels), (tables, scaled, recolour(pixels, scaled, tables))):
        found = kernel(given[0], own_tables, given[1], own_scaled, *given[2:])
        expected = unit_range(expected, memory_format)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


def test_images_beyond_two_gigabytes_are_found(kernel: Kernel) -> None:
    """Their places need more than 32 bits. The memory before them is never touched, so it takes none."""
    image, _ = noise(SHAPES[:1])
    start = 2**32 + 7
    held = np.frombuffer(mmap.mmap(-1, start + len(image)), np.uint8)
    held[start:] = image
    near, far = (view_of((20, 27), [Source(place, SHAPES[0], (False, False), (99, 99))], (0, 0), np.eye(3))
                 for place in (0, start))
    expected, found = (
        kernel(torch.from_numpy(pixels), None, torch.from_numpy(view)[None], None, (20, 27), torch.channels_last)
        for pixels, view in ((image, near), (held, far)))
    assert torch.equal(found, expected)
    assert torch.equal(found[0].permute(1, 2, 0).mul(255).round().byte().reshape(-1), torch.from_numpy(image))


def rendered(kernel: Kernel, tables: ColourTables, index: AnnotationIndex, keys: list[SampleKey],
             augment: AugmentConfig, imgsz: int, shapes: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
    """Grey levels (B, 3, H, W) of the device's way and of the host's. Their targets are equal bit for bit."""
    store, has_colours = ImageStore(index, imgsz), augment.hsv_v > 0
    host = TrainDataset(index, store, augment, imgsz, 0, 10, shapes).__getitems__(keys)
    readable = np.ones(len(index), bool)
    views = ViewDataset(index, store, augment, imgsz, 0, 10, shapes, leaves_colours=has_colours, readable=readable)
    batch = views.__getitems__(keys)
    for name in ("targets", "indices"):
        assert torch.equal(batch[name], host[name]), name
    held = torch.from_numpy(np.concatenate([store.load(image).reshape(-1) for image in range(len(index))]))
    found = kernel(held, tables if has_colours else None, batch["views"], batch.get("colours"),
                   tuple(host["images"].shape[2:]), torch.channels_last)
    return found.mul(255).round().int(), host["images"].int()


PLAIN: dict[str, Any] = {"hsv_h": 0, "hsv_s": 0, "hsv_v": 0}


@pytest.mark.parametrize(("augment", "mean", "most"), [
    ({"flipud": 0.5}, 0.3, 12), ({**PLAIN, "scale": 0.9, "mosaic": 0.5, "flipud": 0.5}, 0.3, 8),
    ({**PLAIN, "scale": 0, "translate": 0, "fliplr": 0}, 0, 0)],  # without zoom no pixel lies between two others
    ids=["default", "zoomed", "still"])
def test_pictures_are_those_of_the_host(
        kernel: Kernel, tables: ColourTables, tmp_path: Path, augment: dict[str, float], mean: float, most: int
        ) -> None:
    """The host stretches images to whole pixels, which moves the end away from the seam by 0.05 pixels or so. Changed
    colours may be farther apart than the ones before."""
    labels = {str(number): "0 0.5 0.5 0.5 0.5\n1 0.3 0.4 0.2 0.6\n" for number in range(6)}
    index = read_index(write_dataset(tmp_path, labels, size=(72, 96)), "train")
    keys = [SampleKey(0, position, position % 6, (0, 2, 3, 5) * (position % 2)) for position in range(8)]
    found, expected = rendered(kernel, tables, index, keys, AugmentConfig(**augment), 96)
    apart = (found - expected).abs()
    assert apart.float().mean() <= mean
    assert apart.max() <= most
    assert (expected == 114).all(1).float().mean() < 0.9


def test_turned_pictures_are_those_of_the_host_inside(kernel: Kernel, tables: ColourTables, tmp_path: Path) -> None:
    """OpenCV weights a turned image's pixels in steps of 1/32, and gives its edge half a pixel more or less."""
    index = read_index(write_dataset(tmp_path, dict.fromkeys("abcd"), size=(96, 96)), "train")
    keys = [SampleKey(0, position, position % 4) for position in range(6)]
    augment = AugmentConfig(**PLAIN, degrees=40, shear=10, scale=0.3, flipud=0.5)
    found, expected = rendered(kernel, tables, index, keys, augment, 96)
    apart = (found - expected).abs().amax(1)
    assert (apart > 4).float().mean() < 0.04  # edges and seams
    assert apart[apart <= 4].float().mean() < 0.7


def test_rectangular_pictures_have_their_shape(kernel: Kernel, tables: ColourTables, tmp_path: Path) -> None:
    index = read_index(write_dataset(tmp_path, dict.fromkeys("ab"), size=(48, 96)), "train")
    keys = [SampleKey(0, position, position) for position in range(2)]
    augment = AugmentConfig(scale=0.2, flipud=0.5)
    found, expected = rendered(kernel, tables, index, keys, augment, 96, np.array([[64, 96]] * 2))
    assert found.shape == (2, 3, 64, 96)
    assert (found - expected).abs().float().mean() < 0.3


@pytest.mark.realdata
def test_pictures_of_blood_cells_are_those_of_the_host(kernel: Kernel, tables: ColourTables) -> None:
    index = read_index(read_description(DATA / "bccd" / "data.yaml"), "train")
    keys = [SampleKey(0, position, position) for position in range(24)]
    found, expected = rendered(kernel, tables, index, keys, AugmentConfig(), 160)
    apart = (found - expected).abs()
    assert apart.float().mean() <= 0.18
    assert apart.max() <= 9


def test_the_kernel_compiles_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It needs no GPU. The interpreter accepts more than the compiler, and has one way to divide. No other number is a
    float, which a device could round in its own way."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name in KERNELS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(KERNELS[0])
    defined = module._render
    pointers = {"held": "*u8", "views": "*i64", "scaled": "*u8", "to_hsv": "*i32", "to_rgb": "*i32", "images": "*fp32"}
    constants = {"fraction": module.FRACTION, "head": module.HEAD, "per_tile": module.PER_TILE,
                 "length": module.LENGTH, "recolours": True, "block": 1024}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in defined.arg_names}
    places = {(defined.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(defined, signature, places), target=GPUTarget("cuda", 90, 32),
                              options={"enable_fp_fusion": False})
    ptx = compiled.asm["ptx"]
    of_floats = set(re.findall(r"\b(?:div|mul|add|sub|fma|mad)\.[\w.]*f32", ptx))
    assert of_floats == {"div.rn.f32"}
