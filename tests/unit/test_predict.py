"""The predict command hands a validated configuration to the predictor, or prints what it would hand over."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import ray_yolo.runtime
from ray_yolo.cli import predict as main
from ray_yolo.config.commands import PredictConfig
from ray_yolo.core.errors import InputError


def decided(config: PredictConfig) -> tuple[PredictConfig]:
    return (config.model_copy(update={"imgsz": 320}),)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[PredictConfig]:
    """What the predictor was called with; a stand-in for the runtime, which needs torch."""
    seen: list[PredictConfig] = []
    module = SimpleNamespace(predict=seen.append, check=decided)
    monkeypatch.setattr("ray_yolo.cli._refuse_missing", lambda **paths: None)  # there are no such files
    monkeypatch.setitem(sys.modules, "ray_yolo.runtime.predictor", module)
    monkeypatch.setattr(ray_yolo.runtime, "predictor", module, raising=False)
    return seen


def test_the_predictor_gets_the_configuration(calls: list[PredictConfig]) -> None:
    assert main(["--weights", "best.pt", "--source", "pictures", "--classes", "1"]) == 0
    assert calls == [PredictConfig(weights="best.pt", source="pictures", classes=(1,))]


def test_a_dry_run_prints_everything_and_predicts_nothing(
        calls: list[PredictConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--weights", "best.pt", "--source", "pictures", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "\nsource: pictures                          # --source\n" in output
    assert "\nimgsz: 320                                # default; decided at the start\n" in output
    assert calls == []


@pytest.mark.parametrize("argv", ["", "--weights w.pt", "--weights w.pt --source s --conf-thres 1"])
def test_bad_input_never_reaches_the_predictor(calls: list[PredictConfig], argv: str) -> None:
    with pytest.raises(InputError):
        main(argv.split())
    assert calls == []
