"""The optimiser of a recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ray_yolo.config.sections import OptimizerConfig
from ray_yolo.engine.build import WorkerContext, build, rebuild
from ray_yolo.engine.loop import set_rates
from ray_yolo.ops.schedule import Rates
from tests.support.jobs import make_spec


def test_parameter_groups_are_biases_decayed_weights_and_norms(tmp_path: Path) -> None:
    components = build(make_spec(tmp_path, optimizer={"nominal_batch": 64}), WorkerContext())
    biases, weights, norms = components.optimizer.param_groups
    names = {id(parameter): name for name, parameter in components.model.named_parameters()}
    assert all(names[id(p)].endswith("bias") for p in biases["params"])
    assert all(p.dim() == 4 for p in weights["params"])
    assert all("bn.weight" in names[id(p)] for p in norms["params"])
    assert sum(len(group["params"]) for group in components.optimizer.param_groups) == len(names)
    assert [group["weight_decay"] for group in (biases, norms)] == [0, 0]
    assert weights["weight_decay"] == pytest.approx(0.0005)  # 16 images x 4 batches of nominal 64


def test_weight_decay_is_scaled_to_the_images_of_a_step(tmp_path: Path) -> None:
    for batch, decay in ((16, 5e-4), (48, 5e-4 * 48 / 64), (128, 1e-3), (24, 5e-4 * 72 / 64)):
        spec = make_spec(tmp_path / str(batch), batch_size=batch, microbatch=None, optimizer={"nominal_batch": 64})
        assert build(spec, WorkerContext()).optimizer.param_groups[1]["weight_decay"] == pytest.approx(decay), batch


def test_the_backbone_may_have_rates_of_its_own_and_the_order_of_parameters_stays(tmp_path: Path) -> None:
    """Checkpoints number the parameters, so a change of the rate in the middle of a training keeps its state."""
    spec = replace(make_spec(tmp_path, model="yolov5n"), architecture=None)
    common = build(spec, WorkerContext())
    slower = rebuild(common, spec.recipe.model_copy(update={"optimizer": OptimizerConfig(backbone_lr=0.25)}))
    order = [[id(p) for group in one.optimizer.param_groups for p in group["params"]] for one in (common, slower)]
    assert order[0] == order[1]
    names = {id(parameter): name for name, parameter in common.model.named_parameters()}
    for components, factor in ((common, 1.0), (slower, 0.25)):
        set_rates(components.optimizer, Rates((0.4, 0.2, 0.1), 0.9))
        for group in components.optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                rate = 0.1
                if name.endswith("bias"):
                    rate = 0.4
                elif parameter.dim() == 4:
                    rate = 0.2
                in_backbone = int(name.split(".")[1]) < 11  # YOLOv5's layer 11 is its first upsampling layer
                assert group["lr"] == pytest.approx(rate * (factor if in_backbone else 1)), name


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_takes_momentum_as_its_first_beta(tmp_path: Path, name: str) -> None:
    components = build(make_spec(tmp_path, optimizer={"name": name, "momentum": 0.9}), WorkerContext())
    assert [group["betas"] for group in components.optimizer.param_groups] == [(0.9, 0.999)] * 3
    assert [group["weight_decay"] > 0 for group in components.optimizer.param_groups] == [False, True, False]
