"""Microbatches follow the workers' measured speed: no image is lost or loaded needlessly, and the bits stay equal."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_yolo.config.recipe import Recipe, resolve
from ray_yolo.core.structures import MicrobatchPart
from ray_yolo.engine import devices
from ray_yolo.engine.balance import LoadBalancer, SpeedReport, StepWork
from ray_yolo.engine.membership import Activity
from ray_yolo.engine.plan import Plan, ShardSampler, Step

SIZE, PART = 2, 1  # images of a microbatch and of a part
STEADY: dict[str, Any] = {"batch_size": 16, "microbatch": SIZE, "optimizer": {"nominal_batch": 16}}
UNKNOWN = SpeedReport(0.0, 0.0)


def make_plan(num_images: int = 320, **recipe: Any) -> Plan:
    return Plan(resolve(Recipe.model_validate({**STEADY, **recipe}), 1, gpu=False), num_images)


def known(*seconds: float) -> list[SpeedReport]:
    """Reports of workers that load the next step."""
    return [SpeedReport(each, 1.0) for each in seconds]


def work(seconds: float) -> StepWork:
    """Two microbatches and a wait of 5 s."""
    return StepWork(2, 10.0, 15.0 + 2 * seconds, [(11.0, 14.0), (14.5, 16.5)])


def test_the_time_of_a_microbatch_is_without_the_waits_for_other_workers() -> None:
    assert work(0.25).seconds() == pytest.approx(0.25)


def test_a_mark_on_a_gpu_is_an_event_that_measures_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeEvent:
        made = itertools.count(1)

        def __init__(self, *, enable_timing: bool) -> None:
            self.timed, self.at = enable_timing, 0

        def record(self) -> None:
            self.at = next(self.made)

        def elapsed_time(self, later: FakeEvent) -> float:
            assert self.timed
            return 500.0 * (later.at - self.at)  # ms

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    first, second, third = (devices.mark(torch.device("cuda")) for _ in range(3))
    assert devices.seconds_between(first, third) == 1.0
    assert StepWork(1, first, third, [(first, second)]).seconds() == 0.5


def test_a_speed_is_the_median_of_enough_steps_and_outlasts_a_generation() -> None:
    plan, activity = make_plan(), Activity()
    sampler = ShardSampler(plan, 0, 2)
    sampler.start(0)
    step = plan.steps(0)[0]
    for seconds in (9.0, 0.3, 0.1, 0.2):  # the first step waits for its loader
        first = LoadBalancer(plan, 2, activity)
        assert first.report(step, sampler) == UNKNOWN
        first.measure(work(seconds))
    first.measure(work(0.4))
    assert LoadBalancer(plan, 3, activity).report(step, sampler) == (pytest.approx(0.3), 1.0)


def test_shards_change_for_a_gain_of_a_tenth_and_not_for_less() -> None:
    """Of 8 microbatches 4 and 4 would take 4 x 0.5; 5 and 3 take 3 x 0.5, 1.33 times as fast."""
    plan = make_plan()
    balancer, step = LoadBalancer(plan, 2, Activity()), plan.steps(0)[3]
    changed = balancer.rebalance(step, [SpeedReport(0.3, 4.0), SpeedReport(0.5, 2.0)])
    assert changed == (step.batch + 5, (0.3, 0.5))
    assert balancer.microbatches(changed) == (5, 3)
    assert [balancer.seconds(later) for later in plan.steps(0)[7:9]] == [(), (0.3, 0.5)]
    assert plan.shard_sizes(step, 2, (0.3, 0.5)) == [5, 3]
    for seconds in (0.3, 0.35), (0.3, 0.4):  # 5 and 3 would be no gain, or a gain of 4 x 0.4 / (5 x 0.3) = 1.07
        assert LoadBalancer(plan, 2, Activity()).rebalance(step, known(*seconds)) is None


def test_a_decision_waits_for_all_speeds_and_for_twenty_steps_after_the_last_one() -> None:
    plan = make_plan(10_000)
    balancer, steps = LoadBalancer(plan, 2, Activity()), iter(plan.steps(0))
    assert balancer.rebalance(next(steps), [UNKNOWN, *known(0.5)]) is None
    assert balancer.rebalance(next(steps), known(0.1, 0.5)) is not None
    for _ in range(19):
        assert balancer.rebalance(next(steps), known(0.5, 0.1)) is None
    back = balancer.rebalance(next(steps), known(0.5, 0.1))
    assert back is not None
    assert balancer.microbatches(back) == (1, 7)


@pytest.mark.parametrize(("workers", "recipe"), [(1, {}), (2, {"sync_bn": True, "microbatch": None})])
def test_one_worker_and_synchronised_batch_norm_keep_equal_parts(workers: int, recipe: dict[str, Any]) -> None:
    plan = make_plan(**recipe)
    balancer = LoadBalancer(plan, workers, Activity())
    assert not balancer.is_active
    assert balancer.rebalance(plan.steps(0)[0], known(0.1, 0.5)[:workers]) is None


# A group of workers whose loaders prefetch, without processes

class Loader:
    """A sampler's parts, of which `depth` are requested before the first one is returned."""

    def __init__(self, sampler: ShardSampler, depth: int) -> None:
        self._parts = iter(sampler)
        self._requested = deque(next(self._parts, None) for _ in range(depth))

    def __iter__(self) -> Iterator[MicrobatchPart]:
        while True:
            self._requested.append(next(self._parts, None))
            part = self._requested.popleft()
            assert part is not None
            yield part


class Simulated:
    """One worker."""

    def __init__(self, plan: Plan, worker: int, num_workers: int, depth: int) -> None:
        self.plan, self.worker, self.num_workers, self.depth = plan, worker, num_workers, depth
        self.balancer = LoadBalancer(plan, num_workers, Activity())
        self.sampler = ShardSampler(plan, worker, num_workers, np_order(plan), self.balancer.seconds, PART)
        self._parts: Iterator[MicrobatchPart] = iter(())

    def start(self, epoch: int, last: int) -> None:
        self.sampler.start(epoch, 0, None, last)
        self._parts = iter(Loader(self.sampler, self.depth))

    def compute(self, step: Step, seconds: float) -> list[int]:
        """Positions of the images that it computes; they have to be those that the loader returns."""
        shard = self.plan.shard(step, self.worker, self.num_workers, self.balancer.seconds(step))
        for microbatch in shard:
            loaded: list[int] = []
            while len(loaded) < len(microbatch.images):
                loaded += [key.position for key in next(self._parts).keys]
            assert loaded == list(microbatch.images)
            self.balancer.measure(StepWork(1, 0.0, seconds, []))
        return [position for microbatch in shard for position in microbatch.images]


def np_order(plan: Plan) -> Any:
    return torch.arange(plan.num_images).numpy()


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 12), min_size=2, max_size=4), st.sampled_from([16, 64]), st.integers(0, 40),
       st.lists(st.lists(st.floats(1, 9), min_size=4, max_size=4), min_size=2, max_size=5), st.booleans(),
       st.booleans())
def test_whatever_the_loaders_have_prefetched_every_image_is_computed_once_and_none_is_loaded_needlessly(
        depths: list[int], nominal: int, odd: int, speeds: list[list[float]], ahead: bool, on: bool) -> None:
    """Loaders start each epoch, or go on. Also in warm-up, where steps grow and some workers have no microbatch, and
    with a step that runs ahead.
    """
    plan = make_plan(480 + odd, epochs=3, optimizer={"nominal_batch": nominal},
                     schedule={"warmup_epochs": 1, "warmup_min_batches": 0})
    workers = [Simulated(plan, number, len(depths), depth) for number, depth in enumerate(depths)]
    speed, num_steps = itertools.cycle(speeds), 0
    for epoch in range(3):
        for each in workers:
            if epoch == 0 or not on:
                each.start(epoch, 2 if on else epoch)
        computed, unread = [], []
        for step in plan.steps(epoch):
            if num_steps % 30 == 0:
                seconds = next(speed)
            num_steps += 1
            for each in workers:
                computed += each.compute(step, seconds[each.worker])
            reports = [each.balancer.report(step, each.sampler) for each in workers]
            unread.append((step, reports))
            if len(unread) > ahead:  # on a GPU a step is read when the next one has been computed
                decide(workers, *unread.pop(0))
        for step, reports in unread:
            decide(workers, step, reports)
        assert sorted(computed) == list(range(plan.num_images))


def decide(workers: list[Simulated], step: Step, reports: list[SpeedReport]) -> None:
    """Let all workers decide; they have to agree. No loader has begun what changes."""
    changes = [each.balancer.rebalance(step, reports) for each in workers]
    assert len(set(changes)) == 1
    for each, change in zip(workers, changes, strict=True):
        if change:
            each.sampler.check_not_begun(change.batch)
