"""A worker's part in a generation, and its loaders."""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from ray_yolo.core.errors import ConfigError
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.engine import team as team_module
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.learner import build_learner
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.team import (
    Loaders,
    form_team,
    image_stores,
    make_loaders,
    normalisation,
    recolours_on_device,
    val_loader,
)
from ray_yolo.models.batch_norm import BatchNorm, Statistics, plain_norm
from tests.support.jobs import build_training, make_index, make_spec
from tests.support.norm_kernels import kernels_on_cpu


def loaders_of(spec: TrainSpec) -> Loaders:
    context = WorkerContext()
    return make_loaders(spec, 32, context, Collectives(), image_stores(spec, context))


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
    monkeypatch.setattr(team_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError):
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


def test_loaders_and_device_agree_on_who_changes_colours(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_module, "recolours_on_device", lambda recipe, device: recipe.augment.hsv_v > 0)
    plain = make_spec(tmp_path, augment={"hsv_v": 0.0})
    changed = make_spec(tmp_path, augment={"hsv_v": 0.1})
    loaders = loaders_of(plain)
    assert loaders.colours is None
    assert not loaders.train.parts.loader.dataset.load.__self__.leaves_colours
    loaders = loaders_of(changed)
    assert loaders.colours is not None
    assert loaders.train.parts.loader.dataset.load.__self__.leaves_colours
    team_module.colour_tables_on.cache_clear()


@pytest.mark.parametrize("hsv_v", [0.0, 0.1])
def test_loaders_send_views_where_the_device_renders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hsv_v: float
                                                     ) -> None:
    """With colours only if some change. The device gets its held images, and the tables if it needs them."""
    monkeypatch.setattr(team_module, "renders_on_device", lambda recipe, device: recipe.augment.render == "device")
    monkeypatch.setattr(team_module, "recolours_on_device", lambda recipe, device: recipe.augment.hsv_v > 0)
    monkeypatch.setattr(team_module, "find_spec", lambda name: name)
    monkeypatch.setattr(team_module, "colour_tables_on", lambda device: "tables")
    monkeypatch.setitem(sys.modules, "ray_yolo.ops.render_kernel", SimpleNamespace(rendered_input=print))
    context = WorkerContext()
    spec = make_spec(tmp_path, augment={"render": "device", "hsv_h": 0, "hsv_s": 0, "hsv_v": hsv_v})
    stores = image_stores(spec, context)
    loaders = make_loaders(spec, 32, context, Collectives(), stores)
    loaders.sampler.start(0)
    assert set(next(iter(loaders.train))) == {"views", "targets", "indices", *["colours"] * (hsv_v > 0)}
    assert loaders.rendered is not None
    assert loaders.rendered.args[0] is stores.held.pixels
    assert loaders.rendered.args[1] == ("tables" if hsv_v else None)
    assert loaders.colours is None
    host = make_loaders(make_spec(tmp_path), 32, context, Collectives(), stores)  # as after a change of settings
    host.sampler.start(0)
    assert "images" in next(iter(host.train))
    assert host.rendered is None


def test_rectangular_training_keeps_the_order_and_one_shape_in_each_microbatch(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, rect=True)
    loaders = loaders_of(spec)
    loaders.sampler.start(0)
    first = [key.image for part in loaders.sampler for key in part.keys]
    loaders.sampler.start(1)
    assert first == [key.image for part in loaders.sampler for key in part.keys]
    loaders.sampler.start(0)
    shapes = [tuple(batch["images"].shape[2:]) for batch in loaders.train]
    assert set(shapes) == {(64, 64)}  # 48 x 64 pictures on a grid of 32


def test_the_host_prepares_each_training_loader(tmp_path: Path) -> None:
    """As Ray Train does, at the start and after each regrouping. It keeps the package's sampler."""
    prepared: list[tuple[DataLoader, list[DataLoader]]] = []

    def prepare(loader: DataLoader) -> list[DataLoader]:
        prepared.append((loader, [loader]))
        return prepared[-1][1]

    spec, context = make_spec(tmp_path), WorkerContext(prepare_loader=prepare)
    teams = [build_training(spec, context).team for _ in range(2)]
    assert len(prepared) == 2
    for team, (loader, result) in zip(teams, prepared, strict=True):
        assert team.loaders.train.parts.loader is result
        assert loader.sampler is team.loaders.sampler
        assert isinstance(loader.sampler, DistributedSampler)


def test_batches_for_a_gpu_are_pinned_with_any_loader_processes(tmp_path: Path) -> None:
    index = make_index(tmp_path, 3)
    for processes, device in product((0, 2), ("cuda", "cpu")):
        context = WorkerContext(device=torch.device(device), loader_processes=processes)
        loader = val_loader(index, ImageStore(index, 64), 64, 32, 2, context, Collectives())
        assert loader.loader.pin_memory is (device == "cuda"), (processes, device)


def test_the_end_of_a_team_leaves_the_learner_alone(tmp_path: Path) -> None:
    """Whatever ended it. A use after the end is an error."""
    spec, context = make_spec(tmp_path), WorkerContext()
    learner, stores = build_learner(spec, context), image_stores(spec, context)
    for error in (None, KeyboardInterrupt):
        with suppress(KeyboardInterrupt), form_team(learner, context, Collectives(), stores) as team:
            assert team.network is learner.model
            if error:
                raise error
        for part in ("network", "gradients", "graphs", "criterion", "loaders"):
            with pytest.raises(AttributeError):
                getattr(team, part)
