"""The decoded training images in a device's memory: which, when, and whether they fit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_yolo.core.errors import ConfigError
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.engine import held_images as held_module
from ray_yolo.engine import team as team_module
from ray_yolo.engine.held_images import free_memory, hold_images
from ray_yolo.engine.spec import WorkerContext
from ray_yolo.engine.team import held_bytes, image_stores, renders_on_device
from tests.support.jobs import make_index, make_spec

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ON_DEVICE: dict[str, Any] = {"render": "device"}


@pytest.mark.parametrize(("device", "recipe", "expected"), [
    (GPU, {}, False), (CPU, {"augment": ON_DEVICE}, False), (GPU, {"augment": ON_DEVICE}, True),
    (GPU, {"augment": {**ON_DEVICE, "degrees": 10, "shear": 3, "partners": 8}, "rect": True}, True),
    *((GPU, {"augment": {**ON_DEVICE, name: 0.001}}, False) for name in ("mixup", "copy_paste", "perspective")),
    (GPU, {"augment": ON_DEVICE, "quad": True}, False),
])
def test_a_gpu_renders_what_its_kernel_can(
        tmp_path: Path, device: torch.device, recipe: dict[str, Any], expected: bool) -> None:
    assert renders_on_device(make_spec(tmp_path, **recipe).recipe, device) is expected


def test_a_gpu_holds_images_if_it_renders_in_any_epoch(tmp_path: Path) -> None:
    """37 images of 48 x 64."""
    for augment, changes, expected in ((ON_DEVICE, (), 37 * 48 * 64 * 3), ({}, (), 0),
                                       ({**ON_DEVICE, "mixup": 0.1}, ("3: augment.mixup=0",), 37 * 48 * 64 * 3),
                                       ({}, ("3: augment.render=device",), 37 * 48 * 64 * 3),
                                       ({**ON_DEVICE, "mixup": 0.1}, ("3: augment.mixup=0.2",), 0)):
        spec = make_spec(tmp_path, augment=augment, changes=changes)
        assert held_bytes(spec.recipe, spec.train, GPU) == expected
        assert held_bytes(spec.recipe, spec.train, CPU) == 0


def test_every_image_has_its_place_and_a_damaged_one_is_reported(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = make_index(tmp_path, 30)
    store = ImageStore(index, 64)
    expected = [store.load(image) for image in range(30)]
    Path(index.paths[3]).write_bytes(b"no image")
    with caplog.at_level(logging.WARNING):
        held = hold_images(store, CPU)
    assert (~held.readable).nonzero()[0].tolist() == [3]
    assert [record.getMessage().endswith("replaced by the next image") for record in caplog.records] == [True]
    for image in {*range(30)} - {3}:
        bytes_of_it = held.pixels[store.starts[image]:store.starts[image + 1]]
        assert np.array_equal(bytes_of_it.numpy(), expected[image].reshape(-1))


def let_the_cpu_render(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_module, "renders_on_device", lambda recipe, device: recipe.augment.render == "device")
    monkeypatch.setattr(team_module, "find_spec", lambda name: name)  # torch for CPUs comes without Triton


def test_too_little_memory_is_refused_before_any_image_is_decoded(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(tmp_path, augment=ON_DEVICE)
    let_the_cpu_render(monkeypatch)
    monkeypatch.setattr(held_module, "free_memory", lambda device: 37 * 48 * 64 * 3)
    held = image_stores(spec, WorkerContext()).held
    assert held is not None
    assert held.readable.all()
    monkeypatch.setattr(held_module, "free_memory", lambda device: 37 * 48 * 64 * 3 - 1)
    monkeypatch.setattr(team_module, "ImageStore", None)
    with pytest.raises(ConfigError):
        image_stores(spec, WorkerContext())


@pytest.mark.parametrize(("changes", "is_left"), [((), False), (("3: mixup=0.1",), True)])
def test_the_workers_of_a_node_decode_once_and_then_need_no_cache_in_memory(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: tuple[str, ...], is_left: bool) -> None:
    """Unless loaders render in another epoch. Validation has its own."""
    spec = make_spec(tmp_path, augment=ON_DEVICE, changes=changes)
    let_the_cpu_render(monkeypatch)
    decoded: list[int] = []
    decode = ImageStore._decode
    monkeypatch.setattr(ImageStore, "_decode", lambda store, image: decoded.append(image) or decode(store, image))
    stores = image_stores(spec, WorkerContext(cache="ram"))
    try:
        assert sorted(decoded) == sorted([*range(37), *range(11)])
        assert stores.held is not None
        assert np.array_equal(stores.held.pixels[: stores.train.starts[1]].numpy(), decode(stores.train, 0).reshape(-1))
        assert stores.train.file is not None
        assert stores.val.file is not None
        assert (stores.train.file.exists(), stores.val.file.exists()) == (is_left, True)
    finally:
        stores.train.close()
        stores.val.close()


def test_a_gpu_without_triton_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's pixels would give other weights than those of the recipe."""
    let_the_cpu_render(monkeypatch)
    monkeypatch.setattr(team_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError):
        image_stores(make_spec(tmp_path, augment=ON_DEVICE), WorkerContext())
    assert image_stores(make_spec(tmp_path), WorkerContext()).held is None


def test_the_free_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 10))
    assert free_memory(GPU) == 7
    assert free_memory(CPU) > 2**20
