"""A session's decisions at the end of an epoch: the best epoch, the kept weights, and the next settings."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_yolo.config.placement import Placement
from ray_yolo.core.events import ANCHOR_TERMS, EpochEvent, Event
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.evaluate import Evaluation, evaluate, metrics_of
from ray_yolo.engine.learner import build_learner
from ray_yolo.engine.session import Session, run_session
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.team import Team, image_stores, make_loaders
from tests.support import run_log
from tests.support.jobs import make_spec

VALIDATED = {"noval": False, "epochs": 4}


def train(spec: TrainSpec, placement: Placement) -> list[EpochEvent]:
    """The epochs of a training."""
    events: list[Event] = []
    run_session(spec, WorkerContext(), placement, events.append)
    return run_log.only(EpochEvent, events)


def saved(spec: TrainSpec, name: str) -> dict[str, Any]:
    """The content of weights/<name>.pt, with its JSON parsed."""
    state = torch.load(spec.run_dir / "weights" / f"{name}.pt", weights_only=True)
    return {**state, **json.loads(state["meta"])}


def validate_as(precisions: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the epochs' validations by these average precisions, (classes, 10) each."""
    waiting = iter(precisions)

    def found(session: Session, team: Team) -> Evaluation:
        nothing, ap = np.zeros((0, 8)), next(waiting)
        metrics = dataclasses.replace(metrics_of(nothing, session.spec.val), ap=ap, map50=float(ap[:, 0].mean()),
                                      map=float(ap.mean()))
        return Evaluation(metrics, dict.fromkeys(ANCHOR_TERMS, 0.0), nothing)

    monkeypatch.setattr(Session, "validate", found)


def test_the_first_of_equally_good_epochs_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validate_as([np.full((2, 10), value) for value in (0.1, 0.3, 0.3, 0.2)], monkeypatch)
    spec = make_spec(tmp_path, **VALIDATED)
    epochs = [(event.fitness, event.best) for event in train(spec, Placement())]
    assert epochs == [(pytest.approx(0.1), True), (pytest.approx(0.3), True), (pytest.approx(0.3), False),
                      (pytest.approx(0.2), False)]
    assert (saved(spec, "best")["progress"][0], saved(spec, "last")["progress"][0]) == (2, 4)
    assert (saved(spec, "last")["best_epoch"], saved(spec, "last")["best_fitness"]) == (1, pytest.approx(0.3))


def test_fitness_and_what_drives_image_weights_come_from_all_thresholds(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precisions = np.array([[0.9] + [0.4] * 9, [0.5] + [0.0] * 9])
    validate_as([precisions], monkeypatch)
    spec = make_spec(tmp_path, noval=False, epochs=1)
    [event] = train(spec, Placement())
    assert event.fitness == pytest.approx(0.1 * 0.7 + 0.9 * (0.45 + 0.05) / 2)
    assert saved(spec, "last")["class_maps"] == pytest.approx([0.45, 0.05])


def test_weights_are_kept_at_the_save_period(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, epochs=5)
    train(spec, Placement(save_period=2))
    assert {path.stem for path in (spec.run_dir / "weights").glob("epoch*.pt")} == {"epoch1", "epoch3"}
    assert saved(spec, "epoch1")["progress"][:2] == [2, 0]


def test_the_numbers_of_an_epoch_are_those_of_its_saved_average(tmp_path: Path) -> None:
    """Validated again from the file; the trained weights themselves have other numbers."""
    spec = make_spec(tmp_path, **VALIDATED)
    train(spec, Placement(save_period=1))
    for epoch in (0, 3):
        state = saved(spec, f"epoch{epoch}")
        for part in ("ema", "model"):
            context = WorkerContext()
            learner = build_learner(spec, context)
            loaders = make_loaders(spec, learner.model.grid, context, Collectives(), image_stores(spec, context))
            learner.ema.model.load_state_dict(state[part])
            evaluation = evaluate(
                learner.ema.model,
                learner.family,
                learner.criterion,
                loaders.val,
                spec.val,
                spec.recipe.evaluate,
                "fp32",
                Collectives(),
                torch.device("cpu"),
            )
            recorded = state["last_epoch"]
            same = recorded["val"] == evaluation.losses and recorded["metrics"] == evaluation.summary
            assert same == (part == "ema"), (epoch, part)


def test_an_average_whose_settings_change_follows_by_the_new_ones(tmp_path: Path) -> None:
    """One step an epoch: e <- d e + (1 - d) w with d = 0.9 (1 - exp(-1 / 4)), then 0.5 (1 - exp(-2)) at step 2."""
    spec = make_spec(tmp_path, epochs=2, batch_size=48, optimizer={"nominal_batch": 48, "lr0": 0.01},
                   schedule={"warmup_epochs": 0, "ema_decay": 0.9, "ema_ramp": 4},
                   changes=["1: schedule.ema_decay=0.5 schedule.ema_ramp=1"])
    start = build_learner(spec, WorkerContext()).model.state_dict()
    train(spec, Placement(save_period=1))
    first, second = saved(spec, "epoch0"), saved(spec, "epoch1")
    decays = 0.9 * (1 - math.exp(-1 / 4)), 0.5 * (1 - math.exp(-2))
    for name in (name for name, value in start.items() if value.is_floating_point()):
        for before, after, decay in ((start, first, decays[0]), (first["ema"], second, decays[1])):
            expected = decay * before[name] + (1 - decay) * after["model"][name]
            torch.testing.assert_close(after["ema"][name], expected, rtol=1e-5, atol=1e-6)
    moved = (first["ema"]["model.0.conv.weight"] - second["ema"]["model.0.conv.weight"]).abs().max()
    assert moved > 1e-4  # more than the tolerance above
