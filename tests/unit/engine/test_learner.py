"""What is built from a recipe to train it: network, optimiser, switches of torch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ray_yolo.config.sections import OptimizerConfig
from ray_yolo.core.errors import CheckpointError
from ray_yolo.engine.learner import build_learner, build_network
from ray_yolo.engine.loop import set_rates
from ray_yolo.engine.spec import WorkerContext
from ray_yolo.ops.schedule import Rates
from tests.support.jobs import make_spec

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
    learner = build_learner(make_spec(tmp_path, freeze=2), WorkerContext())
    trained = {id(p) for group in learner.optimizer.param_groups for p in group["params"]}
    frozen = [name for name, p in learner.model.named_parameters() if id(p) not in trained]
    assert frozen
    assert {name.split(".")[1] for name in frozen} == {"0", "1"}


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
        build_learner(make_spec(tmp_path, exact=exact), WorkerContext())
        assert os.environ.get(CUBLAS) == after
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("no_tf32", [False, True])
def test_convolutions_of_fp32_round_to_tf32_unless_no_tf32_is_given(tmp_path: Path, no_tf32: bool) -> None:
    """Also if the process has trained the other way before."""
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = no_tf32
        build_learner(make_spec(tmp_path, no_tf32=no_tf32), WorkerContext())
        assert torch.backends.cudnn.allow_tf32 is not no_tf32
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_initial_weights_are_taken_from_plain_tensors(tmp_path: Path) -> None:
    donor = build_network(make_spec(tmp_path, seed=7))
    torch.save(donor.state_dict(), tmp_path / "w.pt")
    model = build_network(make_spec(tmp_path, weights=str(tmp_path / "w.pt")))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), donor.state_dict().values(), strict=True))
    torch.save({"x": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError):
        build_network(make_spec(tmp_path, weights=str(tmp_path / "other.pt")))


def test_parameter_groups_are_biases_decayed_weights_and_norms(tmp_path: Path) -> None:
    learner = build_learner(make_spec(tmp_path, optimizer={"nominal_batch": 64}), WorkerContext())
    biases, weights, norms = learner.optimizer.param_groups
    names = {id(parameter): name for name, parameter in learner.model.named_parameters()}
    assert all(names[id(p)].endswith("bias") for p in biases["params"])
    assert all(p.dim() == 4 for p in weights["params"])
    assert all("bn.weight" in names[id(p)] for p in norms["params"])
    assert sum(len(group["params"]) for group in learner.optimizer.param_groups) == len(names)
    assert [group["weight_decay"] for group in (biases, norms)] == [0, 0]
    assert weights["weight_decay"] == pytest.approx(0.0005)  # 16 images x 4 batches of nominal 64


def test_weight_decay_is_scaled_to_the_images_of_a_step(tmp_path: Path) -> None:
    for batch, decay in ((16, 5e-4), (48, 5e-4 * 48 / 64), (128, 1e-3), (24, 5e-4 * 72 / 64)):
        spec = make_spec(tmp_path / str(batch), batch_size=batch, microbatch=None, optimizer={"nominal_batch": 64})
        _, weights, _ = build_learner(spec, WorkerContext()).optimizer.param_groups
        assert weights["weight_decay"] == pytest.approx(decay), batch


def test_the_backbone_may_have_rates_of_its_own_and_the_order_of_parameters_stays(tmp_path: Path) -> None:
    """Checkpoints number the parameters, so a change of the rate in the middle of a training keeps its state."""
    spec = replace(make_spec(tmp_path, model="yolov5n"), architecture=None)
    learner = build_learner(spec, WorkerContext())
    names = {id(parameter): name for name, parameter in learner.model.named_parameters()}
    orders = []
    for factor in (1.0, 0.25):
        learner.change_settings(spec.recipe.model_copy(update={"optimizer": OptimizerConfig(backbone_lr=factor)}))
        orders.append([id(p) for group in learner.optimizer.param_groups for p in group["params"]])
        set_rates(learner.optimizer, Rates((0.4, 0.2, 0.1), 0.9))
        for group in learner.optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                rate = 0.1
                if name.endswith("bias"):
                    rate = 0.4
                elif parameter.dim() == 4:
                    rate = 0.2
                in_backbone = int(name.split(".")[1]) < 11  # YOLOv5's layer 11 is its first upsampling layer
                assert group["lr"] == pytest.approx(rate * (factor if in_backbone else 1)), name
    assert orders[0] == orders[1]


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_takes_momentum_as_its_first_beta(tmp_path: Path, name: str) -> None:
    learner = build_learner(make_spec(tmp_path, optimizer={"name": name, "momentum": 0.9}), WorkerContext())
    assert [group["betas"] for group in learner.optimizer.param_groups] == [(0.9, 0.999)] * 3
    assert [group["weight_decay"] > 0 for group in learner.optimizer.param_groups] == [False, True, False]


def test_other_settings_keep_weights_and_the_state_of_the_optimiser(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    learner = build_learner(spec, WorkerContext())
    weights = [*learner.model.parameters()]
    moments = [learner.optimizer.state[weight]["momentum_buffer"].fill_(2.0) for weight in weights]
    criterion, gains = learner.criterion, spec.recipe.loss.model_copy(update={"box": 0.5})
    learner.change_settings(spec.recipe.model_copy(update={"loss": gains, "epochs": 7}))
    assert [*map(id, learner.model.parameters())] == [*map(id, weights)]
    for weight, moment in zip(weights, moments, strict=True):
        assert torch.equal(learner.optimizer.state[weight]["momentum_buffer"], moment)
    assert learner.criterion is not criterion
    assert learner.plan.recipe.epochs == 7
