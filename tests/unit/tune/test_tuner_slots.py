"""How many trials there is room for, and where their search starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ray_yolo.cli import parse_tune
from ray_yolo.core.errors import ConfigError
from ray_yolo.models.families import build_model
from ray_yolo.runtime import cluster
from ray_yolo.tune import tuner as module
from ray_yolo.tune.search import SweepConfig
from ray_yolo.tune.tuner import concurrent_trials, pool_range, room_for_trials, trials_ahead
from tests.support.sweeps import make_sweep


@pytest.mark.parametrize(("there", "gpus", "limit", "room"), [
    ({"CPU": 8.0}, 0.0, "auto", 4), ({"CPU": 7.9}, 0.0, "auto", 3), ({"CPU": 8.0}, 0.0, 3, 3),
    ({"CPU": 64.0, "GPU": 3.0}, 0.5, "auto", 3), ({"CPU": 1.0}, 0.0, "auto", 0), ({"CPU": 8.0}, 1.0, "auto", 0),
])
def test_trials_have_room_for_all_their_workers_or_none(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: dict[str, float], gpus: float, limit: object,
        room: int) -> None:
    config = make_sweep(tmp_path, workers_per_trial=2, max_concurrent=limit)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: there)
    assert room_for_trials(config, gpus) == room
    if room:
        assert concurrent_trials(config, gpus) == room
    else:
        with pytest.raises(ConfigError):
            concurrent_trials(config, gpus)


@pytest.mark.parametrize(("gpus", "limit", "line"), [
    ("0", "auto", "slots: 96 trials at a time"), ("1", "auto", "slots: 8 trials at a time"),
    ("1", "3", "slots: 3 trials at a time"), ("0.5", "auto", "slots: 16 trials at a time"),
    ("auto", "auto", "slots: 8 trials at a time")])
def test_without_a_cluster_a_plan_is_that_of_this_machine(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, limit: str, line: str) -> None:
    monkeypatch.setattr(cluster, "cores", lambda: 96)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = ["--data", "shapes8", "--model", "yolov5n", "--epochs", "2", "--space", "quick", "--trials", "9",
             "--storage-path", str(tmp_path), "--gpus-per-worker", gpus, "--max-concurrent", limit]
    notes = module.dry_run(parse_tune(words).config).notes
    assert any(note.startswith(line) for note in notes), notes


@pytest.mark.parametrize(("min_slots", "per_trial", "slots", "expected"), [
    (1, 1, 4, (1, 4)), (1, 2, 4, (1, 8)), (2, 1, 4, (2, 4)), (2, 2, 4, (4, 8)), (8, 2, 4, (8, 8))])
def test_a_sweep_keeps_the_workers_of_so_many_trials(
        min_slots: int, per_trial: int, slots: int, expected: tuple[int, int]) -> None:
    sweep = SweepConfig(min_slots=min_slots, workers_per_trial=per_trial)
    assert pool_range(sweep, slots) == expected


def test_few_trials_get_ready_while_others_train() -> None:
    for slots, ahead in ((1, 1), (2, 2), (4, 2), (64, 8)):
        assert trials_ahead(slots) == ahead, slots


def test_a_sweep_of_short_trainings_from_weights_starts_from_their_learning_rate(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(build_model("yolov5n", 3).state_dict(), weights)
    words = ["--data", "shapes8", "--model", "yolov5n", "--epochs", "2", "--space", "quick", "--trials", "1",
             "--storage-path", str(tmp_path)]
    start = ["--weights", str(weights)]
    for more, rate in (start, 0.001429), ([*start, "--set", "lr0=0.02"], 0.02), ([], 0.01):
        _, space, *_ = module._checked(parse_tune([*words, *more]).config)
        assert space.space.starts[0]["lr0"] == pytest.approx(rate), more
