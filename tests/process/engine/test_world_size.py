"""A training gives the same result on any number of workers, and each guard is needed for that.

`make test-all` has a short training of a tiny model on up to three workers. The long ones, four workers and the real
models at YOLOv5's own learning rate have the mark `slow`:

    python -m pytest -m slow tests/process/engine/test_world_size.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ray_yolo.config.model_facts import MODELS as MODEL_FACTS
from ray_yolo.config.placement import Placement
from ray_yolo.core.events import Event, ShardEvent
from ray_yolo.data import dataset
from ray_yolo.engine import loop
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.gradients import GradientTree
from ray_yolo.engine.membership import Rendezvous
from ray_yolo.engine.session import Session
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.state import capture
from ray_yolo.ops.seeding import generator
from tests.support import run_log
from tests.support.jobs import make_spec
from tests.support.workers import run_workers, wrap_model

pytestmark = pytest.mark.timeout(900)  # the first use of a result trains it, in 2 to 4 processes
EPOCHS = 4  # of 3 steps each
LONG = {"epochs": 34}


class Scenario(NamedTuple):
    """A training and the guard that is removed from it."""

    spec: TrainSpec
    control: str = ""


def run_all(collectives: Collectives, scenarios: list[Scenario]) -> list[dict[str, Any]]:
    return [run_one(collectives, scenario) for scenario in scenarios]


def run_one(collectives: Collectives, scenario: Scenario) -> dict[str, Any]:
    """Final tensors, travelled distance and the images of each epoch, on one worker."""
    events: list[Event] = []
    context = WorkerContext(prepare_model=lambda model: wrap_model(model, collectives))
    with pytest.MonkeyPatch.context() as patch:
        break_something(scenario.control, collectives, patch)
        session = Session(scenario.spec, context, Placement(nosave=True), events.append, Rendezvous(collectives))
        learner, used = session.learner, list[list[int]]()
        # It would end the controls; the tests compare them.
        patch.setattr(session, "compare_weights", lambda team: None)
        started = halves(learner.model)
        with session.join() as team:
            patch.setattr(team.loaders.sampler, "start", recording(team.loaders.sampler, used))
            loop.train(learner, team, partial(session.after_step, team), partial(session.after_epoch, team))
    end = capture(learner, {})
    ended = halves(learner.model)
    return {**ended, "travelled": {half: (ended[half] - started[half]).norm() for half in ended}, "used": used,
            "everything": torch.cat([flat(part) for part in (end["model"], end["ema"], *end["optimizer"].values())]),
            "forwarded": [event.images for event in run_log.only(ShardEvent, events)],
            "fitness": learner.state.best_fitness}


def halves(model: nn.Module) -> dict[str, Tensor]:
    """Weights and running statistics, apart: statistics travel much further."""
    statistics = {name: value for name, value in model.state_dict().items() if "running" in name}
    return {"weights": flat(dict(model.named_parameters())), "statistics": flat(statistics)}


def recording(sampler: Any, used: list[list[int]]) -> Any:
    start = sampler.start

    def start_and_record(*args: Any) -> None:
        start(*args)
        epochs: dict[int, list[int]] = {}
        for part in sampler:
            for key in part.keys:
                epochs.setdefault(key.epoch, []).append(key.image)
        used.extend(epochs.values())

    return start_and_record


def break_something(control: str, collectives: Collectives, patch: pytest.MonkeyPatch) -> None:
    """Remove one guard."""
    if control == "random augmentation per worker":
        patch.setattr(
            dataset, "generator", lambda *key: generator(*key, *[collectives.rank] * (collectives.rank > 0))
        )
    elif control == "loss means per worker":
        patch.setattr(loop, "forward", with_local_counts)
    elif control == "statistics of one worker" and collectives.num_workers > 1:
        patch.setattr(GradientTree, "finish", lambda self: finish(self) * 0 + self._row)
    elif control == "dropped exchange" and collectives.num_workers > 1:
        patch.setattr(GradientTree, "exchange", dropped_exchange)
        patch.setattr(GradientTree, "finish", lambda self: self._row)
    elif control == "identity clip":
        patch.setattr("torch.nn.utils.clip_grads_with_norm_", lambda *_, **__: None)


def dropped_exchange(tree, bucket):  # DDP inspects a hook's annotations, and those of this file are deferred
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


finish = GradientTree.finish
INTACT = loop.forward


def with_local_counts(learner: Any, team: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """Means over the worker's own matches, averaged over workers, as DDP trainers do."""
    collectives, criterion = team.collectives, learner.criterion
    terms = criterion.terms
    criterion.terms = lambda numerators, counts, trained: terms(
        numerators, local[0] * collectives.num_workers, trained)
    measure, local = criterion.measure, []

    def remember(*inputs: Any) -> Any:
        sums = measure(*inputs)
        local[:] = [sums.counts]
        return sums

    criterion.measure = remember
    try:
        return INTACT(learner, team, *args)
    finally:
        del criterion.terms, criterion.measure


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().double().flatten() for value in state.values()])


KINDS = ("{}", "{} sync_bn")
CONTROLS = {"random augmentation per worker": "short", "loss means per worker": "short sync_bn",
            "statistics of one worker": "short", "dropped exchange": "short", "identity clip": "short"}
slow = pytest.mark.slow
CASES = [("short", 2), ("short", 3), pytest.param("short", 4, marks=slow),
         *(pytest.param("long", workers, marks=slow) for workers in (2, 3, 4))]
WITH_ONE = [("short", 1), *CASES, pytest.param("long", 1, marks=slow)]

Results = Callable[[str, int], dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Each worker's result of every scenario of a length; on two workers also without each guard."""
    folder = tmp_path_factory.mktemp("world")
    fast = {"optimizer": {"nominal_batch": 32, "clip_norm": 0.3, "lr0": 0.01}}
    jobs = {"short": make_spec(folder, epochs=EPOCHS), "long": make_spec(folder, **LONG, **fast),
            "short sync_bn": make_spec(folder, sync_bn=True, epochs=EPOCHS),
            "long sync_bn": make_spec(folder, sync_bn=True, **LONG)}

    @cache
    def train(length: str, workers: int) -> dict[str, list[dict[str, Any]]]:
        scenarios = {name: Scenario(spec) for name, spec in jobs.items() if name.startswith(length)}
        if (length, workers) == ("short", 2):
            scenarios |= {control: Scenario(jobs[name], control) for control, name in CONTROLS.items()}
        by_worker = run_workers(workers, run_all, list(scenarios.values()))
        return {name: [by_scenario[number] for by_scenario in by_worker] for number, name in enumerate(scenarios)}

    return train


@pytest.mark.parametrize(("length", "workers"), CASES)
def test_a_training_has_the_same_bits_on_any_number_of_workers(results: Results, length: str, workers: int) -> None:
    [uninterrupted] = results(length, 1)[length]
    assert uninterrupted["travelled"]["weights"] > 1e-3
    for result in results(length, workers)[length]:
        assert torch.equal(result["everything"], uninterrupted["everything"])
        assert result["fitness"] == uninterrupted["fitness"]


@pytest.mark.parametrize(("length", "workers"), CASES)
def test_a_training_whose_microbatches_are_spread_differs_by_rounding_only(
        results: Results, length: str, workers: int) -> None:
    [uninterrupted] = results(length, 1)[f"{length} sync_bn"]
    for result in results(length, workers)[f"{length} sync_bn"]:
        assert distance(result, uninterrupted) < 1e-4


@pytest.mark.parametrize(("length", "workers"), WITH_ONE)
@pytest.mark.parametrize("kind", KINDS)
def test_every_epoch_uses_each_image_once_and_no_worker_forwards_all_of_them(
        results: Results, kind: str, length: str, workers: int) -> None:
    workers_results = results(length, workers)[kind.format(length)]
    for epoch in range(EPOCHS):
        used = [set(result["used"][epoch]) for result in workers_results]
        assert sorted(i for part in used for i in part) == list(range(37))
        forwarded = [result["forwarded"][epoch] for result in workers_results]
        assert sum(forwarded) == 37
        assert workers == 1 or max(forwarded) < 37


@pytest.mark.parametrize(("length", "workers"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_workers_end_with_the_same_bits(results: Results, kind: str, length: str, workers: int) -> None:
    first, *others = results(length, workers)[kind.format(length)]
    assert all(torch.equal(first["everything"], other["everything"]) for other in others)


@pytest.mark.parametrize("control", CONTROLS)
def test_without_this_guard_the_worker_count_changes_the_training(results: Results, control: str) -> None:
    [uninterrupted] = results("short", 1)[CONTROLS[control]]
    assert distance(results("short", 2)[control][0], uninterrupted) > 1e-3


def distance(result: dict[str, Any], uninterrupted: dict[str, Any]) -> float:
    """Distance between two trainings, relative to the distance travelled by `uninterrupted`.

    The larger of that of the weights and that of the statistics.
    """
    return max(
        float((result[half] - uninterrupted[half]).norm() / way) for half, way in uninterrupted["travelled"].items()
    )



MODELS = ("yolov5n", "yolov5n6", "yolov5nu", "yolo11n", "yolo12n", "yolo26n")
PRECISIONS = ("fp32", "bf16")
# 8, 8, 8 and 6 images a step in microbatches of two: four, which three workers share unevenly, and three, which two do
# and which leave the fourth without one. 50 epochs are 200 steps at YOLOv5's learning rate, at two or three cells of
# the grid.
REAL = {"batch_size": 8, "microbatch": 2, "multi_scale": True, "epochs": 50,
        "optimizer": {"nominal_batch": 8, "lr0": 0.01}}
CONTROL_EPOCHS = 5


def real_job(folder: Path, model: str, precision: str) -> TrainSpec:
    spec = make_spec(folder, 30, model=model, precision=precision, imgsz=2 * MODEL_FACTS[model].grid, **REAL)
    return replace(spec, architecture=None)


def digests(collectives: Collectives, scenario: Scenario, epochs: int) -> list[dict[str, str]]:
    """A worker's state after each epoch: a digest of each kind of tensors, and the number of steps so far."""
    rows: list[dict[str, str]] = []
    context = WorkerContext(prepare_model=lambda model: wrap_model(model, collectives))
    with pytest.MonkeyPatch.context() as patch:
        break_something(scenario.control, collectives, patch)
        session = Session(
            scenario.spec, context, Placement(nosave=True), lambda event: None, Rendezvous(collectives)
        )
        learner = session.learner

        def look(epoch: int) -> bool:
            state = learner.state
            state.close_epoch()
            model = learner.model.state_dict()
            momentum = learner.optimizer.state_dict()["state"]
            rows.append({
                "parameters": digest([value for name, value in model.items() if "running" not in name]),
                "statistics": digest([value for name, value in model.items() if "running" in name]),
                "average": digest(learner.ema.model.state_dict().values()),
                "momentum": digest([momentum[number]["momentum_buffer"] for number in sorted(momentum)]),
                "progress": f"{state.progress.step} steps, {state.skipped} skipped"})
            return epoch + 1 == epochs

        with session.join() as team:
            loop.train(learner, team, lambda *_: None, look)
    return rows


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the bytes of tensors in order."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()


@slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_a_real_model_has_the_same_bits_on_any_number_of_workers(tmp_path: Path, model: str, precision: str) -> None:
    scenario, epochs = Scenario(real_job(tmp_path, model, precision)), REAL["epochs"]
    [uninterrupted] = run_workers(1, digests, scenario, epochs)
    assert uninterrupted[-1]["progress"] == "200 steps, 0 skipped"
    assert len({end["parameters"] for end in uninterrupted}) == epochs
    for workers in (2, 3, 4):
        assert run_workers(workers, digests, scenario, epochs) == [uninterrupted] * workers


@slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MODELS)
def test_without_any_of_its_guards_a_real_model_has_other_bits(tmp_path: Path, model: str) -> None:
    """Negative controls: one worker trains the same without the guard, two do not."""
    spec = real_job(tmp_path, model, "fp32")
    [uninterrupted] = run_workers(1, digests, Scenario(spec), CONTROL_EPOCHS)
    for control in ("random augmentation per worker", "statistics of one worker", "dropped exchange"):
        assert run_workers(1, digests, Scenario(spec, control), CONTROL_EPOCHS) == [uninterrupted], control
        changed = "statistics" if control == "statistics of one worker" else "parameters"
        first, second = run_workers(2, digests, Scenario(spec, control), CONTROL_EPOCHS)
        assert uninterrupted[-1][changed] not in (first[-1][changed], second[-1][changed]), control
