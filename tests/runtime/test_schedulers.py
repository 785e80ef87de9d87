"""Settings become Ray's own schedulers."""

from __future__ import annotations

import pytest
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, MedianStoppingRule, PopulationBasedTraining

from ray_yolo.ops.evolution import Gene, Space
from ray_yolo.runtime.schedulers import build_scheduler
from ray_yolo.tune_search import Search

SPACE = Space((Gene("lr0", low=0.001, high=0.1, log=True), Gene("scale", low=0.0, high=0.9),
               Gene("close", "int", 1, 10), Gene("name", "choice", values=("SGD", "AdamW"))), ({},))


@pytest.mark.parametrize(("name", "kind"), [
    ("none", FIFOScheduler), ("asha", AsyncHyperBandScheduler), ("median", MedianStoppingRule),
    ("pbt", PopulationBasedTraining)])
def test_each_name_is_one_of_rays_classes(name: str, kind: type) -> None:
    assert type(build_scheduler(Search.model_validate({"scheduler": name}), SPACE, 90)) is kind


def test_what_pbt_explores_stays_within_the_limits() -> None:
    scheduler = build_scheduler(Search.model_validate({"scheduler": {"name": "pbt", "resample": 0.3}}), SPACE, 90)
    config = {"trial": 3, "genes": {"lr0": 0.1, "scale": 0.9, "close": 10, "name": "SGD"}, "origin": None}
    donor = type("Donor", (), {"config": config})()
    moved = set()
    for _ in range(200):
        genes = scheduler._get_new_config(None, donor)[0]["genes"]
        assert 0.001 <= genes["lr0"] <= 0.1
        assert 0.0 <= genes["scale"] <= 0.9
        assert genes["close"] in range(1, 11)
        assert genes["name"] in ("SGD", "AdamW")
        moved.add(tuple(genes.values()))
    assert len(moved) > 50
