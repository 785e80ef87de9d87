"""Validation of trained weights against detections and metrics by plain loops, and the same on Ray to the bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ray_yolo.api import YOLO
from ray_yolo.config.commands import ValConfig
from ray_yolo.core.errors import CheckpointError, DatasetError, InputError
from ray_yolo.inference.predictor import Trained, load_trained
from ray_yolo.models.detector import Detector
from ray_yolo.ops.average_precision import IOU_THRESHOLDS
from ray_yolo.ops.coco_metrics import Detected, Labelled
from ray_yolo.runtime.validator import ValResult, validate
from ray_yolo.sinks.report import CLASS_HEADER
from tests.support.coco_oracle import reference
from tests.support.jobs import NAMES
from tests.support.pictures import smooth_picture, write_image
from tests.support.slow_metrics import slow_area, slow_match
from tests.support.weights import make_weights

SIZES = [(48, 64), (96, 128), (64, 48), (200, 150), (60, 64), (192, 256), (48, 64), (128, 128), (40, 50)]
FEW = {"confidence": 0.1, "iou": 0.5, "max_detections": 40}  # else plain loops are too slow, and all labels are found
Rows = list[list[float]]  # x1, y1, x2, y2, score, class in the image's own pixels, best first


class Set(NamedTuple):
    """A data set on disk, what a detector finds in its images by plain loops, and what is labelled there."""

    yaml: Path
    found: list[Rows]
    labels: list[Rows]  # x1, y1, x2, y2, class


def overlap(a: list[float], b: list[float]) -> float:
    """Intersection over union of two boxes."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0.0) * max(height, 0.0)
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def slow_candidates(model: Detector, image: np.ndarray) -> Rows:
    """Every class of every cell and anchor above the confidence, in pixels of the network input."""
    with torch.no_grad():
        levels = model(torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255)
    rows: Rows = []
    for level, anchors, stride in zip(levels, model.head.anchors.tolist(), model.head.strides, strict=True):
        for anchor, row, column in np.ndindex(*level.shape[1:4]):
            x, y, w, h, sure, *kinds = map(sigmoid, level[0, anchor, row, column].tolist())
            width, height = (2 * w) ** 2 * anchors[anchor][0] * stride, (2 * h) ** 2 * anchors[anchor][1] * stride
            centre_x, centre_y = (2 * x - 0.5 + column) * stride, (2 * y - 0.5 + row) * stride
            rows += [[centre_x - width / 2, centre_y - height / 2, centre_x + width / 2, centre_y + height / 2,
                      sure * chance, kind] for kind, chance in enumerate(kinds)
                     if sure > FEW["confidence"] and sure * chance > FEW["confidence"]]
    return sorted(rows, key=lambda row: -row[4])


def slow_detections(model: Detector, picture: np.ndarray, *, one_class: bool = False) -> Rows:
    """What is found in a picture: shrunk to a long side of 64, padded with grey, suppressed, brought back."""
    height, width = picture.shape[:2]
    ratio = 64 / max(height, width)
    small = (round(width * ratio), round(height * ratio))
    shrunk = picture if small == (width, height) else cv2.resize(picture, small, interpolation=(
        cv2.INTER_AREA if ratio < 1 else cv2.INTER_LINEAR))
    high, wide = (math.ceil(side * ratio / 32 + 0.5) * 32 for side in (height, width))
    top, left = (high - small[1]) // 2, (wide - small[0]) // 2
    image = np.full((high, wide, 3), 114, np.uint8)
    image[top : top + small[1], left : left + small[0]] = shrunk
    kept: Rows = []
    for row in slow_candidates(model, image):
        row[5] *= not one_class
        if all(row[5] != better[5] or overlap(row, better) <= FEW["iou"] for better in kept):
            kept.append(row)
    scale_x, scale_y = small[0] / width, small[1] / height
    return [[min(max((x1 - left) / scale_x, 0), width), min(max((y1 - top) / scale_y, 0), height),
             min(max((x2 - left) / scale_x, 0), width), min(max((y2 - top) / scale_y, 0), height), score, kind]
            for x1, y1, x2, y2, score, kind in kept[: FEW["max_detections"]]]


def choose_labels(found: Rows, size: tuple[int, int], rng: np.random.Generator) -> Rows:
    """Most of the best and some of the rest, moved a little and one in six of another class, and what is not there."""
    chosen = [row for place, row in enumerate(found) if rng.random() < (0.8 if place < 12 else 0.1)]
    chosen.append([0.0, 0.0, size[1] / 3, size[0] / 3, 0.0, 0])
    labels: Rows = []
    for x1, y1, x2, y2, _, kind in chosen:
        spread = 0.05 * np.array([x2 - x1, y2 - y1] * 2)
        edges = np.clip(np.array([x1, y1, x2, y2]) + rng.normal(0, 1, 4) * spread, 0, (size[1], size[0]) * 2)
        if edges[2] - edges[0] > 2 and edges[3] - edges[1] > 2:
            labels.append([*edges.tolist(), kind if rng.random() < 5 / 6 else 1 - kind])
    return labels


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def trained(weights: Path) -> Trained:
    return load_trained(weights)


@pytest.fixture(scope="module")
def data(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Set:
    """Nine images of many sizes in five padded shapes, of which the third has no label."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    found, labels = [], []
    (folder / "labels" / "val").mkdir(parents=True)
    for number, size in enumerate(SIZES):
        picture = smooth_picture(*size, seed=number)
        write_image(folder / "images" / "val" / f"{number}.png", picture)
        found.append(slow_detections(trained.model, picture))
        labels.append([] if number == 2 else choose_labels(found[-1], size, rng))
        text = "".join(f"{kind:.0f} {(x1 + x2) / 2 / size[1]:.9f} {(y1 + y2) / 2 / size[0]:.9f} "
                       f"{(x2 - x1) / size[1]:.9f} {(y2 - y1) / size[0]:.9f}\n" for x1, y1, x2, y2, kind in labels[-1])
        (folder / "labels" / "val" / f"{number}.txt").write_text(text)
    yaml = folder / "data.yaml"
    yaml.write_text(f"train: images/val\nval: images/val\nnames: [{', '.join(NAMES)}]\n")
    return Set(yaml, found, labels)


def run(weights: Path, data: Set, project: Path, *, quiet: bool = True, **settings: Any) -> ValResult:
    return validate(ValConfig.model_validate({
        "weights": str(weights), "data": str(data.yaml), "coco": True, "evaluate": {**FEW, "batch_size": 2}, **settings,
        "placement": {"project": str(project), **settings.get("placement", {})}}), quiet=quiet)


@pytest.fixture(scope="module")
def local(weights: Path, data: Set, tmp_path_factory: pytest.TempPathFactory) -> ValResult:
    return run(weights, data, tmp_path_factory.mktemp("local"))


def as_one_class(data: Set, model: Detector) -> Set:
    """What is found and labelled where all classes are one."""
    found = [slow_detections(model, smooth_picture(*size, seed=number), one_class=True)
             for number, size in enumerate(SIZES)]
    return Set(data.yaml, found, [[[*label[:4], 0] for label in labels] for labels in data.labels])


def slow_precisions(data: Set, kind: int) -> list[float]:
    """Average precision of a class at each threshold."""
    rows: list[tuple[float, list[bool]]] = []
    for found, labels in zip(data.found, data.labels, strict=True):
        truth = torch.tensor(labels).reshape(-1, 5)
        correct = slow_match(torch.tensor(found).reshape(-1, 6), truth[:, 4], truth[:, :4])
        rows += [(row[4], right) for row, right in zip(found, correct, strict=True) if row[5] == kind]
    rows.sort(key=lambda row: -row[0])
    num_labels = sum(label[4] == kind for labels in data.labels for label in labels)
    return [slow_area([right[level] for _, right in rows], num_labels) for level in range(len(IOU_THRESHOLDS))]


def test_the_average_precisions_are_those_of_plain_loops(local: ValResult, data: Set) -> None:
    slow = np.array([slow_precisions(data, kind) for kind in range(2)])
    assert 0.2 < slow.mean() < slow[:, 0].mean() < 0.9  # neither nothing nor everything is found
    assert local.metrics["mAP50"] == pytest.approx(slow[:, 0].mean(), abs=2e-3)
    assert local.metrics["mAP50-95"] == pytest.approx(slow.mean(), abs=2e-3)
    for row, precisions in zip(local.per_class, slow, strict=True):
        assert (row["mAP50"], row["mAP50-95"]) == pytest.approx((precisions[0], precisions.mean()), abs=2e-3)
    counts = [(row["name"], row["images"], row["labels"]) for row in local.per_class]
    kinds = [[label[4] for label in labels] for labels in data.labels]
    assert counts == [(name, sum(kind in some for some in kinds), sum(some.count(kind) for some in kinds))
                      for kind, name in enumerate(NAMES)]


def test_as_a_single_class_every_label_and_every_detection_is_of_one(
        weights: Path, trained: Trained, data: Set, tmp_path: Path, local: ValResult) -> None:
    result = run(weights, data, tmp_path, single_cls=True)
    [row] = result.per_class
    assert (row["name"], row["labels"]) == ("item", sum(map(len, data.labels)))
    slow = slow_precisions(as_one_class(data, trained.model), 0)
    assert result.metrics["mAP50"] == pytest.approx(slow[0], abs=2e-3)
    assert result.metrics["mAP50-95"] == pytest.approx(np.mean(slow), abs=2e-3)
    assert abs(result.metrics["mAP50"] - local.metrics["mAP50"]) > 0.01


def test_the_coco_numbers_are_those_of_pycocotools_on_detections_by_plain_loops(local: ValResult, data: Set) -> None:
    found = np.array([[image, *row] for image, rows in enumerate(data.found) for row in rows])
    labels = np.array([[image, *row] for image, rows in enumerate(data.labels) for row in rows])
    sides = labels[:, 3:5] - labels[:, 1:3]
    expected = reference(
        Detected(found[:, 0].astype(int), found[:, 6].astype(int), found[:, 5], found[:, 1:5]),
        Labelled(labels[:, 0].astype(int), labels[:, 5].astype(int), labels[:, 1:5], sides.prod(1),
                 np.zeros(len(labels), bool)), COCO, COCOeval)
    assert list(local.coco.values()) == pytest.approx(expected, abs=2e-3)
    assert len(expected) == 12


def test_results_are_written_and_printed(
        weights: Path, data: Set, tmp_path: Path, local: ValResult, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(weights, data, tmp_path, quiet=False)
    assert result.folder == tmp_path / "exp"
    written = json.loads((result.folder / "results.json").read_text())
    for part in ("metrics", "losses", "per_class", "coco"):
        assert written[part] == getattr(result, part) == getattr(local, part)
    messages = capsys.readouterr().out.splitlines()
    everything, *rows = messages[messages.index(CLASS_HEADER) + 1 :]
    assert [line.split()[0] for line in (everything, *rows[:2])] == ["all", *NAMES]
    assert everything.split()[1:3] == [str(len(SIZES)), str(sum(map(len, data.labels)))]
    assert f"{result.metrics['mAP50']:.4g}" in everything
    assert f"{result.coco['ap']:.4f}" in rows[2]


def test_validation_finds_what_prediction_finds_in_jpegs_of_any_size(weights: Path, tmp_path: Path) -> None:
    for number, size in enumerate([(48, 64), (96, 128), (200, 256), (768, 1024), (100, 100)]):
        write_image(tmp_path / "images" / f"{number}.jpg", smooth_picture(*size, seed=number))
    yaml = tmp_path / "data.yaml"
    yaml.write_text(f"train: images\nval: images\nnames: [{', '.join(NAMES)}]\n")
    result = run(weights, Set(yaml, [], []), tmp_path, coco=False, single_cls=True, allow_empty=True,
                 evaluate={**FEW, "batch_size": 1}, save_json=True)
    rows = json.loads((result.folder / "detections.json").read_text())
    for found in YOLO(weights).predict(str(tmp_path / "images"), agnostic_nms=True, **FEW):
        number = int(Path(found.path).stem)
        boxes = np.array([row["bbox"] for row in rows if row["image_id"] == number])
        scores = np.array([row["score"] for row in rows if row["image_id"] == number])
        assert len(found) == len(boxes) > 3, number
        corners = np.column_stack([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]])
        assert np.abs(corners - np.asarray(found.boxes.xyxy)).max() < 2e-3, number
        assert np.abs(scores - np.asarray(found.boxes.conf)).max() < 2e-5, number


def test_images_of_one_name_are_refused_where_it_would_be_their_id(weights: Path, tmp_path: Path) -> None:
    for folder in ("cam0", "cam1"):
        write_image(tmp_path / "images" / folder / "0001.jpg", smooth_picture(48, 64))
    yaml = tmp_path / "data.yaml"
    yaml.write_text(f"train: images\nval: images\nnames: [{', '.join(NAMES)}]\n")
    with pytest.raises(InputError, match=r"cam0/0001\.jpg and .*cam1/0001\.jpg have the same image_id, 1; give"):
        run(weights, Set(yaml, [], []), tmp_path, coco=False, allow_empty=True, save_json=True)


def test_settings_change_what_they_name(weights: Path, data: Set, tmp_path: Path, local: ValResult) -> None:
    assert run(weights, data, tmp_path, imgsz=96).metrics != local.metrics
    assert run(weights, data, tmp_path, split="train").metrics == local.metrics  # the same images here
    assert run(weights, data, tmp_path, precision="bf16").losses != local.losses
    assert run(weights, data, tmp_path, coco=False).coco == {}
    assert run(weights, data, tmp_path, evaluate={**FEW, "max_detections": 10}).coco["ar100"] < local.coco["ar100"]


def test_weights_and_data_that_do_not_fit_are_refused_and_leave_no_folder(
        weights: Path, data: Set, tmp_path: Path) -> None:
    other = data.yaml.with_name("three.yaml")
    other.write_text("train: images/val\nval: images/val\nnames: [a, b, c]\n")
    with pytest.raises(DatasetError, match=r"has 3 classes, but .* has 2"):
        run(weights, data._replace(yaml=other), tmp_path)
    with pytest.raises(CheckpointError, match="no such weights"):
        run(weights.with_name("no.pt"), data, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.smoke
@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_two_ray_workers_find_the_same_to_the_bit(
        weights: Path, data: Set, tmp_path: Path, local: ValResult) -> None:
    result = run(weights, data, tmp_path, placement={"num_workers": 2, "gpus_per_worker": 0, "cpus_per_worker": 1})
    assert result.metrics == local.metrics
    assert result.losses == local.losses
    assert result.per_class == local.per_class
    assert result.coco == local.coco
