"""AutoBatch: the line fitted to measured steps, and a step of the resulting size on a real GPU."""

from __future__ import annotations

import pytest
import torch

from ray_yolo.config.recipe import Recipe, resolve
from ray_yolo.engine.autobatch import auto_batch


@pytest.mark.gpu
def test_a_step_of_the_resulting_size_fits_into_the_gpus_memory() -> None:
    device = torch.device("cuda")
    recipe = resolve(Recipe(imgsz=320, batch_size=-1), 1, gpu=True)
    fits = auto_batch(recipe, "yolov5n", 80, 8, device)
    free, total = torch.cuda.mem_get_info(device)
    assert fits > 16
    assert 0.5 * total < free
