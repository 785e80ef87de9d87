"""Suppression in ONNX and TorchScript gives what `select` gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

from ray_yolo.config.commands import NmsConfig
from ray_yolo.engine.export import random_predictions
from ray_yolo.engine.export_nms import Suppression, onnx_suppression
from ray_yolo.ops.nms import select

SETTINGS = [NmsConfig(), NmsConfig(confidence=0.0), NmsConfig(confidence=0.6, iou=0.9), NmsConfig(max_detections=7),
            NmsConfig(agnostic_nms=True), NmsConfig(agnostic_nms=True, max_detections=1), NmsConfig(confidence=0.99)]

Suppress = Callable[[Tensor], np.ndarray]


def in_onnx(settings: NmsConfig, opset: int = 20) -> Suppress:
    model = onnx_suppression(settings, ir_version=10, opset=opset)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda predictions: np.asarray(session.run(None, {"predictions": predictions.numpy()})[0])


def in_torchscript(settings: NmsConfig) -> Suppress:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces TorchScript's end
        traced = torch.jit.trace(Suppression(settings), random_predictions(num_images=1), check_trace=False)
    return lambda predictions: traced(predictions).numpy()


def expected(predictions: Tensor, settings: NmsConfig) -> np.ndarray:
    found = select(predictions[..., :4], predictions[..., 4:], confidence=settings.confidence,
                   iou=settings.iou, max_detections=settings.max_detections, multi_label=False,
                   agnostic=settings.agnostic_nms)
    return np.concatenate([np.insert(rows.numpy(), 0, image, axis=1) for image, rows in enumerate(found)])


@pytest.mark.parametrize("build", [in_onnx, in_torchscript])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_detections_are_those_of_select(build: Callable[[NmsConfig], Suppress], settings: NmsConfig) -> None:
    suppress = build(settings)
    for predictions in (random_predictions(num_images=3), random_predictions(1, 40, 1), random_predictions(2, 500, 9)):
        wanted, found = expected(predictions, settings), suppress(predictions)
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max(initial=0) < 1e-4


def test_the_cases_have_something_to_suppress() -> None:
    predictions = random_predictions()
    sizes = [len(expected(predictions, settings)) for settings in SETTINGS]
    assert sizes[0] > sizes[4] > sizes[5] == 2
    assert sizes[1] > sizes[0] > sizes[3] == 14
    assert sizes[6] < 20


@pytest.mark.parametrize("build", [in_onnx, in_torchscript])
def test_rows_worked_by_hand(build: Callable[[NmsConfig], Suppress]) -> None:
    first = [[0, 0, 10, 10, 0.5, 0.1], [0, 0, 10, 9, 0.9, 0.1], [0, 0, 10, 10, 0.0, 0.8]]
    second = [[5, 5, 9, 9, 0.2, 0.2], [20, 0, 30, 10, 0.1, 0.75], [0, 0, 1, 1, 0.09, 0.09]]
    found = build(NmsConfig())(torch.tensor([first, second]))
    assert found == pytest.approx(np.array([
        [0, 0, 0, 10, 9, 0.9, 0],  # suppresses the first box of its class
        [0, 0, 0, 10, 10, 0.8, 1],
        [1, 20, 0, 30, 10, 0.75, 1]]))  # the others are below 0.25


@pytest.mark.parametrize("opset", [16, 17, 21])
def test_the_graph_is_valid_in_other_operator_sets(opset: int) -> None:
    predictions = random_predictions()
    assert np.array_equal(in_onnx(NmsConfig(), opset)(predictions), in_onnx(NmsConfig())(predictions))
