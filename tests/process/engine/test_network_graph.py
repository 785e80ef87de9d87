"""Repeated passes compute what the passes as written compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_yolo.config import placement
from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.events import Event, WarningEvent
from ray_yolo.engine import loop
from ray_yolo.engine import team as team_module
from ray_yolo.engine.collectives import Collectives, wrap_in_ddp
from ray_yolo.engine.cuda_graphs import MAX_RECORDINGS, PLAIN_USES, Recordings
from ray_yolo.engine.learner import Learner
from ray_yolo.engine.network_graph import GraphedForward, repeat_passes
from ray_yolo.engine.session import run_session
from ray_yolo.engine.spec import WorkerContext
from ray_yolo.engine.team import form_team, image_stores
from ray_yolo.models.batch_norm import Statistics
from ray_yolo.models.families import build_model, find_family
from tests.support.jobs import Training, build_training, make_spec
from tests.support.recorders import FailingRecorder, FunctionRecorder, repeat_by
from tests.support.workers import run_workers

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("yolov3-tiny", "yolov5n", "yolov5nu", "yolov8n", "yolo11n", "yolo12n", "yolo26n")


def training_of(folder: Path, context: WorkerContext | None = None, collectives: Collectives | None = None,
                **recipe: object) -> Training:
    """A training of two epochs of ten microbatches each, the last one smaller, two a step."""
    spec = make_spec(folder, batch_size=8, microbatch=4, epochs=2, **recipe)
    return build_training(spec, context, collectives)


def train(training: Training) -> list[Tensor]:
    """Losses, weights and averages after all steps."""
    learner, numbers = training.learner, list[Tensor]()
    loop.train(*training, lambda step, rates, result: numbers.append(result.losses),
               lambda epoch: not learner.state.close_epoch())
    return [*numbers, *learner.model.state_dict().values(), *learner.ema.model.state_dict().values()]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_training_has_the_same_bits(tmp_path: Path, precision: str) -> None:
    """Two microbatches a step share a recording, so gradients that stayed in its memory would be overwritten."""
    plain = train(training_of(tmp_path / "plain", precision=precision))
    training, recorder = training_of(tmp_path / "graphs", precision=precision), FunctionRecorder()
    repeat_by(recorder, training.learner.model)
    assert_equal(plain, train(training))
    full = 2 * 9 - PLAIN_USES  # of 10 microbatches an epoch, the last has one image: it never comes often enough
    assert recorder.repeats == 2 * full


@pytest.mark.parametrize("model", FAMILIES)
def test_each_family_has_the_same_gradient(model: str) -> None:
    """The losses of some families give gradients another layout than levels have. Running statistics agree, too."""

    def gradients(recorder: FunctionRecorder | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        network = build_model(model, 3).to(memory_format=torch.channels_last).train()
        statistics = Statistics(network)
        loss = find_family(model).build_loss(network.head, Recipe(data="unused").loss, 3, 64)
        if recorder:
            repeat_by(recorder, network)
        draw, found = torch.Generator().manual_seed(1), []
        for _ in range(PLAIN_USES + 2):
            images = torch.rand(2, 3, 64, 64, generator=draw).contiguous(memory_format=torch.channels_last)
            statistics.clear()
            corner, side = 40 * torch.rand(4, 2, generator=draw), 4 + 20 * torch.rand(4, 2, generator=draw)
            numbers = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 2.0], [1.0, 0.0]])  # [image, class]
            sums = loss.measure(network(images), torch.cat((numbers, corner, corner + side), 1), (64, 64))
            loss.terms(sums.numerators, sums.counts).sum().backward()
            found += [None if weight.grad is None else weight.grad.clone() for weight in network.parameters()]
            found.append(statistics.recorded(0))
            network.zero_grad()
        return found

    recorder = FunctionRecorder()
    for plain, repeated in zip(gradients(None), gradients(recorder), strict=True):
        assert (plain is None) == (repeated is None)
        assert plain is None or torch.equal(plain, repeated)
    assert recorder.repeats == 4


def test_frozen_layers_train_the_same_when_passes_are_repeated(tmp_path: Path) -> None:
    plain = train(training_of(tmp_path / "plain", freeze=(0, 1)))
    training = training_of(tmp_path / "graphs", freeze=(0, 1))
    repeat_by(FunctionRecorder(), training.learner.model)
    assert_equal(plain, train(training))


def test_a_frozen_head_trains_without_recordings() -> None:
    """Some levels have no gradient then, of which a hook could note the layout."""
    network = build_model("yolo26n", 3).train()
    for weight in network.head.parameters():
        weight.requires_grad_(False)
    recorder = FunctionRecorder()
    repeat_by(recorder, network)
    levels = ()
    for _ in range(PLAIN_USES + 2):
        levels = network(torch.rand(2, 3, 64, 64))
        sum(level.sum() for level in levels if level.requires_grad).backward()
    assert {level.requires_grad for level in levels} == {True, False}
    assert recorder.repeats == 0


def decide_as_on_a_gpu(patch: pytest.MonkeyPatch, recorder: FunctionRecorder) -> None:
    """`build` decides about recordings as on a GPU, and this recorder makes them."""
    decide = team_module.graphed_forward

    def on_a_gpu(learner: Learner, context: WorkerContext, *others: Any) -> GraphedForward | None:
        return decide(learner, replace(context, device=SimpleNamespace(type="cuda")), *others)

    patch.setattr(team_module, "graphed_forward", on_a_gpu)
    patch.setattr(team_module, "CudaRecorder", lambda device: recorder)


def worker_bits(collectives: Collectives, folder: Path) -> tuple[list[Tensor], int]:
    """The bits of a training with `cuda_graphs: on`, and the number of repeated passes."""
    context = WorkerContext(cuda_graphs="on",
                            prepare_model=lambda model: wrap_in_ddp(model, torch.device("cpu")))
    recorder = FunctionRecorder()
    with pytest.MonkeyPatch.context() as patch:
        decide_as_on_a_gpu(patch, recorder)
        bits = train(training_of(folder / str(collectives.rank), context, collectives))
    return bits, recorder.repeats


@pytest.mark.parametrize("num_workers", [2, 3])
def test_several_workers_have_the_same_bits(tmp_path: Path, num_workers: int) -> None:
    """DDP's hooks see each gradient. Of three workers, one has no microbatch in any step, but a blank image."""
    alone = train(training_of(tmp_path / "alone"))
    for bits, repeats in run_workers(num_workers, worker_bits, tmp_path):
        assert_equal(alone, bits)
        assert repeats > 0


def test_what_is_no_training_runs_as_written(tmp_path: Path) -> None:
    training, recorder = training_of(tmp_path), FunctionRecorder()
    model = training.learner.model
    repeat_by(recorder, model)
    images = torch.rand(2, 3, 64, 64)
    for _ in range(PLAIN_USES + 2):
        with torch.no_grad():
            model(images)
        sum(level.sum() for level in model.eval()(images)).backward()
        model.train()(images[:0])
    assert recorder.repeats == 0


def test_a_recording_is_for_one_shape_and_precision(tmp_path: Path) -> None:
    training, recorder = training_of(tmp_path), FunctionRecorder()
    repeat_by(recorder, training.learner.model)
    for images in (torch.rand(2, 3, 64, 64), torch.rand(3, 3, 64, 64), torch.rand(2, 3, 64, 96)):
        for count in range(PLAIN_USES + 1):
            levels = training.learner.model(images)
            sum(level.sum() for level in levels).backward()
            assert levels[0].shape[0] == len(images)
            assert recorder.repeats == 2 * (count == PLAIN_USES)
        with torch.autocast("cpu", torch.bfloat16):
            assert training.learner.model(images)[0].dtype == torch.bfloat16
        assert recorder.repeats == 2
        recorder.repeats = 0


def test_few_shapes_are_recorded(tmp_path: Path) -> None:
    training, recorder = training_of(tmp_path), FunctionRecorder()
    repeat_by(recorder, training.learner.model)
    for count in range(1, MAX_RECORDINGS + 2):
        for _ in range(PLAIN_USES + 1):
            sum(level.sum() for level in training.learner.model(torch.rand(count, 3, 64, 64))).backward()
    assert recorder.repeats == 2 * MAX_RECORDINGS


def test_a_failed_recording_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    plain = train(training_of(tmp_path / "plain"))
    training, complaints = training_of(tmp_path / "graphs"), list[str]()
    repeat_passes(training.learner.model, Recordings("network", FailingRecorder(), complaints))
    assert_equal(plain, train(training))
    [complaint] = complaints
    assert complaint.startswith(
        "no further shape of the network is recorded as a CUDA graph: CUDA out of memory. Tried to allocate 3 GiB; ")


def test_a_failed_recording_is_a_warning_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decide_as_on_a_gpu(monkeypatch, FailingRecorder())
    events: list[Event] = []
    run_session(make_spec(tmp_path, batch_size=8, microbatch=4, epochs=2), WorkerContext(), Placement(), events.append)
    [warning] = [event.message for event in events if isinstance(event, WarningEvent)]
    assert warning.startswith("no further shape of the network is recorded as a CUDA graph: CUDA out of memory")


def test_who_has_repeated_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained model on a GPU: not under sync_bn, nor if they are off; by default, that of a single worker."""
    monkeypatch.setattr(team_module, "CudaRecorder", lambda device: FunctionRecorder())
    learner, on_cpu = training_of(tmp_path)
    assert on_cpu.graphs is None

    decide, alone, beside_another = team_module.graphed_forward, Collectives(), Collectives(0, 2)
    on_gpu = replace(on_cpu.context, device=SimpleNamespace(type="cuda"))
    recipe = learner.spec.recipe.model_copy(update={"sync_bn": True})
    synchronised = replace(learner, spec=replace(learner.spec, recipe=recipe))
    assert decide(learner, on_gpu, alone, []) is not None
    assert decide(synchronised, on_gpu, alone, []) is None
    assert decide(learner, replace(on_gpu, cuda_graphs="off"), alone, []) is None
    assert decide(learner, on_gpu, beside_another, []) is None
    assert decide(learner, replace(on_gpu, cuda_graphs="on"), beside_another, []) is not None
    monkeypatch.setattr(placement, "GRAPHS_OF_SEVERAL_WORKERS", True)
    assert decide(learner, on_gpu, beside_another, []) is not None


def test_repeated_passes_belong_to_one_team_and_not_to_the_average(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BatchNorm's scratch memory is new in each. After a team, the model has its own forward."""
    monkeypatch.setattr(team_module, "graphed_forward",
                        lambda learner, *_: repeat_by(FunctionRecorder(), learner.model))
    learner, first = training_of(tmp_path)
    with first:
        assert vars(learner.model)["forward"] is first.graphs
        assert "forward" not in vars(learner.ema.model)
    assert "forward" not in vars(learner.model)
    second = form_team(learner, first.context, Collectives(), image_stores(learner.spec, first.context))
    assert vars(learner.model)["forward"] is second.graphs
