"""Code for GPUs, checked without one: the operations of a step on tensors without values, and their devices.

A complete step with backward runs on `meta` tensors. On fake CUDA tensors everything but backward runs, for which torch
needs a driver. Neither has values for the host, so reading one fails, as does mixing devices. Fake tensors allow
copies; `Watch` checks that no copy makes the host wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ray_yolo.config.sections import EvaluateConfig, LossConfig
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.engine import evaluate, loop
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.devices import copy_stream
from ray_yolo.engine.learner import Learner, build_learner
from ray_yolo.engine.spec import WorkerContext
from ray_yolo.engine.team import colour_tables_on, form_team, image_stores
from ray_yolo.models.detector import Detector
from ray_yolo.models.families import build_model, find_family
from ray_yolo.models.heads import Predictions
from ray_yolo.ops import nms
from tests.support.jobs import make_spec

SMALL = {"batch_size": 4, "microbatch": 4, "multi_scale": True, "optimizer": {"nominal_batch": 4}}
TINY: dict[str, Any] = {"microbatch": 2}
MODELS = ("yolov3-tiny", "yolov5n", "yolov5n6", "yolov5nu", "yolov8n", "yolo11n", "yolo12n", "yolo26n")
QUICK = ("yolov5n", "yolov8n", "yolo12n", "yolo26n")  # each loss, and each block but those of yolov3
CASES: dict[str, dict[str, Any]] = {
    **{name: {"model": name, "imgsz": 128 if name.endswith("6") else 64} for name in MODELS},
    "two parts": TINY, "sync-bn": {"sync_bn": True}}
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # torch's own deepcopy does
LABELS = [[0.0, 1, 4, 4, 30, 40], [1, 0, 20, 8, 60, 60]]


class WaitError(Exception):
    """The host would wait for the device."""


class Watch(TorchDispatchMode):
    """Raises for a blocking copy between devices, and for an operation on tensors of two devices."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs, outputs = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
                           for tree in ((args, kwargs), result))
        copies = function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        devices = {tensor.device.type for tensor in (*inputs, *outputs) if tensor.dim() or copies}
        waits = not (copies and ((kwargs or {}).get("non_blocking") or args[2:] == (True,)))
        if len(devices) > 1 and waits:
            raise WaitError(f"{function} of {sorted(devices)}")
        return result


def moved(model: nn.Module, device: str) -> nn.Module:
    """The model with its tensors replaced by tensors of that device."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                    kept = isinstance(tensor, nn.Parameter)
                    tensors[name] = nn.Parameter(empty, tensor.requires_grad) if kept else empty
    return model


def fused_step(*tensors: Any, found_inf: Tensor, **_: Any) -> None:
    """Replaces the optimiser's kernel, which neither device has."""
    parameters, *others = tensors
    for tensor in (*(tensor for each in others for tensor in each), found_inf):
        assert tensor.device == parameters[0].device


def fake_backward(loss: Tensor, learner: Learner) -> None:
    for parameter in learner.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)


def replace_streams(patch: pytest.MonkeyPatch) -> None:
    """Streams of a device that does not exist."""
    stream = SimpleNamespace(device="cuda", wait_stream=lambda other: None, synchronize=lambda: None)
    patch.setattr(torch.cuda, "Stream", lambda device, priority=0: stream)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)  # too few steps for a recording
    patch.setattr(torch.cuda, "current_stream", lambda device: stream)
    patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    patch.setattr(Tensor, "record_stream", lambda tensor, stream: None)


@pytest.fixture(params=["meta", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device without values, and replacements for what it lacks."""
    monkeypatch.setattr(torch, "_fused_sgd_", fused_step)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(loop, "runs_ahead", lambda device: True)
    replace_streams(monkeypatch)
    tensor = torch.tensor  # without a driver, no memory can be pinned
    monkeypatch.setattr(torch, "tensor", lambda *values, pin_memory=False, **how: tensor(*values, **how))
    if request.param == "meta":
        norm, clip = nn.utils.get_total_norm, nn.utils.clip_grads_with_norm_
        monkeypatch.setattr(nn.utils, "get_total_norm", lambda gradients, foreach: norm(gradients))
        monkeypatch.setattr(nn.utils, "clip_grads_with_norm_",
                            lambda weights, limit, total, foreach: clip(weights, limit, total))
    return request.param


@pytest.fixture
def surroundings() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
    colour_tables_on.cache_clear()  # they are fake, and of this test's mode alone
    copy_stream.cache_clear()


Plant = Callable[[Tensor], Tensor]


def take_steps(folder: Path, device: str, stack: ExitStack, patch: pytest.MonkeyPatch, plant: Plant | None = None,
               **recipe: Any) -> list[str]:
    """The actions in the two steps of an epoch, in order; `plant` changes each microbatch's loss terms."""

    to = Detector.to

    def to_fake_device(model: Detector, *where: torch.device, **layout: torch.memory_format) -> Detector:
        if not where:
            return to(model, **layout)
        if device == "cuda":  # from here on all new tensors are on the device
            stack.enter_context(FakeTensorMode())
        return moved(model, device)

    spec = make_spec(folder, 8, **{**SMALL, **recipe})
    spec = replace(spec, architecture=None) if "model" in recipe else spec
    context = WorkerContext(device=torch.device(device))
    patch.setattr(Detector, "to", to_fake_device)
    learner = build_learner(spec, context)
    moved(learner.ema.model, device)  # a copied fake tensor has a mode of its own
    vars(learner.optimizer)["_need_device_dtype_check_for_fused"] = False
    team = form_team(learner, context, Collectives(), image_stores(spec, context))
    criterion, actions = learner.criterion, []
    terms = criterion.terms
    if plant is not None:
        patch.setattr(criterion, "terms", lambda *args: plant(terms(*args)))
    if device == "cuda":
        patch.setattr(Tensor, "backward", lambda loss: fake_backward(loss, learner))

    def send(numbers: Tensor) -> Callable[[], list[float]]:
        actions.append("sent")
        decided = [0.0, 1.0, 1.0]  # norm; the step is finite and complete
        return lambda: actions.append("read") or decided + [0.0] * (len(numbers) - len(decided))

    patch.setattr(loop, "send_to_host", send)
    patch.setattr(loop, "sum_microbatches", recording(actions, loop.sum_microbatches))
    images, side = learner.plan.worker_images(1, 0), spec.recipe.imgsz
    batch = {"images": torch.zeros(images, 3, side, side, dtype=torch.uint8, device=device),
             "targets": torch.tensor(LABELS).to(device, non_blocking=True)}
    if team.loaders.colours is not None:
        batch["colours"] = torch.zeros(images, 3, 256, dtype=torch.uint8, device=device)
    criterion.terms(torch.ones(len(criterion.names), 1, device=device), torch.ones((), device=device))
    stack.enter_context(Watch())
    for launched in loop.launch_steps(learner, team, iter([batch] * 4), loop.Orders):
        assert not loop.finish_step(learner, team, launched).skipped
    loop.blank_loss(learner, team).backward()
    return actions


def recording(actions: list[str], function: Any) -> Any:
    def call(*args: Any) -> Any:
        actions.append("forward and backward")
        return function(*args)
    return call


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=pytest.mark.slow if case in MODELS and case not in QUICK else ()) for case in CASES])
def test_in_a_step_the_host_waits_for_the_device_once_when_the_next_one_is_queued(
        tmp_path: Path, device: str, surroundings: ExitStack, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    actions = take_steps(tmp_path, device, surroundings, monkeypatch, **CASES[case])
    assert actions == ["forward and backward", "sent", "forward and backward", "read", "sent", "read"]


PLANTS: dict[str, Plant] = {
    "item": lambda terms: terms * terms.sum().item(),
    "bool": lambda terms: terms if terms.sum() > 0 else terms * 2,
    "mask": lambda terms: terms[terms > 0],
    "nonzero": lambda terms: terms * terms.nonzero().shape[0],
    "to the host": lambda terms: terms.cpu().to(terms.device, non_blocking=True),
    "of the host": lambda terms: terms + torch.ones(3),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_code_that_waits_for_the_device_or_mixes_devices_fails(
        tmp_path: Path, device: str, surroundings: ExitStack, monkeypatch: pytest.MonkeyPatch, plant: str) -> None:
    """Negative controls."""
    with pytest.raises((RuntimeError, WaitError)):
        take_steps(tmp_path, device, surroundings, monkeypatch, PLANTS[plant], **TINY)


EVALUATIONS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in MODELS},
    "one class": {"num_classes": 1}, "without suppression": {"suppress": False}}


@pytest.mark.parametrize("case", EVALUATIONS)
def test_evaluation_waits_for_the_device_once_a_batch_when_the_next_one_is_queued(
        monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    assert evaluate_three_batches(monkeypatch, **EVALUATIONS[case]) == [
        "queued", "queued", "wait", "read", "queued", "wait", "read", "wait", "read"]


EVALUATION_PLANTS: dict[str, Callable[[Predictions], Predictions]] = {
    "to the host": lambda found: Predictions(found.boxes.cpu().to("cuda", non_blocking=True), found.scores),
    "mask": lambda found: Predictions(found.boxes, found.scores[found.scores > 0]),
    "synchronize": lambda found: torch.cuda.synchronize() or found,
}


@pytest.mark.parametrize("plant", EVALUATION_PLANTS)
def test_an_evaluation_that_waits_for_the_device_fails(monkeypatch: pytest.MonkeyPatch, plant: str) -> None:
    """Negative controls."""
    with pytest.raises((RuntimeError, WaitError)):
        evaluate_three_batches(monkeypatch, plant=EVALUATION_PLANTS[plant])


class FakeEvent:
    """An event in the work of a device that does not exist."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1.0


def evaluate_three_batches(patch: pytest.MonkeyPatch, name: str = "yolov8n", num_classes: int = 3, *,
                           suppress: bool = True, plant: Callable[[Predictions], Predictions] | None = None
                           ) -> list[str]:
    """The actions in an evaluation on a fake CUDA device, in order; `plant` changes the predictions."""
    actions: list[str] = []

    def synchronize(*_: Any) -> None:
        raise WaitError("synchronize")

    def detections(selector: nms.Selector, candidates: Tensor) -> list[SimpleNamespace]:
        actions.append("read")
        assert (candidates.shape, candidates.device.type) == ((2, len(candidates[0]), 6), "cpu")
        return [SimpleNamespace(numpy=lambda: None)] * len(candidates)

    patch.setattr(torch.cuda, "synchronize", synchronize)
    replace_streams(patch)
    patch.setattr(torch.cuda, "Event", FakeEvent)
    patch.setattr(FakeEvent, "synchronize", lambda event: actions.append("wait"))
    patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    patch.setattr(nms.Selector, "detections", detections)
    patch.setattr(evaluate, "_match_image", lambda *_: np.zeros((0, 8), np.float32))

    family, model = find_family(name), build_model(name, num_classes).eval()
    index = AnnotationIndex((), np.zeros((0, 2), np.int32), np.zeros(1, np.int64), np.zeros(0), np.zeros((0, 4)),
                            tuple("abc"[:num_classes]))
    with FakeTensorMode():
        model = moved(model, "cuda")
        loss = family.build_loss(model.head, LossConfig(), num_classes, 64)

        def decode(head: nn.Module, levels: Any) -> Predictions:
            actions.append("queued")
            found = family.decode(head, levels)
            return plant(found) if plant else found

        batch = {"images": torch.zeros(2, 3, 64, 64, dtype=torch.uint8), "targets": torch.tensor(LABELS),
                 "indices": torch.arange(2)}
        with Watch():
            evaluate.evaluate_batches(model, family._replace(decode=decode, suppress=suppress), loss, [batch] * 3,
                                      index, EvaluateConfig(), "fp32", torch.device("cuda"))
    return actions


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("name", ["yolov5n", "yolov8n"])
def test_predictions_and_candidates_are_on_the_images_device(
        monkeypatch: pytest.MonkeyPatch, name: str, multi_label: bool) -> None:
    monkeypatch.setattr(nms, "MAX_CANDIDATES", 10)
    candidates = find_candidates(name, "cuda", multi_label)
    assert (candidates.shape, candidates.device.type) == ((2, 10, 6), "cuda")
    with pytest.raises(RuntimeError):  # negative control
        find_candidates(name, "cpu", multi_label)


def find_candidates(name: str, boxes_on: str, multi_label: bool) -> Tensor:
    """Candidates in two blank images on a fake CUDA device, the boxes moved elsewhere in between."""
    family, model = find_family(name), build_model(name, 3).eval()
    with FakeTensorMode(), torch.no_grad():
        levels = moved(model, "cuda")(torch.zeros(2, 3, 64, 64, device="cuda"))
        boxes, scores = family.decode(model.head, levels)
        selector = nms.Selector(confidence=0.1, iou=0.5, max_detections=100, multi_label=multi_label)
        return selector.padded_candidates(boxes.to(boxes_on), scores)
