"""Parts of microbatches: their size, their way to a batch, and the waits that they save."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ray_yolo.config.recipe import Recipe
from ray_yolo.config.sections import AugmentConfig
from ray_yolo.core.structures import MicrobatchPart, SampleKey
from ray_yolo.data.dataset import TrainDataset
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.views import ViewDataset
from ray_yolo.engine.loading import LARGEST_GRID, PREFETCH, loader_memory, microbatches, part_images, prefetched_parts
from tests.support.jobs import make_index

CPU = torch.device("cpu")


def parts_of(keys: list[SampleKey], images: int) -> Iterator[MicrobatchPart]:
    """The parts of one microbatch."""
    for first in range(0, len(keys), images):
        yield MicrobatchPart(tuple(keys[first : first + images]), first, len(keys))


@pytest.mark.parametrize(("fields", "images"), [({}, 3), ({}, 4), ({"quad": True}, 4), ({"leaves_colours": True}, 5)])
def test_parts_become_the_batch_of_the_whole_microbatch(tmp_path: Path, fields: dict[str, bool], images: int) -> None:
    """Two microbatches, the second one short: its last part, or the merged picture of it, is incomplete."""
    index = make_index(tmp_path, 7)
    data = TrainDataset(index, ImageStore(index, 64), AugmentConfig(), 64, 0, 1, **fields)
    keys = [SampleKey(0, position, position % 7, (1, 2, 3)) for position in range(14)]
    sizes = [keys[:8], keys[8:]]
    whole = list(microbatches((data.load(part) for each in sizes for part in parts_of(each, 8)), CPU))
    joined = list(microbatches((data.load(part) for each in sizes for part in parts_of(each, images)), CPU))
    assert len(whole) == len(joined) == 2
    for one, other in zip(whole, joined, strict=True):
        assert one.keys() == other.keys()
        assert "place" not in one
        for name, value in one.items():
            assert torch.equal(value, other[name]), name
            assert value.stride() == other[name].stride(), name
    assert whole[1]["targets"][:, 0].max() == len(whole[1]["images"]) - 1


def test_parts_with_views_become_a_batch_of_the_host(tmp_path: Path) -> None:
    index = make_index(tmp_path, 7)
    data = ViewDataset(index, ImageStore(index, 64), AugmentConfig(), 64, 0, 1, leaves_colours=True,
                       readable=np.ones(7, bool))
    keys = [SampleKey(0, position, position) for position in range(7)]
    [whole], [joined] = (list(microbatches((data.load(part) for part in parts_of(keys, images)), CPU))
                         for images in (7, 3))
    assert whole.keys() == joined.keys() == {"views", "targets", "indices", "colours"}
    for name, value in whole.items():
        assert torch.equal(value, joined[name]), name


def test_the_first_part_is_copied_before_the_second_is_there() -> None:
    """The images are in the batch's memory when the next part is asked for."""
    seen: list[float] = []

    def parts() -> Iterator[dict[str, Tensor]]:
        for number in range(3):
            image = torch.full((1, 3, 2, 2), number + 1, dtype=torch.uint8)
            yield {"images": image, "targets": torch.zeros(0, 6), "place": torch.tensor([number, 3])}
            seen.append(float(image.sum()))
            image.zero_()  # the loader uses its memory again

    [batch] = microbatches(parts(), CPU)
    assert batch["images"][:, 0, 0, 0].tolist() == [1, 2, 3]
    assert len(seen) == 3


@pytest.mark.parametrize(("images", "processes", "recipe", "part", "prefetched"), [
    (16, 0, {}, 16, 2),  # no process: nothing waits for a part
    (64, 15, {}, 5, 2),
    (16, 15, {}, 4, 2),
    (16, 1, {}, 8, 4),  # two microbatches are ready, as ever
    (64, 2, {}, 8, 8),
    (3, 4, {}, 4, 2),
    (64, 15, {"quad": True, "batch_size": 64, "microbatch": 64}, 8, 2),
    (64, 15, {"augment": {"partners": 16}}, 16, 2),  # that share decoded images
])
def test_parts_are_a_few_images_of_which_two_microbatches_are_ready(
        images: int, processes: int, recipe: dict[str, object], part: int, prefetched: int) -> None:
    settings = Recipe.model_validate(recipe)
    assert part_images(settings, images, processes) == part
    assert prefetched_parts(images, part, max(processes, 1)) == prefetched
    assert prefetched * processes * part >= 2 * images or not processes


def test_fifteen_loaders_hold_a_fifteenth_of_the_memory() -> None:
    """Of 64 images of 640 px: 2.4 GB before, when each process had two microbatches ready."""
    part = part_images(Recipe(), 64, 15)
    ready = 15 * prefetched_parts(64, part, 15) * part
    assert pytest.approx(2.4, abs=0.05) == 1e-9 * 3 * 640**2 * 15 * PREFETCH * 64
    assert 1e-9 * 3 * 640**2 * ready == pytest.approx(0.18, abs=0.005)


def test_room_in_shared_memory_is_for_what_any_number_of_loaders_has_ready() -> None:
    recipe = Recipe(batch_size=64, microbatch=64)
    need = loader_memory(recipe, 10_000, 0, gpu=True)
    for processes in range(1, 65):
        part = part_images(recipe, 64, processes)
        ready = processes * prefetched_parts(64, part, processes) * part + 64  # and those of the batch in progress
        assert 3 * ready * recipe.imgsz**2 <= processes * need.per_loader + need.in_use, processes


@pytest.mark.parametrize(("settings", "gpu", "has_pixels"), [
    ({"augment": {"render": "device"}}, True, False), ({"augment": {"render": "device"}}, False, True),
    ({"augment": {"render": "device"}, "quad": True}, True, True), ({}, True, True),
    ({"augment": {"render": "device"}, "changes": ["3: mixup=0.1"]}, True, True),
    ({"changes": ["3: augment.render=device"]}, True, True),
    ({"augment": {"render": "device"}, "changes": ["3: lr0=0.1"]}, True, False)])
def test_samples_that_a_gpu_renders_in_all_epochs_need_no_room_for_pixels(
        settings: dict[str, Any], gpu: bool, has_pixels: bool) -> None:
    """Of 64 images of 640 px: 8 in each process's queue, and 256 in all; validation has its room in any case."""
    recipe = Recipe.model_validate({"batch_size": 64, "microbatch": 64, "epochs": 9, **settings})
    sample = 3 * 640 ** 2 if has_pixels else 16384
    training, both = (loader_memory(recipe, 10_000, num_val, gpu=gpu) for num_val in (0, 1))
    assert training == (PREFETCH * 8 * sample, 4 * 64 * sample)
    assert both.per_loader - training.per_loader == PREFETCH * (640 + LARGEST_GRID) ** 2 * 3


def test_the_room_of_a_sample_without_pixels_is_enough(tmp_path: Path) -> None:
    """For mosaics of images with 150 labels each, and in whole pages."""
    labels = make_index(tmp_path, 8)
    crowded = replace(labels, offsets=np.arange(9) * 150, classes=np.zeros(1200, np.int64),
                      boxes=np.tile(np.array([[10, 8, 50, 40]], np.float32), (1200, 1)))
    data = ViewDataset(crowded, ImageStore(crowded, 64), AugmentConfig(mosaic=1), 64, 0, 1, leaves_colours=True,
                       readable=np.ones(8, bool))
    batch = data.load(MicrobatchPart(tuple(SampleKey(0, image, image) for image in range(8)), 0, 8))
    assert len(batch["targets"]) > 8 * 300
    recipe = Recipe.model_validate({"batch_size": 8, "microbatch": 8, "augment": {"render": "device"}})
    pages = sum(-(-tensor.nbytes // 4096) * 4096 for tensor in batch.values())
    assert pages <= loader_memory(recipe, 8, 0, gpu=True).per_loader / PREFETCH


# A queue of loader processes as torch's, on a clock of its own

IMAGE = 0.0146  # seconds of one loader for an image from a file: 15 of them make 1,030 a second
STEP = 0.041  # seconds of a step of 64 images: 1,560 a second
LOADERS, IMAGES, STEPS, EPOCHS = 15, 64, 16, 8


def simulate(part: int, prefetch: int, image: float, *, goes_on: bool) -> tuple[float, float]:
    """Seconds to the first batch, and images a second of a training of short epochs.

    Each process has `prefetch` parts requested, and one more for each part that the training has taken. Without
    `goes_on` nothing is requested beyond an epoch.
    """
    sizes = [min(part, IMAGES - start) for start in range(0, IMAGES, part)]
    free = [0.0] * LOADERS  # when each process has loaded what is requested of it
    ready: deque[float] = deque()  # when the parts that are requested are loaded
    now = first_batch = 0.0
    requested = 0

    def request(until: int) -> None:
        nonlocal requested
        if requested < until:
            loader = requested % LOADERS
            free[loader] = max(free[loader], now) + sizes[requested % len(sizes)] * image
            ready.append(free[loader])
            requested += 1

    for epoch in range(EPOCHS):
        until = (EPOCHS if goes_on else epoch + 1) * STEPS * len(sizes)
        for _ in range(prefetch * LOADERS - len(ready)):
            request(until)
        for _ in range(STEPS):
            for _ in sizes:
                now = max(now, ready.popleft())
                request(until)
            first_batch = first_batch or now
            now += STEP
    return first_batch, EPOCHS * STEPS * IMAGES / now


def test_the_first_batch_comes_many_times_sooner_and_epochs_have_no_gap() -> None:
    part = part_images(Recipe(), IMAGES, LOADERS)
    prefetch = prefetched_parts(IMAGES, part, LOADERS)
    before, former_speed = simulate(IMAGES, PREFETCH, IMAGE, goes_on=False)
    after, speed = simulate(part, prefetch, IMAGE, goes_on=True)
    assert before / after > 12
    assert former_speed < 600
    assert speed > 0.97 * LOADERS / IMAGE  # all that the loaders can make

    cached = IMAGE * 3.5 / 8.1  # from memory the loaders are faster than the device
    _, former_speed = simulate(IMAGES, PREFETCH, cached, goes_on=False)
    _, speed = simulate(part, prefetch, cached, goes_on=True)
    assert former_speed < 0.8 * IMAGES / STEP
    assert speed > 0.98 * IMAGES / STEP


def test_each_of_the_two_changes_is_needed() -> None:
    part = part_images(Recipe(), IMAGES, LOADERS)
    _, parts_alone = simulate(part, prefetched_parts(IMAGES, part, LOADERS), IMAGE, goes_on=False)
    _, both = simulate(part, prefetched_parts(IMAGES, part, LOADERS), IMAGE, goes_on=True)
    whole, _ = simulate(IMAGES, PREFETCH, IMAGE, goes_on=True)
    assert parts_alone < 0.97 * both
    assert whole > 0.9
