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
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ray_yolo.core.structures import Progress
from ray_yolo.engine import loop
from ray_yolo.engine.build import TrainComponents, WorkerContext, build
from ray_yolo.models.families import build_model, find_family
from ray_yolo.ops import nms
from tests.support.jobs import make_spec

SMALL = {"batch_size": 4, "microbatch": 4, "multi_scale": True, "optimizer": {"nominal_batch": 4}}
TINY: dict[str, Any] = {"microbatch": 2}
CASES: dict[str, dict[str, Any]] = {"yolov5n": {"model": "yolov5n"}, "yolov8n": {"model": "yolov8n"}, "two parts": TINY,
                                    "sync-bn": {"sync_bn": True}}
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


def fake_backward(loss: Tensor, components: TrainComponents) -> None:
    for parameter in components.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)


class Answers(TorchDispatchMode):
    """Lets operations whose shapes depend on values return every second element, so that the host can continue."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.nonzero.default:
            return args[0].new_empty((args[0].numel() // 2, args[0].dim()), dtype=torch.long)
        if str(function) == "torchvision.nms.default":
            assert args[0].device == args[1].device
            return args[0].new_empty(len(args[0]) // 2, dtype=torch.long)
        if function is torch.ops.aten.index.Tensor and args[1][0] is not None and args[1][0].dtype == torch.bool:
            return args[0][args[1][0].new_empty(len(args[0]) // 2, dtype=torch.long)]
        return function(*args, **(kwargs or {}))


@pytest.fixture(params=["meta", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device without values, and replacements for what it lacks."""
    monkeypatch.setattr(torch, "_fused_sgd_", fused_step)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(loop, "runs_ahead", lambda device: True)
    if request.param == "meta":
        clip = nn.utils.clip_grad_norm_
        monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda parameters, limit, foreach: clip(parameters, limit))
    return request.param


@pytest.fixture
def surroundings() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


Plant = Callable[[TrainComponents, Tensor], Tensor]


def take_steps(folder: Path, device: str, stack: ExitStack, patch: pytest.MonkeyPatch, plant: Plant | None = None,
               **recipe: Any) -> list[str]:
    """The actions in the two steps of an epoch, in order; `plant` changes each microbatch's loss terms."""

    def prepare_model(model: nn.Module) -> nn.Module:  # from here on all new tensors are on the device
        if device == "cuda":
            stack.enter_context(FakeTensorMode())
        return moved(model, device)

    spec = make_spec(folder, 8, **{**SMALL, **recipe})
    spec = replace(spec, architecture=None) if "model" in recipe else spec
    components = build(spec, WorkerContext(device=torch.device(device), prepare_model=prepare_model))
    moved(components.ema.model, device)  # a copied fake tensor has a mode of its own
    vars(components.optimizer)["_need_device_dtype_check_for_fused"] = False
    terms, actions = components.loss.terms, []
    if plant is not None:
        patch.setattr(components.loss, "terms", lambda *args: plant(components, terms(*args)))
    if device == "cuda":
        patch.setattr(Tensor, "backward", lambda loss: fake_backward(loss, components))

    def send(numbers: Tensor) -> Callable[[], list[float]]:
        actions.append("sent")
        return lambda: actions.append("read") or [0.0] * (len(numbers) - 5) + [1.0, 1.0, 0.0, 0.0, 0.0]

    patch.setattr(loop, "send_to_host", send)
    patch.setattr(loop, "sum_microbatches", recording(actions, loop.sum_microbatches))
    images = components.plan.loader_batch(1, 0)
    batch = {"images": torch.zeros(images, 3, 64, 64, dtype=torch.uint8, device=device),
             "targets": torch.tensor(LABELS).to(device, non_blocking=True)}
    components.loss.terms(torch.ones(len(components.loss.names), 1, device=device), torch.ones((), device=device))
    stack.enter_context(Watch())
    components.loader = [batch] * 4
    for launched in loop.launch_steps(components, Progress(), loop.ControlFlags):
        assert not loop.finish_step(components, launched).skipped
    loop.blank_loss(components).backward()
    return actions


def recording(actions: list[str], function: Any) -> Any:
    def call(*args: Any) -> Any:
        actions.append("forward and backward")
        return function(*args)
    return call


@pytest.mark.parametrize("case", CASES)
def test_in_a_step_the_host_waits_for_the_device_once_when_the_next_one_is_queued(
        tmp_path: Path, device: str, surroundings: ExitStack, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    actions = take_steps(tmp_path, device, surroundings, monkeypatch, **CASES[case])
    assert actions == ["forward and backward", "sent", "forward and backward", "read", "sent", "read"]


PLANTS: dict[str, Plant] = {
    "item": lambda components, terms: terms * terms.sum().item(),
    "bool": lambda components, terms: terms if terms.sum() > 0 else terms * 2,
    "mask": lambda components, terms: terms[terms > 0],
    "nonzero": lambda components, terms: terms * terms.nonzero().shape[0],
    "to the host": lambda components, terms: terms.cpu().to(terms.device, non_blocking=True),
    "of the host": lambda components, terms: terms + torch.ones(3),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_code_that_waits_for_the_device_or_mixes_devices_fails(
        tmp_path: Path, device: str, surroundings: ExitStack, monkeypatch: pytest.MonkeyPatch, plant: str) -> None:
    """Negative controls."""
    with pytest.raises((RuntimeError, WaitError)):
        take_steps(tmp_path, device, surroundings, monkeypatch, PLANTS[plant], **TINY)


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("name", ["yolov5n", "yolov8n"])
def test_predictions_and_detections_are_on_the_images_device(
        monkeypatch: pytest.MonkeyPatch, name: str, multi_label: bool) -> None:
    monkeypatch.setattr(nms, "MAX_CANDIDATES", 10)
    detections = detect(name, "cuda", multi_label)
    assert [(tuple(each.shape), each.device.type) for each in detections] == [((5, 6), "cuda")] * 2
    with pytest.raises((RuntimeError, TypeError)):  # negative control
        detect(name, "cpu", multi_label)


def detect(name: str, boxes_on: str, multi_label: bool) -> list[Tensor]:
    """Detections in two blank images on a fake CUDA device, the boxes moved elsewhere in between."""
    family, model = find_family(name), build_model(name, 3).eval()
    with FakeTensorMode(), torch.no_grad():
        levels = moved(model, "cuda")(torch.zeros(2, 3, 64, 64, device="cuda"))
        boxes, scores = family.decode(model.head, levels)
        with Answers():
            return nms.select(boxes.to(boxes_on), scores, confidence=0.1, iou=0.5, max_detections=100,
                              multi_label=multi_label)
