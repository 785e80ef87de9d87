"""AutoBatch: the line fitted to measured steps, and a step of the resulting size on a real GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from ray_yolo.config.recipe import Recipe, resolve
from ray_yolo.core.errors import ConfigError
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.engine import autobatch
from ray_yolo.engine.autobatch import LARGEST, _step_bytes, auto_batch, images_that_fit, labels_of_a_crowd
from ray_yolo.models.criterion import LossSums
from ray_yolo.models.families import build_model, find_family

CPU = torch.device("cpu")


def test_the_line_through_the_measured_steps_gives_the_number_of_images() -> None:
    sizes, used = (1, 2, 4, 8, 16), [130, 160, 220, 340, 580]  # 100 + 30 n
    assert images_that_fit(sizes, used, 1000) == 30
    assert images_that_fit(sizes, used, 1030) == 31
    assert images_that_fit(sizes[:2], used[:2], 1000) == 30  # a small GPU ran out of memory at 4


@pytest.mark.parametrize(("part", "held", "images"), [(1.0, 0, 80), (2.0, 0, 80), (0.5, 0, 40),
                                                      (0.5, 10 * 10**9, 30)])
def test_a_worker_with_a_part_of_a_gpu_takes_that_part_of_its_memory(
        monkeypatch: pytest.MonkeyPatch, part: float, held: int, images: int) -> None:
    """A step of n images takes n GB, a GPU has 100 GB; the network has next to nothing."""
    class Network(torch.nn.Linear):
        head = None

        def to(self, *_: object, **__: object) -> Network:
            return self

    monkeypatch.setattr(autobatch, "build_model", lambda model, num_classes: Network(1, 1))
    monkeypatch.setattr(autobatch, "find_family", lambda model: SimpleNamespace(build_loss=lambda *_: None))
    monkeypatch.setattr(autobatch, "_step_bytes", lambda network, loss, recipe, size, labels: size * 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 10**9, 0))
    recipe = resolve(Recipe(batch_size=-1), 1, gpu=True)
    assert auto_batch(recipe, "yolov5n", 3, 1, torch.device("cuda"), part, held) == images


def test_a_useless_line_gives_sixteen() -> None:
    for used, room in [
        ([130], 1000),  # one point is no line
        ([130, 130], 1000),  # falling or flat: not measured
        ([130, 160], 110),  # not even one image
        ([130, 160], 100 + 30 * (LARGEST + 1)),
    ]:
        assert images_that_fit((1, 2)[: len(used)], used, room) == 16, (used, room)


def test_without_a_gpu_a_worker_trains_sixteen() -> None:
    recipe = resolve(Recipe(batch_size=-1), 3, gpu=False)
    assert auto_batch(recipe, "yolov5n", 3, 1, CPU) == 16


def test_the_measured_images_have_as_many_labels_as_the_crowded_ones() -> None:
    """One crowd in 200 images does not count, two in 100 do; a set without labels, and one without images."""
    for labels, expected in [([5] * 199 + [300], 5), ([5] * 98 + [300] * 2, 300), ([0] * 10, 1), ([], 1)]:
        offsets = np.concatenate([[0], np.cumsum(labels, dtype=np.int64)])
        index = AnnotationIndex(tuple(map(str, range(len(labels)))), np.full((len(labels), 2), 64, np.int32), offsets,
                                np.zeros(offsets[-1], np.int64), np.zeros((offsets[-1], 4), np.float32), ("a",))
        assert labels_of_a_crowd(index) == expected, labels


def test_a_measured_step_has_these_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    network, seen = build_model("yolov8n", 3), list[Tensor]()
    loss = find_family("yolov8n").build_loss(network.head, Recipe().loss, 3, 64)
    measure = loss.measure

    def observed(levels: Sequence[Tensor], targets: Tensor, image_size: tuple[int, int]) -> LossSums:
        seen.append(targets)
        return measure(levels, targets, image_size)

    monkeypatch.setattr(loss, "measure", observed)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(reset_peak_memory_stats=lambda device: None,
                                                       max_memory_reserved=lambda device: 7))
    recipe = resolve(Recipe(imgsz=64, precision="fp32"), 1, gpu=False)
    assert _step_bytes(network, loss, recipe, 2, 5) == 7
    assert seen[0][:, 0].long().bincount(minlength=2).tolist() == [5, 5]


def test_what_fits_into_the_smallest_worker_becomes_the_microbatch() -> None:
    for asked, workers, fits, batch, microbatch in [
        ({"batch_size": -1}, 3, 10, 30, 10),
        ({"batch_size": -1, "microbatch": 4}, 3, 10, 12, 4),  # only a microbatch is in memory at once
        ({"batch_size": -1, "sync_bn": True}, 2, 10, 20, 20),
        ({}, 2, 10, 32, 16),  # not asked for
    ]:
        recipe = resolve(Recipe.model_validate(asked), workers, gpu=False, images_per_worker=fits)
        assert (recipe.batch_size, recipe.microbatch) == (batch, microbatch), (asked, workers)


def test_a_given_batch_is_never_changed() -> None:
    assert resolve(Recipe(batch_size=24), 2, gpu=False, images_per_worker=5).batch_size == 24
    with pytest.raises(ConfigError):
        resolve(Recipe(batch_size=None, microbatch=7), 1, gpu=False)
