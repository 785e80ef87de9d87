"""The export command hands a validated configuration to the exporter and prints its result."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from ray_yolo.cli import export as main
from ray_yolo.config.commands import ExportConfig
from ray_yolo.core.errors import InputError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[ExportConfig]:
    """What the exporter was called with; a stand-in for the engine, which needs torch."""
    seen: list[ExportConfig] = []

    def export(config: ExportConfig) -> str:
        seen.append(config)
        return "the result"

    def check(config: ExportConfig) -> tuple[ExportConfig]:
        return (config.model_copy(update={"imgsz": 320}),)

    monkeypatch.setattr("ray_yolo.cli._refuse_missing", lambda **paths: None)  # there are no such files
    monkeypatch.setitem(sys.modules, "ray_yolo.inference.export", SimpleNamespace(export=export, check=check))
    return seen


def test_the_exporter_gets_the_configuration_and_its_result_is_printed(
        calls: list[ExportConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--weights", "best.pt", "--format", "torchscript", "--batch-size", "4"]) == 0
    assert calls == [ExportConfig(weights="best.pt", format="torchscript", batch_size=4)]
    assert capsys.readouterr().out == "the result\n"


def test_a_dry_run_prints_everything_and_exports_nothing(
        calls: list[ExportConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--weights", "best.pt", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "\nformat: onnx                              # default\n" in output
    assert "\nimgsz: 320                                # default; decided at the start\n" in output
    assert calls == []


@pytest.mark.parametrize("argv", ["", "--weights w.pt --format engine", "--weights w.pt --opset 9"])
def test_bad_input_never_reaches_the_exporter(calls: list[ExportConfig], argv: str) -> None:
    with pytest.raises(InputError):
        main(argv.split())
    assert calls == []
