"""Detections equal those of validation, in pixels of the image, for all settings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ray_yolo import api
from ray_yolo.api import YOLO
from ray_yolo.cli import parse_export, parse_predict, parse_serve, parse_val
from ray_yolo.config.commands import DetectConfig
from ray_yolo.config.sections import EvaluateConfig
from ray_yolo.core.errors import InputError
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.dataset import ValDataset, cut_batches
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.evaluate import evaluate
from ray_yolo.inference import export
from ray_yolo.inference import predictor as module
from ray_yolo.inference.predictor import (
    Predictor,
    Trained,
    build_predictor,
    check_classes,
    load_trained,
    to_network,
    warn_of_classes,
)
from ray_yolo.runtime import predictor as prediction
from ray_yolo.runtime import serving, validator
from tests.support.jobs import NAMES, make_dataset, make_index
from tests.support.pictures import smooth_picture, write_image
from tests.support.weights import make_weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return load_trained(make_weights(tmp_path_factory.mktemp("weights")))


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    return smooth_picture(90, 150, seed=3)


def predictor(trained: Trained, **settings: object) -> Predictor:
    return build_predictor(trained, DetectConfig.model_validate(settings))


def test_only_trained_classes_are_detected_unless_others_are_asked_for(
        tmp_path: Path, image: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    part = load_trained(make_weights(tmp_path, classes=(0,)))
    whole = replace(part, recipe=part.recipe.model_copy(update={"classes": None}))
    found = predictor(whole, confidence=0.01)(image)
    assert set(found[:, 5]) == {0.0, 1.0}
    of_one = predictor(whole, confidence=0.01, classes=(0,))(image)
    assert np.array_equal(predictor(part, confidence=0.01)(image), of_one)
    assert np.array_equal(predictor(part, confidence=0.01, classes=(0, 1))(image), found)
    warn_of_classes(part, (0, 1))
    assert not caplog.messages
    warn_of_classes(part)
    assert "of 2 classes, only 0 dark are used" in caplog.messages[0]


def test_the_network_sees_an_image_as_in_validation(tmp_path: Path) -> None:
    nothing = np.zeros(0, np.int64)
    for size in ((48, 64), (64, 64), (200, 90), (37, 301), (64, 20)):
        picture = smooth_picture(*size)
        path = write_image(tmp_path / "{}x{}.png".format(*size), picture)
        index = AnnotationIndex((str(path),), np.array([size], np.int32), np.zeros(2, np.int64), nothing,
                                np.zeros((0, 4), np.float32), ("a",))
        batch = ValDataset(index, ImageStore(index, 64, smooth=True), cut_batches(index, 64, 1, 32))[0]
        pixels, ratio, pad = to_network(picture, 64, 32)
        assert np.array_equal(batch["images"][0].permute(1, 2, 0).numpy(), pixels), size
        assert batch["ratios"][0].tolist() == pytest.approx(ratio), size
        assert batch["pads"][0].tolist() == list(pad), size


def test_detections_equal_those_of_validation(trained: Trained, tmp_path: Path) -> None:
    index = make_index(tmp_path, 5)
    store = ImageStore(index, 64, smooth=True)
    batches = ValDataset(index, store, cut_batches(index, 64, 5, 32))
    loss = trained.family.build_loss(trained.model.head, trained.recipe.loss, 2, 64)
    config = EvaluateConfig(confidence=0.25, iou=0.45, max_detections=1000)
    detections = evaluate(trained.model, trained.family, loss, (batches[0],), index, config, "fp32", Collectives(),
                     torch.device("cpu")).detections
    detect = predictor(trained)
    for number in range(5):
        mine = detect(store.load(number))
        best = detections[detections[:, 0] == number, 1:7]  # validation gives each class of a box, use its best one
        rows = [best[np.abs(best - row).max(1).argmin()] for row in mine]
        assert len(mine) > 5
        assert np.abs(np.array(rows) - mine).max() < 1e-3


def test_detections_are_sorted_and_inside_the_image(trained: Trained, image: np.ndarray) -> None:
    detections = predictor(trained)(image)
    assert len(detections) > 5
    assert detections.dtype == np.float32
    assert (np.diff(detections[:, 4]) <= 0).all()
    assert (detections[:, 4] > 0.25).all()
    assert (detections[:, :4] >= 0).all()
    assert (detections[:, :4] <= (150, 90, 150, 90)).all()


def test_the_best_are_the_same_whatever_the_limits(trained: Trained, image: np.ndarray) -> None:
    everything = predictor(trained)(image)
    assert np.array_equal(predictor(trained, max_detections=3)(image), everything[:3])
    bold = everything[everything[:, 4] > 0.4]
    assert 0 < len(bold) < len(everything)
    assert np.array_equal(predictor(trained, confidence=0.4)(image), bold)


def test_a_class_filter_selects_from_all_detections(trained: Trained, image: np.ndarray) -> None:
    everything = predictor(trained)(image)
    parts = [predictor(trained, classes=(number,))(image) for number in range(2)]
    assert all(len(part) for part in parts)
    for number, part in enumerate(parts):
        assert np.array_equal(part, everything[everything[:, 5] == number])
    assert np.array_equal(predictor(trained, classes=(0, 1))(image), everything)


def test_agnostic_suppression_keeps_fewer(trained: Trained, image: np.ndarray) -> None:
    assert 0 < len(predictor(trained, agnostic_nms=True, iou=0.2)(image)) < len(predictor(trained, iou=0.2)(image))


def test_the_image_size_is_that_of_the_training_unless_given(trained: Trained) -> None:
    assert predictor(trained).imgsz == 64
    assert predictor(trained, imgsz=96).imgsz == 96


def test_concurrent_threads_give_the_same_detections(trained: Trained) -> None:
    detect, pictures = predictor(trained), [smooth_picture(60, 80, seed=seed) for seed in range(8)]
    alone = [detect(picture).tobytes() for picture in pictures]
    with ThreadPoolExecutor(4) as pool:
        assert [detections.tobytes() for detections in pool.map(detect, pictures)] == alone
    assert len(set(alone)) == 8


def test_an_unknown_class_is_refused() -> None:
    check_classes((0, 1), NAMES)
    check_classes(None, NAMES)
    for number in (2, -1):
        with pytest.raises(InputError):
            check_classes((0, number), NAMES)


@pytest.mark.parametrize("suppress", [False, True])
@pytest.mark.parametrize("command", ["val", "predict", "export", "serve", "api"])
def test_an_iou_without_effect_is_said_once(
        trained: Trained, tmp_path: Path, command: str, suppress: bool, caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*given: str) -> None:
        match command:
            case "val":
                validator.check(parse_val(["--weights", weights, "--data", data, *given]).config)
            case "predict":
                prediction.check(parse_predict(["--weights", weights, "--source", str(tmp_path), *given]).config)
            case "export":
                export.check(parse_export(["--weights", weights, "--format", "torchscript", *given]).config)
            case "serve":
                config = parse_serve(["--weights", weights, *given]).config
                serving.Model(*serving.application(config)._bound_deployment.init_args[1]._bound_deployment.init_args)
            case "api":
                YOLO(weights).predict(smooth_picture(64, 64), **dict([("iou", 0.5)] * len(given[:1])))

    for user in (validator, prediction, export, serving, api):
        name = "open_weights" if hasattr(user, "open_weights") else "load_trained"
        monkeypatch.setattr(user, name, lambda _: family)
    module._warn_once.cache_clear()
    family = replace(trained, family=trained.family._replace(suppress=suppress))
    weights, data = str(tmp_path / "best.pt"), str(make_dataset(tmp_path, 1))
    Path(weights).touch()

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == module.__name__]

    check()
    assert warnings() == []
    for _ in range(2):
        check("--iou-thres", "0.5")
    assert warnings() == ["iou is ignored: this model's detections need no non-maximum suppression"] * (not suppress)
