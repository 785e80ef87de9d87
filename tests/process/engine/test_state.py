"""Steps whose loss or gradient is not finite: they are skipped, reported, and do not count as training."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import TrainingError
from ray_yolo.core.events import EndEvent, EpochEvent, Event, StepEvent, Summary, WarningEvent
from ray_yolo.engine import session
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.membership import Rendezvous
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from tests.support import run_log
from tests.support.jobs import make_spec


class Killed(BaseException):
    """Simulates kill -9: the code under test does not catch it."""


class SpoiltSession:
    """A session in which the loss of some steps is not finite. It keeps the events."""

    def __init__(self, spec: TrainSpec, spoilt: range, die_at: int = -1) -> None:
        self.events: list[Event] = []
        self.spoilt, self.die_at = spoilt, die_at
        self.session = session.Session(
            spec, WorkerContext(), Placement(save_steps=1), self.emit, Rendezvous(Collectives())
        )
        terms = self.session.learner.criterion.terms
        self.session.learner.criterion.terms = lambda *args: terms(*args) * (math.nan if self.step in spoilt else 1.0)

    @property
    def step(self) -> int:
        """The number of the current step."""
        return self.session.learner.state.progress.step + 1

    def emit(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, StepEvent) and event.step == self.die_at:
            raise Killed

    def train(self) -> Summary:
        try:
            summary = self.session.train()
        finally:
            self.session.close()
        assert summary
        return summary

    def events_of(self, kind: type[run_log.Kind]) -> list[run_log.Kind]:
        return run_log.only(kind, self.events)


def test_skipped_steps_are_reported_once_per_epoch_also_after_a_restart_in_it(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, epochs=2)  # of three steps
    with contextlib.suppress(Killed):
        SpoiltSession(spec, range(2, 4), die_at=3).train()
    second = SpoiltSession(spec, range(2, 4))
    second.train()
    [warning] = second.events_of(WarningEvent)
    assert warning.message == ("epoch 1: 2 of its steps were skipped, the first at step 2: loss or gradient was not "
                               "finite")
    assert second.events_of(EndEvent)[-1].status == "done"


def test_a_training_that_skipped_every_step_has_failed_and_shows_no_loss(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, epochs=2)
    spoilt = SpoiltSession(spec, range(1, 7))
    with pytest.raises(TrainingError, match="not finite in any of the 6 steps: nothing was trained; lower"):
        spoilt.train()
    assert ["3 of its steps" in event.message for event in spoilt.events_of(WarningEvent)] == [True, True]
    assert all(math.isnan(loss) for event in spoilt.events_of(EpochEvent) for loss in event.train.values())
    assert spoilt.events_of(EndEvent) == []
    with pytest.raises(TrainingError, match="nothing was trained"):  # the same command does not call it done either
        SpoiltSession(spec, range(0)).train()


@pytest.mark.parametrize(("epochs", "message"), [
    (2, "not finite in any of the 6 steps"),  # the scaler skips them, but nothing was trained
    (10, "step 27: loss or gradient not finite 10 times"),  # 2^16 halved 17 times is below 1
])
def test_under_fp16_a_gradient_that_no_scale_makes_finite_ends_training(
        tmp_path: Path, epochs: int, message: str) -> None:
    made = SpoiltSession(make_spec(tmp_path, epochs=epochs, precision="fp16"), range(0))
    next(made.session.learner.model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(TrainingError, match=message):
        made.train()
