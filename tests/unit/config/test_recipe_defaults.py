"""The batch and the microbatch that a start chooses, for numbers of workers and sizes of data sets."""

from __future__ import annotations

import itertools

import pytest

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe, default_microbatch, divisors, resolve, resolved_batch
from ray_yolo.core.errors import ConfigError
from ray_yolo.sinks.report import dry_placement_line, placement_line

WORKERS = (1, 2, 3, 8, 16)
IMAGES = (8, 205, 100_000)  # sizes of data sets: they decide nothing
BARE = {1: (16, 16), 2: (32, 16), 3: (48, 16), 8: (128, 16), 16: (256, 16)}
OF_64 = {1: 16, 2: 16, 3: 16, 8: 8, 16: 4}


@pytest.mark.parametrize(("workers", "images"), itertools.product(WORKERS, IMAGES))
def test_the_table_of_defaults(workers: int, images: int) -> None:
    bare = resolve(Recipe(), workers, gpu=False)
    assert resolved_batch(bare) == BARE[workers]
    assert resolved_batch(resolve(Recipe(batch_size=64), workers, gpu=False)) == (64, OF_64[workers])
    repeated = Recipe(batch_size=bare.batch_size, microbatch=bare.microbatch)
    assert resolved_batch(resolve(repeated, 1, gpu=False)) == BARE[workers]  # the two flags that are printed


def test_more_workers_than_microbatches_of_four_are_refused() -> None:
    with pytest.raises(ConfigError):
        resolve(Recipe(batch_size=64), 17, gpu=False)
    assert resolve(Recipe(batch_size=64, microbatch=2), 17, gpu=False).microbatch == 2  # asked for


def test_the_microbatch_is_a_law_of_the_batch() -> None:
    for batch, workers in itertools.product(range(1, 140), (1, 2, 3, 5, 8, 16)):
        micro = default_microbatch(batch, workers)
        steps = max(round(64 / batch), 1) * batch
        assert batch % micro == 0
        assert micro >= min(batch, 4)
        fitting = [number for number in divisors(batch) if 4 <= number <= 16 and steps // number >= workers]
        if fitting:
            assert micro == max(fitting), (batch, workers)
        if workers == 1 and batch <= 16:
            assert micro == batch


@pytest.mark.parametrize(("asked", "workers", "said"), [
    ({}, 2, "batch_size follows the workers; the same weights on another number of workers: "
            "add --batch-size 32 --microbatch 16"),
    ({}, 1000, "batch_size follows the workers and is 16000, 250 times the nominal batch of 64 that the learning rate "
               "is for (--batch-size sets it); the same weights on another number of workers: add --batch-size 16000 "
               "--microbatch 16"),
    ({"batch_size": 64}, 2, ""),
    ({"batch_size": 64}, 8, "microbatch is 8 instead of 16, because each worker needs one; the same weights on another "
                            "number of workers: add --batch-size 64 --microbatch 8"),
    ({"batch_size": 64, "microbatch": 8}, 8, ""),
    ({"batch_size": 64, "sync_bn": True}, 8, ""),
    ({"sync_bn": True}, 2, "batch_size follows the workers; the same weights on another number of workers: "
                           "add --batch-size 32"),
])
def test_a_start_prints_the_flags_that_repeat_its_weights(asked: dict[str, object], workers: int, said: str) -> None:
    recipe = Recipe.model_validate(asked)
    assert placement_line(recipe, resolve(recipe, workers, gpu=False)) == said


@pytest.mark.parametrize(("asked", "names"), [
    ({}, "batch_size (workers), precision (processors), threads (CPUs of a worker)"),
    ({"batch_size": 64}, "precision (processors), threads (CPUs of a worker)"),
    ({"batch_size": -1}, "batch_size (workers), microbatch (workers), precision (processors), threads (CPUs of a "
                         "worker)"),
    ({"batch_size": 64, "precision": "fp32", "exact": True}, ""),
])
def test_a_dry_run_names_the_settings_that_follow_the_placement(asked: dict[str, object], names: str) -> None:
    recipe = Recipe.model_validate(asked)
    line = dry_placement_line(recipe, resolve(recipe, Placement(num_workers=2).max_workers, gpu=False))
    assert line == (f"settings that follow the placement: {names}" if names else "")
