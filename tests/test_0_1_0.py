"""What 0.1.0 began goes on with this version: its runs, its sweeps, its checkpoints (`fixtures/0.1.0/README.md`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ray_yolo.cli import parse_train, parse_tune
from ray_yolo.events import StartEvent, StepEvent
from ray_yolo.runtime.preflight import read_dataset
from ray_yolo.runtime.trainer import fit
from ray_yolo.tune.ledger import Ledger, Sweep, read_ledger, read_trials, verify
from ray_yolo.tune.ledger_lines import Failed
from ray_yolo.tune.search import TuneConfig
from ray_yolo.tune.space import load_space
from ray_yolo.tune.tuner import search
from tests.support import run_log
from tests.support.sweeps import assert_cpus_return

LEFT = Path(__file__).parent / "fixtures" / "0.1.0"
SAME = ["--data", "shapes8", "--imgsz", "64", "--batch-size", "4", "--set", "optimizer.nominal_batch=4",
        "--set", "schedule.warmup_epochs=0", "--noplots", "--mlflow-uri", "off", "--keep-checkpoints", "1"]
TRAIN = [*SAME, "--model", "tiny.yaml", "--epochs", "4", "--num-workers", "0", "--save-steps", "1"]
TUNE = [*SAME, "--model", "yolov5n", "--epochs", "2", "--space", "space.yaml", "--trials", "2", "--max-concurrent", "1"]


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what 0.1.0 left, as the current folder."""
    shutil.copytree(LEFT, tmp_path / "left")
    monkeypatch.chdir(tmp_path / "left")
    return tmp_path / "left"


def sweep_of(config: TuneConfig) -> Sweep:
    space = load_space(config.sweep.space, config.recipe)
    return Sweep(space.space, space.search, config.recipe, read_dataset(config.recipe)[1].digest)


def test_a_training_is_found_by_its_command_and_goes_on_to_its_end(storage: Path) -> None:
    record = (storage / "runs" / "train" / "exp" / "run.json").read_text()
    result = fit(parse_train(TRAIN).config, quiet=True)
    assert result.run_dir == storage / "runs" / "train" / "exp"
    assert [path.name for path in result.run_dir.parent.iterdir()] == ["exp"]
    assert [event.step for event in run_log.told(result.run_dir, StartEvent)] == [0, 5]
    assert [event.step for event in run_log.told(result.run_dir, StepEvent)] == list(range(1, 9))
    assert (result.run_dir / "run.json").read_text() == record
    manifest = json.loads((result.run_dir / "weights" / "last.json").read_text())
    assert (manifest["step"], manifest["recipe_digest"]) == (8, json.loads(record)["digest"])


def test_a_ledger_holds_true_and_goes_on_with_its_own_sweep(storage: Path) -> None:
    path, config = storage / "runs" / "evolve" / "exp" / "ledger.jsonl", parse_tune(TUNE).config
    before = read_ledger(path)
    assert verify(before) == []
    ledger = Ledger(path, sweep_of(config), config.recipe)
    assert [trial.number for trial in ledger.to_run] == [1]
    ledger.append(Failed(trial=1, reason="as an example"))
    assert ledger.propose().number == 2
    ledger.close()
    after = read_ledger(path)
    assert after[:len(before)] == before
    assert verify(after) == []


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_sweep_is_found_by_its_command_and_its_trials_go_on(storage: Path) -> None:
    result = search(parse_tune(TUNE).config, quiet=True)
    assert result.folder == storage / "runs" / "evolve" / "exp"
    assert [(trial.state, trial.epochs) for trial in result.trials] == [("finished", 2)] * 2
    rows = read_trials(read_ledger(LEFT / "runs" / "evolve" / "exp" / "ledger.jsonl"))
    assert result.trials[0] == rows[0]
    for file in ("run.json", "events.jsonl"):  # the trial that had begun went on as it was
        begun = (LEFT / "runs" / "evolve" / "exp" / "trials" / "trial1" / file).read_bytes()
        assert (result.folder / "trials" / "trial1" / file).read_bytes().startswith(begun)
    assert_cpus_return()
