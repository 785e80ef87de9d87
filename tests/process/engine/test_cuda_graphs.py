"""Repeated passes compute what the passes as written compute. On a CPU a recording is the recorded function itself;
that CUDA graphs repeat it to the bit, `make gpu-test` shows on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ray_yolo.config import placement
from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.events import Event, WarningEvent
from ray_yolo.core.structures import Progress
from ray_yolo.engine import build as build_module
from ray_yolo.engine import loop
from ray_yolo.engine.build import TrainComponents, TrainSpec, WorkerContext, build, regroup
from ray_yolo.engine.collectives import Collectives, wrap_in_ddp
from ray_yolo.engine.cuda_graphs import MAX_RECORDINGS, PLAIN_USES, GraphedForward, repeat_passes
from ray_yolo.engine.session import run_session
from ray_yolo.models.batch_norm import Statistics
from ray_yolo.models.detector import Detector
from ray_yolo.models.families import build_model, find_family
from tests.support.jobs import make_spec
from tests.support.workers import run_workers

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("yolov3-tiny", "yolov5n", "yolov5nu", "yolov8n", "yolo11n", "yolo12n", "yolo26n")


class FunctionRecorder:
    """Repeats a function by calling it."""

    def __init__(self) -> None:
        self.repeats = 0

    def warm_up(self, function: Callable[[], None]) -> None:
        function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        def repeat() -> None:
            self.repeats += 1
            function()

        return repeat


class FailingRecorder(FunctionRecorder):
    """Has no memory for a recording."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("CUDA out of memory.\nTried to allocate 3 GiB")


def components_of(folder: Path, context: WorkerContext | None = None, **recipe: object) -> TrainComponents:
    """A training of two epochs of ten microbatches each, the last one smaller, two a step."""
    return build(make_spec(folder, batch_size=8, microbatch=4, epochs=2, **recipe), context or WorkerContext(threads=1))


def train(components: TrainComponents) -> list[Tensor]:
    """Losses, weights and averages after all steps."""
    progress, numbers = Progress(), []
    for epoch in range(components.plan.recipe.epochs):
        components.sampler.start(epoch, 0, None)
        for launched in loop.launch_steps(components, Progress(epoch, 0, progress.step), iter(components.loader),
                                             loop.Orders):
            result = loop.finish_step(components, launched)
            progress = Progress(epoch, launched.summed.step.images.stop, progress.step + 1)
            numbers.append(result.losses)
    return [*numbers, *components.model.state_dict().values(), *components.ema.model.state_dict().values()]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_training_has_the_same_bits(tmp_path: Path, precision: str) -> None:
    """Two microbatches a step share a recording, so gradients that stayed in its memory would be overwritten."""
    plain = train(components_of(tmp_path / "plain", precision=precision))
    components, recorder = components_of(tmp_path / "graphs", precision=precision), FunctionRecorder()
    repeat_passes(components.model, recorder)
    assert_equal(plain, train(components))
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
            repeat_passes(network, recorder)
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


def test_frozen_layers_have_no_gradient(tmp_path: Path) -> None:
    plain = train(components_of(tmp_path / "plain", freeze=(0, 1)))
    components = components_of(tmp_path / "graphs", freeze=(0, 1))
    repeat_passes(components.model, FunctionRecorder())
    assert_equal(plain, train(components))


def test_a_frozen_head_trains_without_recordings() -> None:
    """Some levels have no gradient then, of which a hook could note the layout."""
    network = build_model("yolo26n", 3).train()
    for weight in network.head.parameters():
        weight.requires_grad_(False)
    recorder = FunctionRecorder()
    repeat_passes(network, recorder)
    levels = ()
    for _ in range(PLAIN_USES + 2):
        levels = network(torch.rand(2, 3, 64, 64))
        sum(level.sum() for level in levels if level.requires_grad).backward()
    assert {level.requires_grad for level in levels} == {True, False}
    assert recorder.repeats == 0


def decide_as_on_a_gpu(patch: pytest.MonkeyPatch, recorder: FunctionRecorder) -> None:
    """`build` decides about recordings as on a GPU, and this recorder makes them."""
    decide = build_module.graphed_forward

    def on_a_gpu(spec: TrainSpec, context: WorkerContext, model: Detector) -> GraphedForward | None:
        return decide(spec, replace(context, device=SimpleNamespace(type="cuda")), model)

    patch.setattr(build_module, "graphed_forward", on_a_gpu)
    patch.setattr(build_module, "repeat_passes", lambda model: repeat_passes(model, recorder))


def worker_bits(collectives: Collectives, folder: Path) -> tuple[list[Tensor], int]:
    """The bits of a training with `cuda_graphs: on`, and the number of repeated passes."""
    context = WorkerContext(collectives, threads=1, cuda_graphs="on",
                            prepare_model=lambda model: wrap_in_ddp(model, torch.device("cpu")))
    recorder = FunctionRecorder()
    with pytest.MonkeyPatch.context() as patch:
        decide_as_on_a_gpu(patch, recorder)
        bits = train(components_of(folder / str(collectives.rank), context))
    return bits, recorder.repeats


@pytest.mark.parametrize("num_workers", [2, 3])
def test_several_workers_have_the_same_bits(tmp_path: Path, num_workers: int) -> None:
    """DDP's hooks see each gradient. Of three workers, one has no microbatch in any step, but a blank image."""
    alone = train(components_of(tmp_path / "alone"))
    for bits, repeats in run_workers(num_workers, worker_bits, tmp_path):
        assert_equal(alone, bits)
        assert repeats > 0


def test_what_is_no_training_runs_as_written(tmp_path: Path) -> None:
    components, recorder = components_of(tmp_path), FunctionRecorder()
    model = components.model
    repeat_passes(model, recorder)
    images = torch.rand(2, 3, 64, 64)
    for _ in range(PLAIN_USES + 2):
        with torch.no_grad():
            model(images)
        sum(level.sum() for level in model.eval()(images)).backward()
        model.train()(images[:0])
    assert recorder.repeats == 0


def test_a_recording_is_for_one_shape_and_precision(tmp_path: Path) -> None:
    components, recorder = components_of(tmp_path), FunctionRecorder()
    repeat_passes(components.model, recorder)
    for images in (torch.rand(2, 3, 64, 64), torch.rand(3, 3, 64, 64), torch.rand(2, 3, 64, 96)):
        for count in range(PLAIN_USES + 1):
            levels = components.model(images)
            sum(level.sum() for level in levels).backward()
            assert levels[0].shape[0] == len(images)
            assert recorder.repeats == 2 * (count == PLAIN_USES)
        with torch.autocast("cpu", torch.bfloat16):
            assert components.model(images)[0].dtype == torch.bfloat16
        assert recorder.repeats == 2
        recorder.repeats = 0


def test_few_shapes_are_recorded(tmp_path: Path) -> None:
    components, recorder = components_of(tmp_path), FunctionRecorder()
    repeat_passes(components.model, recorder)
    for count in range(1, MAX_RECORDINGS + 2):
        for _ in range(PLAIN_USES + 1):
            sum(level.sum() for level in components.model(torch.rand(count, 3, 64, 64))).backward()
    assert recorder.repeats == 2 * MAX_RECORDINGS


def test_a_failed_recording_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    plain = train(components_of(tmp_path / "plain"))
    components = components_of(tmp_path / "graphs")
    graphed = repeat_passes(components.model, FailingRecorder())
    assert_equal(plain, train(components))
    complaint = graphed.pop_complaint()
    assert complaint.startswith(
        "no further shape of the network is recorded as a CUDA graph: CUDA out of memory. Tried to allocate 3 GiB; ")
    assert graphed.pop_complaint() == ""


def test_a_failed_recording_is_a_warning_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def graphs(spec: TrainSpec, context: WorkerContext, model: Detector) -> GraphedForward:
        return repeat_passes(model, FailingRecorder())

    monkeypatch.setattr(build_module, "graphed_forward", graphs)
    events: list[Event] = []
    run_session(make_spec(tmp_path, batch_size=8, microbatch=4, epochs=2), WorkerContext(), Placement(), events.append)
    [warning] = [event.message for event in events if isinstance(event, WarningEvent)]
    assert warning.startswith("no further shape of the network is recorded as a CUDA graph: CUDA out of memory")


def test_who_has_repeated_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained model on a GPU: not under sync_bn, nor if they are off; by default, that of a single worker."""
    monkeypatch.setattr(build_module, "repeat_passes", lambda model: repeat_passes(model, FunctionRecorder()))
    on_cpu = components_of(tmp_path)
    assert on_cpu.graphs is None

    on_gpu = replace(on_cpu.context, device=SimpleNamespace(type="cuda"))
    synchronised = replace(on_cpu.spec, recipe=on_cpu.spec.recipe.model_copy(update={"sync_bn": True}))
    assert build_module.graphed_forward(on_cpu.spec, on_gpu, on_cpu.model) is not None
    assert build_module.graphed_forward(synchronised, on_gpu, on_cpu.model) is None
    assert build_module.graphed_forward(on_cpu.spec, replace(on_gpu, cuda_graphs="off"), on_cpu.model) is None
    beside_another = replace(on_gpu, collectives=Collectives(0, 2))
    assert build_module.graphed_forward(on_cpu.spec, beside_another, on_cpu.model) is None
    assert build_module.graphed_forward(
        on_cpu.spec, replace(beside_another, cuda_graphs="on"), on_cpu.model) is not None
    monkeypatch.setattr(placement, "GRAPHS_OF_SEVERAL_WORKERS", True)
    assert build_module.graphed_forward(on_cpu.spec, beside_another, on_cpu.model) is not None


def test_the_average_has_its_own_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "graphed_forward",
                        lambda spec, context, model: repeat_passes(model, FunctionRecorder()))
    components = components_of(tmp_path)
    assert "forward" in vars(components.model)
    assert "forward" not in vars(components.ema.model)


def test_another_group_of_workers_has_new_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BatchNorm's scratch memory is new. A group that repeats nothing has the model's own forward."""
    monkeypatch.setattr(build_module, "graphed_forward",
                        lambda spec, context, model: repeat_passes(model, FunctionRecorder()))
    components = components_of(tmp_path)
    first = components.graphs
    components = regroup(components, Collectives())
    assert components.graphs is not first
    assert vars(components.model)["forward"] is components.graphs

    monkeypatch.setattr(build_module, "graphed_forward", lambda spec, context, model: None)
    assert "forward" not in vars(regroup(components, Collectives()).model)
