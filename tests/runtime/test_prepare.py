"""What is decided at a first start: the batch under AutoBatch, from what every worker says that it holds."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from ray_yolo.config import Placement, Recipe
from ray_yolo.runtime import cluster
from ray_yolo.runtime.prepare import decide, read_dataset
from ray_yolo.runtime.trainer import fit
from tests.support.jobs import make_config


def test_autobatch_is_decided_by_the_smallest_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ask_every_worker", lambda *_: [9, 5, 7])
    recipe = make_config(tmp_path, 3, batch_size=-1, microbatch=None).recipe
    decided = decide(recipe, Placement(num_workers=3), read_dataset(recipe)[1], gpus=1.0)
    assert (decided.batch_size, decided.microbatch) == (15, 5)


def test_what_autobatch_decided_stays_when_the_run_goes_on(tmp_path: Path) -> None:
    config = make_config(tmp_path, 0, {"name": "auto"}, batch_size=-1, microbatch=None, epochs=1)
    record = json.loads((fit(config, quiet=True).run_dir / "run.json").read_text())
    assert record["asked"]["batch_size"] == -1
    assert record["recipe"]["batch_size"] == record["recipe"]["microbatch"] == 16


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_every_worker_is_asked_at_the_same_time(tmp_path: Path) -> None:
    def wait_for_all(folder: Path, number: int) -> bool:
        (folder / str(os.getpid())).touch()
        deadline = time.monotonic() + 60
        while len(list(folder.iterdir())) < number and time.monotonic() < deadline:
            time.sleep(0.05)
        return len(list(folder.iterdir())) == number

    placement = Placement(num_workers=3)
    cluster.connect(placement)
    assert cluster.ask_every_worker(wait_for_all, (tmp_path, 3), placement, 0.0) == [True, True, True]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_autobatch_goes_through_the_cluster(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(make_config(tmp_path, 2, batch_size=-1, microbatch=None).recipe)
    decided = decide(recipe, Placement(num_workers=2), read_dataset(recipe)[1], gpus=0.0)
    assert (decided.batch_size, decided.microbatch) == (32, 16)
