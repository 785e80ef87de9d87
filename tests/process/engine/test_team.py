"""A team ends with its context: nothing of it stays in the process, or with the model."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ray_yolo.engine import loop
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.learner import TrainState, build_learner
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.team import form_team, image_stores
from tests.support.jobs import make_spec
from tests.support.workers import run_workers, wrap_model


class BrokenError(Exception):
    """Ends a step anywhere."""


def breaking(*_: Any) -> Any:
    raise BrokenError


def replicas() -> int:
    return sum(type(each) is DistributedDataParallel for each in gc.get_objects())


def end_by_errors(collectives: Collectives, spec: TrainSpec, places: list[str]) -> list[Any]:
    """The number of DDP's replicas after each of the teams that an error ends, while the error is handled; and the
    weights after a training in a last team."""
    context = WorkerContext(prepare_model=lambda model: wrap_model(model, collectives))
    learner, stores, found = build_learner(spec, context), image_stores(spec, context), list[Any]()
    for place in places:
        with pytest.MonkeyPatch.context() as patch:
            if place == "forward":  # inside DDP
                patch.setattr(type(learner.model), "forward", breaking)
            elif place == "backward":  # the graph of the step exists
                patch.setattr(Tensor, "backward", breaking)
            elif place == "exchange":  # DDP waits for its hook
                patch.setattr(loop, "write_row", breaking)
            gc.disable()  # otherwise a collection at any time may hide what the context leaves
            try:
                with form_team(learner, context, collectives, stores) as team:
                    loop.train(learner, team, lambda *_: None, breaking)
            except BrokenError:
                found.append(replicas())
            finally:
                gc.enable()
        learner.optimizer.zero_grad(set_to_none=True)
        learner.state = TrainState()
    with form_team(learner, context, collectives, stores) as team:
        loop.train(learner, team, lambda *_: None, lambda epoch: not learner.state.close_epoch())
    return [found, torch.cat([weight.detach().flatten() for weight in learner.model.parameters()])]


@pytest.mark.timeout(300)
def test_a_team_that_an_error_ends_leaves_no_hook_and_the_next_one_trains_the_same_bits(tmp_path: Path) -> None:
    """DDP's native hook once held the model and the abandoned step, which the next backward pass then waited for."""
    spec = make_spec(tmp_path, epochs=1)
    places = ["forward", "backward", "exchange"]
    [[_, alone]] = run_workers(1, end_by_errors, spec, [])
    for found, weights in run_workers(2, end_by_errors, spec, places):
        assert found == [0] * len(places)
        assert torch.equal(weights, alone)
