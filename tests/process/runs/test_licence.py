"""The licence that a file of initial weights states: said at the start, and kept by what is trained from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ray_yolo.checkpoints.foreign import read_weights
from ray_yolo.core.events import RunEvent
from ray_yolo.runtime.trainer import fit
from ray_yolo.sinks.mlflow_plan import plan_run
from tests.support import run_log
from tests.support.jobs import make_config

pytestmark = pytest.mark.usefixtures("own_signal_handlers")

LICENCE = "AGPL-3.0 License (https://ultralytics.com/license)"


def test_a_stated_licence_is_carried_from_training_to_training(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scratch = fit(make_config(tmp_path, 0, epochs=1))
    assert "licence:" not in capsys.readouterr().out
    stated = tmp_path / "stated.pt"
    torch.save({"model": dict(read_weights(scratch.best).tensors), "license": LICENCE}, stated)
    weights = stated
    for name in ("first", "second"):
        result = fit(make_config(tmp_path, 0, {"name": name}, epochs=1, weights=str(weights)))
        assert f"licence: {weights} states '{LICENCE}'; its owner may hold" in " ".join(
            capsys.readouterr().out.split())
        assert json.loads((result.run_dir / "run.json").read_text())["weights_licence"] == LICENCE
        [event] = run_log.events_of(result.run_dir, RunEvent)
        assert plan_run([event]).tags["ray_yolo.weights_licence"] == LICENCE
        weights = result.best
    assert read_weights(weights).licence == LICENCE
