"""Microbatches follow the workers' measured speed: no image is lost or loaded needlessly, and the bits stay equal."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ray_yolo.config.placement import Placement
from ray_yolo.core.events import BalanceEvent, Event, parse_event
from ray_yolo.core.structures import MicrobatchPart
from ray_yolo.data.dataset import identity
from ray_yolo.engine import balance, loop
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.membership import Activity, Rendezvous
from ray_yolo.engine.plan import ShardSampler
from ray_yolo.engine.session import Session
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.state import capture
from tests.support import run_log
from tests.support.jobs import make_spec
from tests.support.workers import run_workers, wrap_model
from tests.unit.engine.test_balance import make_plan, np_order


class Positions(Dataset[Any]):
    """The positions of a part's keys."""

    def __getitem__(self, part: MicrobatchPart) -> list[int]:
        return [key.position for key in part.keys]


def test_a_loader_with_processes_requests_one_more_part_for_each_that_it_returns() -> None:
    """On this the last step rests that may be loading; and new shards reach a loader that runs."""
    plan, speeds = make_plan(), {"now": ()}
    steps = plan.steps(0)
    sampler = ShardSampler(plan, 0, 2, np_order(plan), lambda step: speeds["now"] if step in steps[4:] else ())
    sampler.start(0)
    loader = DataLoader(Positions(), batch_size=None, sampler=sampler, num_workers=2, prefetch_factor=3,
                        collate_fn=identity, multiprocessing_context="fork")
    batches = iter(loader)
    first = [next(batches) for _ in range(4)]  # of the first step's 8 microbatches
    begun = [batch for batch, _ in sampler._stream.begun]  # with 4 + 2 x 3 microbatches: two of the third step's four
    assert (begun, sampler._stream.left) == ([step.batch for step in steps[:3]], 2)
    assert sampler.newest_loading(steps[0]) == steps[3].batch  # and four more
    speeds["now"] = (1.0, 3.0)
    sampler.check_not_begun(steps[4].batch)
    positions = [position for part in [*first, *batches] for position in part]
    wanted = [plan.shard(step, 0, 2, () if number < 4 else (1.0, 3.0)) for number, step in enumerate(steps)]
    assert positions == [image for shard in wanted for microbatch in shard for image in microbatch.images]
    with pytest.raises(AssertionError, match="begun to load"):
        sampler.check_not_begun(steps[5].batch)


# A real group

SLOW_SECONDS = 0.25  # beside about 0.01 of a microbatch, or more on a busy machine
CHANGE = 12  # step before which worker 1 is slow, and from which on worker 0 is


def train(collectives: Collectives, spec: TrainSpec, balanced: bool) -> dict[str, Any]:
    """A training whose slow worker changes in the middle."""
    events: list[Event] = []
    activity = Activity(work=deque(maxlen=4))
    context = WorkerContext(prepare_model=lambda model: wrap_model(model, collectives),
                            activity=activity)
    forward = loop.forward

    def slow_forward(*args: Any) -> Any:
        if collectives.num_workers > 1 and collectives.rank == (1 if activity.step < CHANGE else 0):
            time.sleep(SLOW_SECONDS)
        return forward(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "forward", slow_forward)
        patch.setattr(balance, "STEPS_KNOWN", 3 if balanced else 10**9)
        patch.setattr(balance, "STEPS_BETWEEN", 5)
        session = Session(spec, context, Placement(nosave=True), events.append, Rendezvous(collectives))
        session.train()
    state = capture(session.learner, {})
    tensors = [part.double().flatten() for part in [*state["model"].values(), *state["ema"].values()]]
    changes = [event.model_dump_json() for event in run_log.only(BalanceEvent, events)]
    return {"weights": torch.cat(tensors), "changes": changes}


def test_shards_follow_a_speed_that_changes_in_the_middle_and_the_bits_stay_equal(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, 32, epochs=12)  # 24 steps of four microbatches
    (tmp_path / "alone").mkdir()
    [alone] = run_workers(1, train, replace(spec, run_dir=tmp_path / "alone"), True)
    first, second = run_workers(2, train, spec, True)
    assert torch.equal(first["weights"], alone["weights"])
    assert torch.equal(second["weights"], alone["weights"])
    assert alone["changes"] == second["changes"] == []  # the recording worker alone has the events
    changes = [event for line in first["changes"] if isinstance(event := parse_event(line.encode()), BalanceEvent)]
    assert [change.microbatches for change in changes] == [(3, 1), (1, 3)]
    assert changes[0].step < CHANGE < changes[1].step
    for change in changes:
        assert 1 <= change.from_step - change.step <= 3
        assert max(change.seconds) >= SLOW_SECONDS > min(change.seconds)


def test_without_balancing_the_shards_stay_equal(tmp_path: Path) -> None:
    """Negative control."""
    first, _ = run_workers(2, train, make_spec(tmp_path, 32, epochs=6), False)
    assert first["changes"] == []
