"""A trial that pauses and goes on, without Ray."""

from __future__ import annotations

from pathlib import Path

from ray_yolo.core.events import WarningEvent
from ray_yolo.runs.event_log import read_events
from ray_yolo.tune.files import drop_weights
from ray_yolo.tune.runner import _fit_here
from ray_yolo.tune.schedule import Outcome
from ray_yolo.tune.task import payload_of, read_outcome, task_config, train_to_outcome
from tests.support.jobs import make_config


def test_a_paused_trial_without_weights_trains_again_from_its_first_epoch_with_the_same_results(
        tmp_path: Path) -> None:
    base = make_config(tmp_path, 0, epochs=3, noval=False)
    payload = payload_of(base.placement, base.recipe, tmp_path / "sweep", None, is_stored=False)

    def train(name: str, until: int) -> Outcome:
        config = task_config(payload, {"trial": name, "genes": {"lr0": 0.02}, "seed": 0, "until": until})
        outcome, is_new = train_to_outcome(config, until, _fit_here)
        assert is_new
        return outcome

    paused = train("trial1", 1)
    folder = tmp_path / "sweep" / "trials" / "trial1"
    drop_weights(folder)
    assert read_outcome(folder, 1) == paused
    whole = train("trial1", 3)
    warnings = [event.message for event in read_events(folder / "events.jsonl") if isinstance(event, WarningEvent)]
    assert any("it starts again at step 0" in message for message in warnings)
    assert [train("trial2", 1), train("trial2", 3)] == [paused, whole]
