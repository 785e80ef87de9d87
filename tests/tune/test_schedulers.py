"""Settings become Ray's own schedulers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, MedianStoppingRule, PopulationBasedTraining

from ray_yolo.tune.evolution import Gene, Space
from ray_yolo.tune.schedulers import _clipped, build_scheduler
from ray_yolo.tune.search import Asha, Search

SPACE = Space((Gene("lr0", low=0.001, high=0.1, log=True), Gene("scale", low=0.0, high=0.9),
               Gene("close", "int", 1, 10), Gene("name", "choice", values=("SGD", "AdamW"))), ({},))


@pytest.mark.parametrize(("name", "kind"), [
    ("none", FIFOScheduler), ("asha", AsyncHyperBandScheduler), ("median", MedianStoppingRule),
    ("pbt", PopulationBasedTraining)])
def test_each_name_is_one_of_rays_classes(name: str, kind: type) -> None:
    assert type(build_scheduler(Search.model_validate({"scheduler": name}), SPACE, 90)) is kind


@pytest.mark.parametrize("scheduler", [Asha(), Asha(grace_epochs=3, reduction=2)])
@pytest.mark.parametrize("epochs", [4, 9, 10, 90, 100])
def test_rungs_are_rays(scheduler: Asha, epochs: int) -> None:
    search = Search(scheduler=scheduler)
    [bracket] = build_scheduler(search, SPACE, epochs)._brackets
    assert list(search.rungs(epochs)) == sorted(milestone for milestone, _ in bracket._rungs if milestone < epochs)


def test_rounding_leads_to_no_value_outside() -> None:
    space = Space((Gene("momentum", low=0.5, high=0.999999),), ({},))
    assert _clipped(space, {"momentum": 1.2}) == {"momentum": 0.999999}
    assert _clipped(space, {"momentum": 0.1234567 + 0.5}) == {"momentum": 0.62346}
def reports(name: str, settings: dict[str, object], told: list[tuple[int, float]], epochs: int = 90) -> list[str]:
    """What becomes of trials that each report once, (epoch, fitness), one after the other."""
    scheduler = build_scheduler(Search.model_validate({"scheduler": {"name": name, **settings}}), SPACE, epochs)
    decisions = []
    for number, (epoch, fitness) in enumerate(told):
        trial = SimpleNamespace(trial_id=f"t{number}", status="RUNNING")
        scheduler.on_trial_add(None, trial)
        decisions.append(scheduler.on_trial_result(None, trial, {"epoch": epoch, "fitness": fitness}))
    return decisions


@pytest.mark.parametrize(("settings", "goes_on"), [({"reduction": 2}, True), ({"reduction": 4}, False), ({}, False)])
def test_at_a_rung_of_asha_one_in_so_many_goes_on(settings: dict[str, object], goes_on: bool) -> None:
    """Beside 1, 2, 3 and 4, a fitness of 3.2 is in the better half and not in the best quarter (from 3.25)."""
    *_, last = reports("asha", settings, [(10, 1.0), (10, 2.0), (10, 3.0), (10, 4.0), (10, 3.2)])
    assert last == ("CONTINUE" if goes_on else "STOP")


@pytest.mark.parametrize(("settings", "rung"), [({}, 10), ({"grace_epochs": 20}, 20)])
def test_asha_stops_nobody_before_the_first_rung_and_at_the_end(settings: dict[str, object], rung: int) -> None:
    assert reports("asha", settings, [(rung, 1.0), (rung - 1, 0.0), (rung, 0.0)]) == ["CONTINUE", "CONTINUE", "STOP"]
    assert reports("asha", settings, [(90, 1.0)]) == ["CONTINUE"]  # it ends by itself


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
