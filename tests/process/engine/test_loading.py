"""Loader processes give the batches of a training without them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ray_yolo.engine.spec import WorkerContext
from tests.support.jobs import build_training, make_spec

RECIPE = {"batch_size": 16, "microbatch": 16, "epochs": 2, "augment": {"mosaic": 0.5}}


def batches(folder: Path, *, processes: int, epoch: int, images_done: int = 0, last: int) -> list[dict[str, Tensor]]:
    spec = make_spec(folder, num_images=37, **RECIPE)
    loaders = build_training(spec, WorkerContext(loader_processes=processes)).team.loaders
    loaders.sampler.start(epoch, images_done, None, last)
    return [dict(batch) for batch in loaders.train]


def test_processes_that_load_parts_and_go_on_give_the_same_batches(tmp_path: Path) -> None:
    """37 images: the last microbatch of an epoch has 5, and the next epoch's first ones follow it."""
    expected = batches(tmp_path, processes=0, epoch=0, last=0)
    expected += batches(tmp_path, processes=0, epoch=1, last=1)
    assert [len(batch["images"]) for batch in expected] == [16, 16, 5] * 2
    for images_done in (0, 16):  # from the start, and resumed
        found = batches(tmp_path, processes=2, epoch=0, images_done=images_done, last=1)
        assert len(found) == len(expected[images_done // 16:])
        for one, other in zip(expected[images_done // 16:], found, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(value, other[name]) for name, value in one.items())
