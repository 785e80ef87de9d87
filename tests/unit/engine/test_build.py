"""The components that are built from a recipe."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from ray_yolo.core.errors import CheckpointError, ConfigError
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.engine import build as build_module
from ray_yolo.engine.build import (
    WorkerContext,
    build,
    build_network,
    normalisation,
    rebuild,
    recolours_on_device,
    regroup,
    release_process_group,
    val_loader,
)
from ray_yolo.engine.collectives import Collectives
from ray_yolo.models.batch_norm import BatchNorm, Statistics, plain_norm
from tests.support.jobs import make_index, make_spec
from tests.support.norm_kernels import kernels_on_cpu

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def test_equal_seeds_give_equal_weights_and_leave_the_global_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two = (build_network(make_spec(tmp_path, seed=seed)) for seed in (1, 1))
    other = build_network(make_spec(tmp_path, seed=2))
    assert torch.equal(torch.rand(3), expected)
    weight = "model.0.conv.weight"
    assert torch.equal(one.state_dict()[weight], two.state_dict()[weight])
    assert not torch.equal(one.state_dict()[weight], other.state_dict()[weight])


def test_frozen_layers_are_not_trained(tmp_path: Path) -> None:
    components = build(make_spec(tmp_path, freeze=2), WorkerContext())
    trained = {id(p) for group in components.optimizer.param_groups for p in group["params"]}
    frozen = [name for name, p in components.model.named_parameters() if id(p) not in trained]
    assert frozen
    assert {name.split(".")[1] for name in frozen} == {"0", "1"}


@pytest.mark.parametrize(("device", "recipe", "exchanges"), [
    ("cuda", {"sync_bn": True, "norm_kernels": True}, ["stack"]),
    ("cuda", {"sync_bn": True}, ["sum", "sum"]),
    ("cpu", {"sync_bn": True, "norm_kernels": True}, ["sum", "sum"]),
    ("cuda", {}, []),
])
def test_norm_kernels_are_those_of_gpus(tmp_path: Path, device: str, recipe: dict[str, bool], exchanges: list[str]
                                        ) -> None:
    """Seen by what a forward pass exchanges."""
    found: list[str] = []

    class Noted(Collectives):
        def global_sum(self, x: Tensor) -> Tensor:
            found.append("sum")
            return x

        def stack(self, x: Tensor) -> Tensor:
            found.append("stack")
            return x[None]

    layer = BatchNorm(2)
    Statistics(layer, normalisation(make_spec(tmp_path, **recipe).recipe, Noted(), torch.device(device)))
    with kernels_on_cpu():
        layer(torch.randn(2, 2, 4, 4))
    assert found == exchanges


def test_norm_kernels_are_refused_without_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernels would give other weights than those of the recipe."""
    recipe = make_spec(tmp_path, norm_kernels=True).recipe
    monkeypatch.setattr(build_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Triton is not installed"):
        normalisation(recipe, Collectives(), torch.device("cuda"))
    assert normalisation(recipe, Collectives(), torch.device("cpu")) is plain_norm


@pytest.mark.parametrize(("device", "recipe", "expected"), [
    ("cuda", {}, True),
    ("cpu", {}, False),
    ("cuda", {"quad": True}, False),
    ("cuda", {"augment": {"hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}}, False),
    ("cuda", {"augment": {"hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.1}}, True),
])
def test_a_gpu_changes_colours_of_single_samples(
        tmp_path: Path, device: str, recipe: dict[str, Any], expected: bool) -> None:
    assert recolours_on_device(make_spec(tmp_path, **recipe).recipe, torch.device(device)) is expected


def test_loaders_and_device_agree_on_who_changes_colours_also_if_settings_change(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "recolours_on_device", lambda recipe, device: recipe.augment.hsv_v > 0)
    plain = make_spec(tmp_path, augment={"hsv_v": 0.0})
    changed = make_spec(tmp_path, augment={"hsv_v": 0.1})
    components = build(plain, WorkerContext())
    assert components.colours is None
    components = rebuild(components, changed.recipe)
    assert components.colours is not None
    assert components.loader.parts.loader.dataset.load.__self__.leaves_colours
    components = rebuild(components, plain.recipe)
    assert components.colours is None
    assert not components.loader.parts.loader.dataset.load.__self__.leaves_colours
    build_module.colour_tables_on.cache_clear()


@pytest.mark.parametrize(("exact", "before", "after"), [
    (True, None, ":4096:8"), (True, ":16:8", ":16:8"), (False, None, None)])
def test_an_exact_training_in_any_process_sets_the_workspace_that_cublas_needs(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: bool, before: str | None, after: str | None) -> None:
    """Without it, torch refuses the first product of matrices on a GPU."""
    monkeypatch.setenv(CUBLAS, "")  # it is put back at the end, whatever the build sets
    monkeypatch.delenv(CUBLAS)
    if before:
        monkeypatch.setenv(CUBLAS, before)
    try:
        build(make_spec(tmp_path, exact=exact), WorkerContext())
        assert os.environ.get(CUBLAS) == after
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("no_tf32", [False, True])
def test_convolutions_of_fp32_round_to_tf32_unless_no_tf32_is_given(tmp_path: Path, no_tf32: bool) -> None:
    """Also if the process has trained the other way before."""
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = no_tf32
        build(make_spec(tmp_path, no_tf32=no_tf32), WorkerContext())
        assert torch.backends.cudnn.allow_tf32 is not no_tf32
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_initial_weights_are_taken_from_plain_tensors(tmp_path: Path) -> None:
    donor = build_network(make_spec(tmp_path, seed=7))
    torch.save(donor.state_dict(), tmp_path / "w.pt")
    model = build_network(make_spec(tmp_path, weights=str(tmp_path / "w.pt")))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), donor.state_dict().values(), strict=True))
    torch.save({"x": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="none of the model's"):
        build_network(make_spec(tmp_path, weights=str(tmp_path / "other.pt")))


def test_rectangular_training_keeps_the_order_and_one_shape_in_each_microbatch(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, rect=True)
    components = build(spec, WorkerContext())
    components.sampler.start(0)
    first = [key.image for part in components.sampler for key in part.keys]
    components.sampler.start(1)
    assert first == [key.image for part in components.sampler for key in part.keys]
    components.sampler.start(0)
    shapes = [tuple(batch["images"].shape[2:]) for batch in components.loader]
    assert set(shapes) == {(64, 64)}  # 48 x 64 pictures on a grid of 32


def test_the_host_prepares_each_training_loader(tmp_path: Path) -> None:
    """As Ray Train does, at the start and after each regrouping. It keeps the package's sampler."""
    prepared: list[tuple[DataLoader, list[DataLoader]]] = []

    def prepare(loader: DataLoader) -> list[DataLoader]:
        prepared.append((loader, [loader]))
        return prepared[-1][1]

    components = build(make_spec(tmp_path), WorkerContext(prepare_loader=prepare))
    other = regroup(components, Collectives(0, 1))
    assert len(prepared) == 2
    for made, (loader, result) in zip((components, other), prepared, strict=True):
        assert made.loader.parts.loader is result
        assert loader.sampler is made.sampler
        assert isinstance(loader.sampler, DistributedSampler)


def test_batches_for_a_gpu_are_pinned_with_any_loader_processes(tmp_path: Path) -> None:
    index = make_index(tmp_path, 3)
    for processes, device in product((0, 2), ("cuda", "cpu")):
        context = WorkerContext(device=torch.device(device), loader_processes=processes)
        loader = val_loader(index, ImageStore(index, 64), 64, 32, 2, context)
        assert loader.loader.pin_memory is (device == "cuda"), (processes, device)


def test_a_group_that_was_never_complete_is_released_too(tmp_path: Path) -> None:
    """If a worker is lost between two groups, the others release the group a second time."""
    components = build(make_spec(tmp_path), WorkerContext())
    model = components.model
    release_process_group(components)
    release_process_group(components)
    again = regroup(components, Collectives())
    assert again.model is model
    assert again.gradients is not None
