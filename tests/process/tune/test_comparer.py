"""Comparisons from the command to the claim: what is made, what continues, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ray_yolo
from ray_yolo import cli
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.settings import config_fields
from ray_yolo.config.yaml import to_yaml
from ray_yolo.core.errors import ConfigError, DatasetError, InputError, TrainingError
from ray_yolo.core.events import StepEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events, read_lines
from ray_yolo.tune import comparer, identity, runner
from ray_yolo.tune.compare_settings import CompareConfig
from ray_yolo.tune.comparer import ComparisonResult, compare
from ray_yolo.tune.ledger import read_ledger
from ray_yolo.tune.schedule import Outcome
from ray_yolo.tune.sides import read_sides
from ray_yolo.tune.verification import compare as compare_lines
from tests.support.jobs import make_config, make_dataset
from tests.support.run_log import only
from tests.support.sweeps import assert_cpus_return, tracked_runs

RECIPE = {"epochs": 2, "noval": False, "batch_size": 8, "exact": True,
          "optimizer": {"name": "AdamW", "lr0": 0.01, "nominal_batch": 8}, "augment": {"mosaic": 0.0, "scale": 0.1},
          "schedule": {"warmup_epochs": 0, "ema_ramp": 10}}


def make_comparison(folder: Path, *, workers: int = 0, placement: dict[str, Any] | None = None,
                    recipe: dict[str, Any] | None = None, **comparison: Any) -> CompareConfig:
    """A comparison of the tiny model at two learning rates."""
    base = make_config(folder, 0, **{**RECIPE, **(recipe or {})})
    return CompareConfig.model_validate({
        "comparison": {"a": "base", "b": "lr0=0.002", "pairs": 4, "workers_per_training": workers, **comparison},
        "recipe": base.recipe.model_dump(),
        "placement": {**base.placement.model_dump(), "num_workers": workers, "project": "runs/compare",
                      **(placement or {})}})


def run(config: CompareConfig) -> ComparisonResult:
    return compare(config, read_sides(config, dict.fromkeys(config_fields(CompareConfig), "config")), quiet=True)


def difference(one: Path, other: Path) -> str | None:
    """The first line in which two ledgers differ, or None."""
    return compare_lines(read_ledger(one / "ledger.jsonl"), read_ledger(other / "ledger.jsonl"))


class NoRecords:
    """Takes the place of the process that makes records, which takes seconds to start."""

    def __init__(self, *arguments: object, own_session: bool) -> None:
        self.ended = False

    def keep_running(self) -> None:
        assert not self.ended

    def finish(self, limit: float) -> None:
        self.ended = True

    def describe_rest(self) -> str:
        return ""


class StandIn:
    """Takes the place of trainings: fitness follows from learning rate and seed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gain: float = 0.1) -> None:
        self.gain, self.trained = gain, list[str]()
        self.faults: dict[str, Any] = {}  # by folder name: an exception to raise, or an outcome
        monkeypatch.setattr(runner, "train_to_outcome", lambda config, until, train: (self(config, until), True))
        monkeypatch.setattr(runner, "RecordProcess", NoRecords)

    def __call__(self, config: RunConfig, until: int) -> Outcome:
        name = config.placement.name
        fault = self.faults.pop(name, None)
        if isinstance(fault, BaseException):
            raise fault
        self.trained.append(name)
        if fault:
            return fault
        is_b = config.recipe.optimizer.lr0 == 0.002
        noise = np.random.default_rng([config.recipe.seed, is_b]).standard_normal()
        fitness = 0.4 + 0.01 * noise + (self.gain if is_b else 0.0)
        return Outcome(fitness=fitness, metrics={"mAP50": fitness}, weights=f"{config.recipe.seed}-{is_b}")


def test_a_better_side_is_claimed_and_all_files_say_so(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    trainings = StandIn(monkeypatch)
    result = run(make_comparison(tmp_path, pairs=9))
    assert (result.claim.better, result.claim.pairs) == ("B", 4)
    assert trainings.trained == [f"pair{pair}-{side}" for pair in (1, 2, 3, 4) for side in "ab"]
    page = (result.folder / "report.html").read_text()
    assert str(result.claim) in page
    assert page.count("<img ") == 2
    assert (result.folder / "finished").exists()
    assert cli.status([str(result.folder)]) == cli.verify([str(result.folder)]) == 0
    assert cli.list_runs([str(tmp_path / "runs/compare")]) == 0
    said = capsys.readouterr().out
    assert f"{result.claim}\noptimizer.lr0: 0.01 in A, 0.002 in B\n" in said
    assert "comparison, finished  4 pairs  B is better" in said


def test_the_result_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                               ) -> None:
    StandIn(monkeypatch, gain=-0.1)
    config = make_comparison(tmp_path)
    compare(config, read_sides(config, dict.fromkeys(config_fields(CompareConfig), "config")))
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "optimizer.lr0: 0.01 in A, 0.002 in B"
    assert lines[3].startswith("pair 1, A: fitness 0.")
    assert lines[-2].startswith("A is better by 0.0")
    assert lines[-1] == f"page: {tmp_path}/runs/compare/exp/report.html"


def test_an_interrupted_comparison_continues_to_the_same_claim(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    trainings = StandIn(monkeypatch, gain=0.015)
    expected = run(make_comparison(whole, pairs=5))
    trainings.trained.clear()
    for name in ("pair1-b", "pair3-a"):
        trainings.faults[name] = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            run(make_comparison(stopped, pairs=5))
    result = run(make_comparison(stopped, pairs=5))
    assert result.claim == expected.claim
    assert difference(result.folder, expected.folder) is None
    assert len(set(trainings.trained)) == len(trainings.trained) == 2 * expected.claim.pairs


def test_a_finished_comparison_goes_on_where_more_pairs_are_asked_for(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainings = StandIn(monkeypatch, gain=0.0)
    named = {"placement": {"name": "mine"}}
    assert run(make_comparison(tmp_path, **named)).claim.pairs == 4
    with pytest.raises(InputError, match="mine is finished"):
        run(make_comparison(tmp_path, **named))
    result = run(make_comparison(tmp_path, **named, pairs=5))
    assert (result.claim.pairs, trainings.trained[8:]) == (5, ["pair5-a", "pair5-b"])
    lines = read_lines(result.folder / "ledger.jsonl")
    claims = [line["claim"]["pairs"] for line in lines if line["type"] == "claimed"]
    assert claims == [4, 5]
    with pytest.raises(InputError, match="mine is a run of another recipe or data set"):
        run(make_comparison(tmp_path, **named, pairs=6, b="lr0=0.003"))


def test_without_time_no_pair_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainings = StandIn(monkeypatch)
    assert run(make_comparison(tmp_path, hours=1e-9)).claim.pairs == 0
    assert trainings.trained == []


def test_a_training_that_diverges_counts_and_one_that_fails_ends_the_command(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainings = StandIn(monkeypatch)
    trainings.faults = {"pair1-b": Outcome(reason="step 3", diverged=True),
                        "pair2-a": OSError("no space left")}
    with pytest.raises(TrainingError, match="pair2-a: OSError: no space left; the same command continues"):
        run(make_comparison(tmp_path))
    assert not (tmp_path / "runs/compare/exp/finished").exists()
    result = run(make_comparison(tmp_path))
    assert result.claim.failed == (0, 1)
    assert str(result.claim).endswith("1 training of B diverged, counted with a fitness of 0")


def test_a_comparison_killed_after_its_claim_has_one_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(comparer.Comparison, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(make_comparison(tmp_path))
    folder = tmp_path / "runs/compare/exp"
    assert [line["type"] for line in read_lines(folder / "ledger.jsonl")].count("claimed") == 1
    assert not (folder / "finished").exists()
    run(make_comparison(tmp_path))
    assert [line["type"] for line in read_lines(folder / "ledger.jsonl")].count("claimed") == 1
    assert (folder / "finished").exists()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("library", ["torch", "ray_yolo"])
def test_another_version_cannot_continue_a_comparison(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    trainings = StandIn(monkeypatch)
    trainings.faults["pair2-a"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(make_comparison(tmp_path))
    if library == "torch":
        monkeypatch.setattr(identity, "version", lambda name: "9.9")
    else:
        monkeypatch.setattr(ray_yolo, "__version__", "9.9", raising=False)
    with pytest.raises(InputError, match=f"started with another {library}; give the original one to continue it"):
        run(make_comparison(tmp_path))


@pytest.mark.parametrize(("b", "reason"), [
    ("base", "their settings are equal"),
    ("mixup=0.5", "augment.mixup: 0.0 in A, 0.5 in B; .*B: no effect: augment.mixup .no sample is a mosaic"),
    ("strict=true", "strict: False in A, True in B"),
])
def test_sides_that_train_equal_weights_are_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, b: str, reason: str) -> None:
    StandIn(monkeypatch)
    config = make_comparison(tmp_path, b=b)
    sides = read_sides(config, dict.fromkeys(config_fields(CompareConfig), "config"))
    with pytest.raises(ConfigError, match=f"A and B train the same weights.*: {reason}"):
        comparer.dry_run(config, sides)
    assert not (tmp_path / "runs").exists()


def test_another_data_set_of_a_side_is_refused_when_it_continues(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainings = StandIn(monkeypatch)
    trainings.faults["pair2-a"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(make_comparison(tmp_path))
    config = make_comparison(tmp_path)
    (tmp_path / "data/labels/train/000.txt").write_text("0 0.5 0.5 0.25 0.25\n")
    with pytest.raises(InputError, match="another data set of A and another data set of B; give the original one"):
        run(config)


def test_sides_on_other_data_are_compared_on_one_validation_set_only(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainings = StandIn(monkeypatch)
    make_dataset(tmp_path / "grown", num_images=41)
    assert run(make_comparison(tmp_path, b=str(tmp_path / "grown"))).claim.pairs == 4
    (tmp_path / "grown/labels/val/000.txt").write_text("0 0.5 0.5 0.25 0.25\n")
    trainings.trained.clear()
    with pytest.raises(DatasetError, match=r"the validation sets of A \(.*data.yaml: 11 images, \d+ labels\) and B"):
        run(make_comparison(tmp_path, b=str(tmp_path / "grown"), placement={"name": "other"}))
    assert trainings.trained == []
    assert not (tmp_path / "runs/compare/other").exists()


@pytest.mark.parametrize(("settings", "message"), [
    ({"placement": {"resume": "auto"}}, "resume: a comparison continues by its own command"),
    ({"placement": {"registered_name": "best"}}, "registered_name: a comparison registers no model"),
    ({"placement": {"num_workers": 2}}, "num_workers: each training of a comparison has .*, 0; leave"),
    ({"placement": {"storage_path": "s3://bucket/x"}}, "storage_path: a comparison is kept in a folder"),
    ({"b": "batch_size=7", "set_b": "microbatch=4"}, "microbatch 4 does not divide batch_size 7"),
    ({"b": "weights=none.pt"}, "none.pt: no such weights file"),
    ({"b": "freeze=99"}, "freeze"),
])
def test_what_cannot_be_trained_is_refused_before_anything_is_made(
        tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(make_comparison(tmp_path, **settings))
    assert not (tmp_path / "runs").exists()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_trainings_that_can_never_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="workers_per_training: 8 workers need 80 CPU"):
        run(make_comparison(tmp_path, workers=8, recipe={"batch_size": 32}, placement={"cpus_per_worker": 10}))
    assert not (tmp_path / "runs/compare").exists()


def start(folder: Path, config: CompareConfig, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the command of a comparison in a process of its own."""
    (folder / "config.yaml").write_text(to_yaml({
        "recipe": config.recipe.model_dump(mode="json"),
        "placement": {"storage_path": str(folder), "noplots": True, "mlflow_uri": config.placement.mlflow_uri,
                      "cpus_per_worker": 1}}))
    argv = [sys.executable, "-m", "ray_yolo.compare", "base", "lr0=0.002", "--config", str(folder / "config.yaml"),
            "--pairs", "4", "--workers-per-training", str(config.comparison.workers_per_training)]
    return subprocess.Popen(argv, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def kill_in(process: subprocess.Popen[bytes], log: Path, steps: int) -> None:
    """kill -9 of a command once a training has done so many steps."""
    while len(only(StepEvent, read_events(log))) < steps:
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def expect_end(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors.decode()


@pytest.mark.timeout(400)
def test_a_killed_comparison_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    expected = run(make_comparison(whole))
    config, folder = make_comparison(killed), killed / "runs/compare/exp"
    for name, steps in (("pair1-b", 3), ("pair2-a", 7)):
        kill_in(start(killed, config, {}), folder / "trials" / name / EVENTS_FILE, steps)
    expect_end(start(killed, config, {}))
    assert difference(folder, expected.folder) is None  # with the digests of all weights
    assert cli.verify([str(folder)]) == 0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("ray_session")
def test_a_comparison_on_the_pool_that_was_killed_equals_one_in_a_single_process(tmp_path: Path) -> None:
    import ray

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    expected = run(make_comparison(whole))
    config = make_comparison(killed, workers=1, placement={"mlflow_uri": f"sqlite:///{killed}/mlflow.db"})
    folder, environment = killed / "runs/compare/exp", {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    kill_in(start(killed, config, environment), folder / "trials/pair1-b" / EVENTS_FILE, 3)
    expect_end(start(killed, config, environment))
    assert difference(folder, expected.folder) is None
    runs = tracked_runs(killed)
    [parent] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert parent.data.tags["ray_yolo.claim"] == str(expected.claim)
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    pairs = range(1, expected.claim.pairs + 1)
    assert {run.info.run_name for run in children} == {f"pair{pair}-{side}" for pair in pairs for side in "ab"}
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert_cpus_return()
