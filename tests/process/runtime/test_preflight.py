"""What is decided at a first start: the batch under AutoBatch, from what every worker says that it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.config.placement import Placement
from ray_yolo.runtime.preflight import (
    read_dataset,
    resolve_recipe,
)
from tests.support.jobs import make_config


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_autobatch_goes_through_the_cluster(tmp_path: Path) -> None:
    recipe = make_config(tmp_path, 1, batch_size=-1, microbatch=None).recipe
    decided = resolve_recipe(recipe, Placement(), read_dataset(recipe)[1], gpus=0.0)
    assert (decided.batch_size, decided.microbatch) == (16, 16)
