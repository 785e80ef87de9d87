"""The train command hands a validated configuration to the trainer, or prints what it would hand over."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

import ray_yolo.runtime
from ray_yolo.cli import parse_train
from ray_yolo.cli import train as main
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import resolve
from ray_yolo.config.settings import config_fields, describe
from ray_yolo.core.errors import InputError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """What the trainer was called with; a stand-in for the runtime, which needs Ray."""
    seen: list[RunConfig] = []

    def fit(config: RunConfig, origins: Mapping[str, str]) -> None:
        assert set(origins) == set(config_fields(RunConfig))
        seen.append(config)

    stand_ins = {
        "trainer": SimpleNamespace(fit=fit, dry_run=lambda config: SimpleNamespace(
            config=config.model_copy(update={"recipe": resolve(config.recipe, 2, gpu=False)}), notes=("a note",))),
    }
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, f"ray_yolo.runtime.{name}", module)
        monkeypatch.setattr(ray_yolo.runtime, name, module, raising=False)
    return seen


def test_the_trainer_gets_the_configuration(calls: list[RunConfig]) -> None:
    assert main(["--epochs", "3", "--num-workers", "2"]) == 0
    (config,) = calls
    assert (config.recipe.epochs, config.placement.num_workers) == (3, 2)


def test_a_dry_run_prints_everything_and_trains_nothing(
        calls: list[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--dry-run", "--epochs", "3", "--num-workers", "2"]
    assert main(argv) == 0
    config, origins, *_ = parse_train(argv)
    decided = config.model_copy(update={"recipe": resolve(config.recipe, 2, gpu=False)})
    output = capsys.readouterr().out
    assert output == (f"{describe(config, origins, decided)}\n# batch 32, microbatch 16, accumulation 2 (64 images per "
                    "step), precision fp32, learning rate 0.01 (SGD)\n# Ray: 2 workers of Ray Train, placed by PACK; "
                    "each has its share of a node's CPUs, 0 GPU\n# a note\n")
    assert "\nbatch_size: 32                            # default; decided at the start\n" in output
    assert calls == []


def test_a_bad_value_never_reaches_the_trainer(calls: list[RunConfig]) -> None:
    with pytest.raises(InputError):
        main(["--epochs", "0"])
    assert calls == []
