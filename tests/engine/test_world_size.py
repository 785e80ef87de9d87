"""The same training on any number of workers, and proof that each guard is needed for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ray_yolo.config.placement import Placement
from ray_yolo.data import dataset
from ray_yolo.engine import loop
from ray_yolo.engine.build import Host, Job
from ray_yolo.engine.gradients import GradientTree
from ray_yolo.engine.replicas import Replicas
from ray_yolo.engine.session import Session
from ray_yolo.engine.state import capture
from ray_yolo.events import Event, ShardEvent
from ray_yolo.ops.seeding import generator
from tests.support import run_log
from tests.support.jobs import make_job
from tests.support.workers import run_workers, wrap_model

pytestmark = pytest.mark.timeout(900)  # the fixture trains in two to four processes, one after the other
WORKERS = (2, 3, 4)
LONG = {"epochs": 34}  # of 3 steps each


class Scenario(NamedTuple):
    """A training and what is broken in it."""

    job: Job
    control: str = ""


def run_all(replicas: Replicas, scenarios: list[Scenario]) -> list[dict[str, Any]]:
    return [run_one(replicas, scenario) for scenario in scenarios]


def run_one(replicas: Replicas, scenario: Scenario) -> dict[str, Any]:
    """Final tensors, travelled distance and what each epoch used, on one worker."""
    events: list[Event] = []
    host = Host(replicas=replicas, prepare_model=lambda model: wrap_model(model, replicas))
    with pytest.MonkeyPatch.context() as patch:
        break_something(scenario.control, replicas, patch)
        session = Session(scenario.job, host, Placement(nosave=True),
                          events.append, lambda _: None)
        started = halves(session.parts.model)
        used: list[list[int]] = []
        patch.setattr(session.parts.sampler, "start", recording(session.parts.sampler, used))
        patch.setattr(session, "_save", lambda kinds: None)
        loop.train(session.parts, session.state, session.after_step, session.after_epoch)
    end = capture(session.parts, session.state, {})
    ended = halves(session.parts.model)
    return {**ended, "travelled": {half: (ended[half] - started[half]).norm() for half in ended}, "used": used,
            "everything": torch.cat([flat(part) for part in (end["model"], end["ema"], *end["optimizer"].values())]),
            "forwarded": [event.images for event in run_log.only(ShardEvent, events)],
            "fitness": session.state.best_fitness}


def halves(model: nn.Module) -> dict[str, Tensor]:
    """Weights and running statistics, apart: statistics travel much further."""
    statistics = {name: value for name, value in model.state_dict().items() if "running" in name}
    return {"weights": flat(dict(model.named_parameters())), "statistics": flat(statistics)}


def recording(sampler: Any, used: list[list[int]]) -> Any:
    start = sampler.start

    def start_and_record(*args: Any) -> None:
        start(*args)
        used.append([key.image for key in sampler])

    return start_and_record


def break_something(control: str, replicas: Replicas, patch: pytest.MonkeyPatch) -> None:
    """Take one guard away."""
    if control == "random augmentation per worker":
        patch.setattr(dataset, "generator", lambda *key: generator(*key, replicas.worker))
    elif control == "loss means per worker":
        patch.setattr(loop, "forward", with_local_counts)
    elif control == "statistics of one worker":
        patch.setattr(GradientTree, "finish", lambda self: finish(self) * 0 + self._row)
    elif control == "dropped exchange" and replicas.num_workers > 1:
        patch.setattr(GradientTree, "exchange", dropped_exchange)
        patch.setattr(GradientTree, "finish", lambda self: self._row)
    elif control == "identity clip":
        patch.setattr("torch.nn.utils.clip_grad_norm_", lambda parameters, *_, **__: torch.zeros(()))


def dropped_exchange(tree: GradientTree, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


finish = GradientTree.finish
INTACT = loop.forward


def with_local_counts(parts: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """Means over the worker's own matches, averaged over workers, as DDP trainers do."""
    replicas = parts.host.replicas
    terms = parts.loss.terms
    parts.loss.terms = lambda numerators, counts: terms(numerators, local[0] * replicas.num_workers)
    measure, local = parts.loss.measure, []

    def remember(*inputs: Any) -> Any:
        sums = measure(*inputs)
        local[:] = [sums.counts]
        return sums

    parts.loss.measure = remember
    try:
        return INTACT(parts, *args)
    finally:
        del parts.loss.terms, parts.loss.measure


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().double().flatten() for value in state.values()])


PLAIN = ("short", "long")
SPREAD = ("short sync_bn", "long sync_bn")
NAMES = (*PLAIN, *SPREAD)
CONTROLS = {"random augmentation per worker": "short", "loss means per worker": "short sync_bn",
            "statistics of one worker": "short", "dropped exchange": "short", "identity clip": "short"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Of every scenario, on every number of workers, each worker's result."""
    folder = tmp_path_factory.mktemp("world")
    fast = {"optimizer": {"nominal_batch": 32, "clip_norm": 0.3, "lr0": 0.01}}
    jobs = {"short": make_job(folder), "long": make_job(folder, **LONG, **fast),
            "short sync_bn": make_job(folder, sync_bn=True), "long sync_bn": make_job(folder, sync_bn=True, **LONG)}
    sound = [Scenario(jobs[name]) for name in NAMES]
    broken = [Scenario(jobs[name], control) for control, name in CONTROLS.items()]
    found = {(name, 1): [result] for name, result in zip(NAMES, run_all(Replicas(), sound), strict=True)}
    for workers in WORKERS:
        scenarios = sound + (broken if workers == 2 else [])
        by_worker = run_workers(workers, run_all, scenarios)
        names = [*NAMES, *CONTROLS][: len(scenarios)]
        found |= {(name, workers): [results[i] for results in by_worker] for i, name in enumerate(names)}
    return found


Results = dict[tuple[str, int], list[dict[str, Any]]]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", PLAIN)
def test_a_training_has_the_same_bits_on_any_number_of_workers(results: Results, name: str, workers: int) -> None:
    [calm] = results[name, 1]
    assert calm["travelled"]["weights"] > 1e-3
    for result in results[name, workers]:
        assert torch.equal(result["everything"], calm["everything"])
        assert result["fitness"] == calm["fitness"]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", SPREAD)
def test_a_training_whose_microbatches_are_spread_differs_by_rounding_only(
        results: Results, name: str, workers: int) -> None:
    [calm] = results[name, 1]
    for result in results[name, workers]:
        assert distance(result, calm) < 1e-4


@pytest.mark.parametrize("workers", [1, *WORKERS])
@pytest.mark.parametrize("name", NAMES)
def test_every_epoch_uses_each_image_once_and_nobody_computes_everything(
        results: Results, name: str, workers: int) -> None:
    workers_results = results[name, workers]
    for epoch in range(7):
        used = [set(result["used"][epoch]) for result in workers_results]
        assert sorted(i for part in used for i in part) == list(range(37))
        forwarded = [result["forwarded"][epoch] for result in workers_results]
        assert sum(forwarded) == 37
        assert workers == 1 or max(forwarded) < 37


@pytest.mark.parametrize("workers", WORKERS)
def test_all_workers_end_with_the_same_bits(results: Results, workers: int) -> None:
    for name in NAMES:
        first, *others = results[name, workers]
        assert all(torch.equal(first["everything"], other["everything"]) for other in others)


@pytest.mark.parametrize("control", CONTROLS)
def test_without_this_guard_the_worker_count_changes_the_training(results: Results, control: str) -> None:
    [calm] = results[CONTROLS[control], 1]
    assert distance(results[control, 2][0], calm) > 1e-3


def distance(result: dict[str, Any], calm: dict[str, Any]) -> float:
    """Distance between two trainings relative to the calm one's way: of weights or of statistics, the larger."""
    return max(float((result[half] - calm[half]).norm() / way) for half, way in calm["travelled"].items())

