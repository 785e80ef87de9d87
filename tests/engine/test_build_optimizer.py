"""The optimiser of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.engine.build import WorkerContext, build
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


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_takes_momentum_as_its_first_beta(tmp_path: Path, name: str) -> None:
    components = build(make_spec(tmp_path, optimizer={"name": name, "momentum": 0.9}), WorkerContext())
    assert [group["betas"] for group in components.optimizer.param_groups] == [(0.9, 0.999)] * 3
    assert [group["weight_decay"] > 0 for group in components.optimizer.param_groups] == [False, True, False]
