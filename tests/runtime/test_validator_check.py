"""Validations of trained weights: what is decided by the weights, and what is said when a worker fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_yolo.config.commands import ValConfig
from ray_yolo.config.fields import config_fields
from ray_yolo.errors import CheckpointError
from ray_yolo.runtime import cluster
from ray_yolo.runtime.validator import ValResult, validate
from tests.support.jobs import make_dataset
from tests.support.weights import make_weights


def run(folder: Path, **settings: Any) -> ValResult:
    """A validation of `folder`/run/weights/best.pt on the data set in `folder`."""
    return validate(ValConfig.model_validate({
        "weights": str(folder / "run" / "weights" / "best.pt"), "data": str(folder / "data" / "data.yaml"),
        "evaluate": {"batch_size": 2}, **settings,
        "placement": {"project": str(folder / "val"), **settings.get("placement", {})}}), quiet=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precision_left_out_is_that_of_the_training_as_help_says(tmp_path: Path, precision: str) -> None:
    make_weights(tmp_path, precision=precision)
    make_dataset(tmp_path / "data")
    found = {asked: run(tmp_path, precision=asked).losses for asked in ("auto", "fp32", "bf16")}
    assert found["auto"] == found[precision]
    assert found["fp32"] != found["bf16"]
    assert "auto: that of the training" in str(config_fields(ValConfig)["precision"].info.description)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_workers_error_is_told_as_it_is_and_the_numbers_do_not_depend_on_workers(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights(tmp_path)
    make_dataset(tmp_path / "data")
    there = {"num_workers": 2, "gpus_per_worker": 0}
    alone, shared = run(tmp_path), run(tmp_path, placement=there)
    assert (shared.metrics, shared.losses, shared.per_class) == (alone.metrics, alone.losses, alone.per_class)
    monkeypatch.setattr(cluster, "wait_for_room", lambda *_: weights.unlink())
    with pytest.raises(CheckpointError, match=r"best\.pt: no such weights file"):
        run(tmp_path, placement=there)
