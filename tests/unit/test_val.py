"""The val command hands a validated configuration to the validator, or prints what it would hand over."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from ray_yolo.cli import val as main
from ray_yolo.config.commands import ValConfig
from ray_yolo.core.errors import InputError


def decided(config: ValConfig) -> tuple[ValConfig]:
    return (config.model_copy(update={"imgsz": 320}),)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[ValConfig]:
    """What the validator was called with; a stand-in for the runtime, which needs torch."""
    seen: list[ValConfig] = []
    monkeypatch.setattr("ray_yolo.cli._refuse_missing", lambda **paths: None)  # there are no such files
    monkeypatch.setitem(sys.modules, "ray_yolo.runtime.validator",
                        SimpleNamespace(validate=seen.append, check=decided))
    return seen


def test_the_validator_gets_the_configuration(calls: list[ValConfig]) -> None:
    assert main(["--weights", "best.pt", "--imgsz", "320"]) == 0
    assert calls == [ValConfig(weights="best.pt", imgsz=320)]


def test_a_dry_run_prints_everything_and_validates_nothing(
        calls: list[ValConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--weights", "best.pt", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("weights: best.pt                          # --weights\n")
    assert "\nimgsz: 320                                # default; decided at the start\n" in output
    assert calls == []


@pytest.mark.parametrize("argv", [[], ["--weights", "w.pt", "--imgsz", "100"], ["--weights", "w.pt", "--hyp", "no"]])
def test_bad_input_never_reaches_the_validator(calls: list[ValConfig], argv: list[str]) -> None:
    with pytest.raises(InputError):
        main(argv)
    assert calls == []
