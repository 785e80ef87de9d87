"""Validation of a detector with hand-written detections, so that its metrics are known."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ray_yolo.config.sections import EvaluateConfig
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.evaluate import BITS, Evaluation, combine, evaluate, evaluate_batches, per_class
from ray_yolo.engine.spec import WorkerContext
from ray_yolo.engine.team import val_loader
from ray_yolo.models.criterion import LossSums
from ray_yolo.models.families import Family, fit_nothing
from ray_yolo.models.heads import Predictions

CPU = torch.device("cpu")
IMGSZ = 64
SIZES = {"flat": (48, 64), "large": (96, 128), "tall": (64, 32)}  # (height, width); the second is halved
PLACES = {"flat": (1.0, 8, 16), "large": (0.5, 8, 16), "tall": (1.0, 16, 16)}  # ratio, top and left of the padding
Found = tuple[float, float, float, float, float, int]  # x1, y1, x2, y2, score, class in pixels of the original


@dataclass(frozen=True)
class Scene:
    """One image: its shape, its labels (x1, y1, x2, y2, class), and its detections."""

    form: str
    labels: tuple[tuple[float, float, float, float, int], ...] = ()
    found: tuple[Found, ...] = ()
    loss: float = 0.0  # sum of the image's box loss


@dataclass(frozen=True)
class Scenes:
    """A data set on disk whose images are plain: image n has the grey 10 n everywhere."""

    folder: Path
    scenes: tuple[Scene, ...]
    config: EvaluateConfig = field(default_factory=lambda: EvaluateConfig(batch_size=2))
    names: tuple[str, ...] = ("a", "b")

    def write(self) -> None:
        for number, scene in enumerate(self.scenes):
            assert cv2.imwrite(str(self.folder / f"{number}.png"), np.full((*SIZES[scene.form], 3), 10 * number))

    @property
    def index(self) -> AnnotationIndex:
        labels = [scene.labels for scene in self.scenes]
        flat = np.array([label for each in labels for label in each]).reshape(-1, 5)
        return AnnotationIndex(
            tuple(str(self.folder / f"{number}.png") for number in range(len(labels))),
            np.array([SIZES[scene.form] for scene in self.scenes], np.int32),
            np.cumsum([0, *map(len, labels)]), flat[:, 4].astype(np.int64), flat[:, :4].astype(np.float32), self.names)


class Seer(nn.Module):
    """Recognises an image by its grey and returns its scene's detections, in pixels of the network input."""

    def __init__(self, scenes: Scenes) -> None:
        super().__init__()
        self.scenes, self.num_classes, self.head = scenes.scenes, len(scenes.names), SimpleNamespace(strides=(32,))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        assert not self.training
        middle = images[:, 0, images.shape[2] // 2, images.shape[3] // 2]
        known = [self.scenes[round(grey * 255 / 10)] for grey in middle.tolist()]
        most = max(len(scene.found) for scene in self.scenes)
        levels = torch.zeros(len(known), most, 4 + self.num_classes)  # a score of 0 is nothing
        for rows, scene in zip(levels, known, strict=True):
            ratio, top, left = PLACES[scene.form]
            for row, (x1, y1, x2, y2, score, kind) in zip(rows, scene.found, strict=False):
                row[:4] = torch.tensor([x1 * ratio + left, y1 * ratio + top, x2 * ratio + left, y2 * ratio + top])
                row[4 + kind] = score
        return levels, torch.tensor([scene.loss for scene in known])


class KnownLoss:
    """The box term is the mean of the scenes' losses over all images."""

    names, num_counts = ("box", "obj", "cls"), 1

    def measure(self, levels: tuple[Tensor, ...], targets: Tensor, image_size: tuple[int, int]) -> LossSums:
        sums = torch.stack([levels[1].sum(), torch.zeros(()), torch.tensor(float(len(targets)))])
        return LossSums(sums[:, None], torch.full((3, 1), float(len(levels[1]))))

    def terms(self, numerators: Tensor, counts: Tensor) -> Tensor:
        return (numerators / counts).sum(1)


class TwoMinded(Seer):
    """Finds every box as both classes, with one score."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        levels, losses = super().forward(images)
        levels[..., 4:] = levels[..., 4:].amax(-1, keepdim=True)
        return levels, losses


def run(collectives: Collectives, scenes: Scenes, seer: type[Seer] = Seer) -> Evaluation:
    index, store = scenes.index, ImageStore(scenes.index, IMGSZ, smooth=True)
    loader = val_loader(index, store, IMGSZ, 32, scenes.config.batch_size, WorkerContext(), collectives)
    family = Family({}, fit_nothing, lambda *_: KnownLoss(),
                    lambda head, levels: Predictions(levels[0][..., :4], levels[0][..., 4:]))
    return evaluate(seer(scenes), family, KnownLoss(), loader, index, scenes.config, "fp32", collectives, CPU)


LABEL, BESIDE, THIN = (8, 8, 40, 40), (50, 2, 60, 12), (4, 8, 28, 40)
FIVE_IMAGES = (  # in three batches: two, two, and the one of another form
    Scene("flat", ((*LABEL, 0),), ((*LABEL, 0.9, 0),), loss=1.0),
    Scene("flat", ((*LABEL, 0), (*BESIDE, 1)), ((*LABEL, 0.8, 0), (*BESIDE, 0.9, 1)), loss=2.0),
    Scene("flat", ((*LABEL, 0),), ((*LABEL, 0.7, 0),), loss=4.0),
    Scene("large", ((16, 16, 80, 80, 0),), ((16, 16, 80, 80, 0.6, 0), (90, 4, 110, 30, 0.75, 0)), loss=8.0),
    Scene("tall", ((*THIN, 1),), ((4, 8, 28, 32.5, 0.5, 1),), loss=16.0),  # overlap 24.5 / 32 = 0.766
)


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    return write(tmp_path_factory.mktemp("five"), FIVE_IMAGES)


def write(folder: Path, scenes: tuple[Scene, ...]) -> Scenes:
    made = Scenes(folder, scenes)
    made.write()
    return made


def test_the_losses_of_the_images_by_hand_have_the_mean_of_the_data_set(five: Scenes) -> None:
    """The parts of a validation may come in any order."""
    index, family = five.index, Family({}, fit_nothing, lambda *_: KnownLoss(), lambda head, levels: Predictions(
        levels[0][..., :4], levels[0][..., 4:]))
    parts = []
    for worker in (1, 0):
        store = ImageStore(index, IMGSZ, smooth=True)
        loader = val_loader(index, store, IMGSZ, 32, five.config.batch_size, WorkerContext(), Collectives(worker, 2))
        parts.append(evaluate_batches(Seer(five), family, KnownLoss(), loader, index, five.config, "fp32", CPU,
                                      per_image=True))
    evaluation = combine(parts, KnownLoss(), index)
    losses = evaluation.image_losses
    assert losses is not None
    assert losses.tolist() == [[1, 0, 1], [2, 0, 2], [4, 0, 1], [8, 0, 1], [16, 0, 1]]
    assert losses.mean(0) == pytest.approx(list(evaluation.losses.values()))
    assert run(Collectives(), five).image_losses is None


def test_every_image_is_in_one_batch_of_one_worker(five: Scenes) -> None:
    index = five.index
    store = ImageStore(index, IMGSZ, smooth=True)
    for workers, batch_size in product((1, 2, 3, 4, 7), (1, 2, 3)):
        ranks = [Collectives(rank, workers) for rank in range(workers)]
        shares = [val_loader(index, store, IMGSZ, 32, batch_size, WorkerContext(), rank) for rank in ranks]
        seen = [image for share in shares for batch in share for image in batch["indices"].tolist()]
        assert sorted(seen) == [0, 1, 2, 3, 4], (workers, batch_size)


def test_detections_are_in_the_original_images_pixels(five: Scenes) -> None:
    found = run(Collectives(), five)
    expected = [[image, *found] for image, scene in enumerate(FIVE_IMAGES) for found in
                sorted(scene.found, key=lambda found: -found[4])]
    assert np.allclose(found.detections[:, :7], expected, atol=1e-4)
    correct = (found.detections[:, 7:].astype(int) & BITS) > 0
    assert correct.sum(1).tolist() == [10, 10, 10, 10, 0, 10, 6]


def test_a_class_has_its_images_labels_and_numbers(five: Scenes) -> None:
    a, b = per_class(run(Collectives(), five), five.index)
    assert (a.name, a.images, a.labels) == ("a", 4, 4)
    assert (b.name, b.images, b.labels) == ("b", 2, 2)
    assert (a.precision, b.precision) == pytest.approx((4 / 5, 1))
    areas = [area for row in (a, b) for area in (row.map50, row.map50_95)]
    assert areas == pytest.approx([0.895, 0.895, 0.995, 0.847], abs=0.003)


CROWDED = Scene("flat", ((*LABEL, 0),), (
    (*LABEL, 0.9, 0), (8, 8, 40, 24, 0.8, 0), (8, 8, 40, 36, 0.7, 0), (8, 8, 40, 24, 0.6, 1), (*BESIDE, 0.3, 0)))


# the second overlaps the first by 1/2, the third by 7/8 (and the second by 4/7), the fourth is of another class


def test_a_box_may_be_of_several_classes(five: Scenes) -> None:
    one, both = run(Collectives(), five), run(Collectives(), five, TwoMinded)
    assert len(one.detections) > 4
    assert sorted(both.detections[:, 6]) == [0.0] * len(one.detections) + [1.0] * len(one.detections)


def test_detections_are_selected_by_the_recipe(tmp_path: Path) -> None:
    scenes = write(tmp_path, (CROWDED,))
    for config, kept in [
        ({"iou": 0.6}, [0.9, 0.8, 0.6, 0.3]), ({"iou": 0.45}, [0.9, 0.6, 0.3]),
        ({"iou": 0.9}, [0.9, 0.8, 0.7, 0.6, 0.3]), ({"confidence": 0.65}, [0.9, 0.8]),
        ({"max_detections": 2}, [0.9, 0.8]),
    ]:
        found = run(Collectives(), replace(scenes, config=EvaluateConfig(batch_size=2, **config)))
        assert found.detections[:, 5].tolist() == pytest.approx(kept), config


def test_stages_are_measured_between_the_marks_of_a_batch(five: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses, between the second and the third stage, are not counted."""
    marks = itertools.count(0.0)  # one second apart
    monkeypatch.setattr("ray_yolo.engine.evaluate.mark", lambda device: next(marks))
    speed = run(Collectives(), five).speed
    assert list(speed) == ["preprocess", "inference", "postprocess"]
    assert next(marks) == 3 * 5
    own = 3 * 1e3 / 5  # ms an image: three batches, five images
    assert speed["inference"] == own
    assert own < min(speed["preprocess"], speed["postprocess"])  # with the host's reading and suppression
    assert max(speed.values()) < 1.5 * own
