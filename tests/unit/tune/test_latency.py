"""The time for an image: which networks a space has, how long they take, and what is worth its time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import ConfigError
from ray_yolo.inference.predictor import Trained
from ray_yolo.tune import latency, tuner
from ray_yolo.tune.evolution import Gene, Space
from ray_yolo.tune.latency import Latency, SizedModel, measure, networks, pareto
from ray_yolo.tune.trials import Trial
from ray_yolo.tune.tuner import search
from tests.support.sweeps import SPACE, make_sweep

RECIPE = Recipe(model="yolov5n", imgsz=64)
MODELS, SIZES = Gene("model", "choice", values=("yolov5n", "yolov8n")), Gene("imgsz", "choice", values=(64, 96, 128))


def test_a_network_is_a_model_and_an_image_size() -> None:
    others = Gene("lr0", low=0.001, high=0.1)
    found = networks(Space((MODELS, others, SIZES), ()), RECIPE)
    assert found["yolov8n at 96 px"] == SizedModel("yolov8n", 96)
    assert len(found) == 6
    assert list(networks(Space((others,), ()), RECIPE)) == ["yolov5n at 64 px"]


def test_too_many_networks_to_measure_are_refused() -> None:
    sizes = Gene("imgsz", "choice", values=tuple(range(64, 32 * 53, 32)))
    with pytest.raises(ConfigError):
        networks(Space((MODELS, sizes), ()), RECIPE)


def test_latency_is_the_median_after_some_images_to_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(trained: Trained, *_: Any) -> SimpleNamespace:
        seconds = iter([1000.0] * 5 + [float(number) for number in range(25)])
        speed = ({"preprocess": 500.0, "inference": each, "postprocess": trained.recipe.imgsz} for each in seconds)
        return SimpleNamespace(detect=lambda images: [SimpleNamespace(speed=next(speed))])

    monkeypatch.setattr(latency, "build_predictor", build)
    models = {"a": SizedModel("yolov5n", 64), "b": SizedModel("yolov5n", 96)}
    assert measure((3, 0.0), models) == {"a": 12 + 64, "b": 12 + 96}


def test_real_networks_are_measured() -> None:
    found = measure((3, 0.0), {"anchors": SizedModel("yolov5n", 64), "none": SizedModel("yolov8n", 64)})
    assert all(0 < each < 10_000 for each in found.values())


def trial(number: int, size: int, fitness: float | None, epochs: int = 9) -> Trial:
    return replace(Trial(number, {"imgsz": size}), fitness=fitness, epochs=epochs)


@given(st.lists(st.tuples(st.sampled_from((64, 96, 128)), st.integers(0, 5), st.sampled_from((3, 9))), max_size=12))
def test_a_trial_is_in_the_table_if_none_as_fast_is_as_good(rows: list[tuple[int, int, int]]) -> None:
    """The slow obvious way: compare each trial with each other one."""
    times = {f"yolov5n at {size} px": float(size) for size in (64, 96, 128)}
    trials = [trial(number, size, fitness / 5, epochs) for number, (size, fitness, epochs) in enumerate(rows)]
    whole = [(number, size, fitness) for number, (size, fitness, epochs) in enumerate(rows) if epochs == 9]
    expected = {number for number, size, fitness in whole if not any(
        (size, -fitness, number) > (other, -better, rival) and other <= size and better >= fitness
        for rival, other, better in whole)}
    front = pareto(trials, RECIPE, times, 9)
    assert {row.trial for row in front} == expected
    assert front == sorted(front)


def test_failed_trials_and_those_of_other_lengths_are_not_in_the_table() -> None:
    times = {"yolov5n at 64 px": 2.0, "yolov5n at 96 px": 3.0}
    assert pareto([trial(0, 64, 0.5), trial(1, 96, None), trial(2, 96, 0.9, epochs=3)], RECIPE, times, 9) == [
        Latency(2.0, 0.5, 0, "yolov5n at 64 px")]


def test_where_every_network_is_over_the_limit_the_start_is_refused_and_leaves_nothing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner.cluster, "connect", lambda placement: 0.0)
    monkeypatch.setattr(tuner, "concurrent_trials", lambda config, gpus: 1)
    monkeypatch.setattr(tuner, "check_cluster", lambda *given: [])
    monkeypatch.setattr(tuner, "map_on_workers", lambda *given, **also: [(0, {"a": 31.0, "b": 52.0})])
    with pytest.raises(ConfigError):
        search(make_sweep(tmp_path, f"search: {{limit: {{latency_ms: 20}}}}\n{SPACE}"), quiet=True)
    assert not (tmp_path / "runs").exists()
