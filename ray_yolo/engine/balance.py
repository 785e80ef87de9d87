"""Load balancing: microbatches go to workers by their measured speed.

Each worker measures the seconds that a microbatch takes it, without its waits for other workers. The header of a step's
gather carries them, so all workers have the same numbers, and a pure function of them is the next balance. The tree of
sums makes the result of a step independent of which worker computes what.

A balance holds from the first step that no worker has begun to load. Nothing that a loader has prefetched is lost.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ray_yolo.config.recipe import most_workers
from ray_yolo.engine.devices import Mark, seconds_between
from ray_yolo.engine.membership import Activity
from ray_yolo.engine.plan import Plan, ShardSampler, Step
from ray_yolo.ops.sharding import shards_by_speed

STEPS_KNOWN = 5  # measured steps after which a worker's speed is known
STEPS_BETWEEN = 20  # two decisions, which need more than the two steps that the loop runs ahead
LEAST_GAIN = 1.1  # predicted speed-up below which nothing changes


class Balance(NamedTuple):
    """How microbatches are distributed over the workers from a step on."""

    batch: int  # it holds for steps whose last batch has this number or a later one
    seconds: tuple[float, ...]  # what each worker needs for a microbatch; (): all are equally fast


class StepWork(NamedTuple):
    """A worker's microbatches of one step."""

    microbatches: int
    begin: Mark
    end: Mark
    waits: Sequence[tuple[Mark, Mark]]  # the waits for other workers in between

    def seconds(self) -> float:
        """Mean seconds of a microbatch (loading, forward, backward), without waits. Only after the device has reached
        all marks."""
        waited = sum(seconds_between(*wait) for wait in self.waits)
        return (seconds_between(self.begin, self.end) - waited) / self.microbatches


class SpeedReport(NamedTuple):
    """What a worker sends to all others in each step."""

    seconds: float  # a microbatch takes them; 0: not known yet
    loaded: float  # batches from this step to the newest one that may be loading when this report is read


class LoadBalancer:
    """The balances of one generation of workers. It decides equally on all of them.

    Args:
        activity: of this worker; it keeps the measured speed from one generation to the next.
    """

    def __init__(self, plan: Plan, num_workers: int, activity: Activity) -> None:
        self.is_active = num_workers > 1 and not plan.recipe.sync_bn  # sync_bn spreads every microbatch evenly
        self._plan, self._num_workers, self._measured = plan, num_workers, activity.work
        self._balances = [Balance(0, ())]  # their first batches ascend
        self._steps_left = 0  # this many steps follow before the next decision

    def seconds(self, step: Step) -> tuple[float, ...]:
        """The speeds by which a step is distributed, as in `Balance`."""
        return next(balance.seconds for balance in reversed(self._balances) if step.batch >= balance.batch)

    def measure(self, work: StepWork) -> None:
        """Add a step's work to this worker's measured speed."""
        self._measured.append(work.seconds())

    def report(self, step: Step, sampler: ShardSampler) -> SpeedReport:
        """This worker's report in `step`."""
        if not self.is_active or len(self._measured) < STEPS_KNOWN:
            return SpeedReport(0.0, 0.0)
        return SpeedReport(statistics.median(self._measured), sampler.newest_loading(step) - step.batch)

    def rebalance(self, step: Step, reports: Sequence[SpeedReport]) -> Balance | None:
        """The next balance, or None if the present one stays. Called after each step with all workers' reports.

        It decides as soon as all speeds are known, and then every `STEPS_BETWEEN` steps: sooner, it would decide by
        reports from before its last decision took effect.
        """
        self._steps_left -= 1
        seconds = tuple(report.seconds for report in reports)
        all_known = min(seconds) > 0  # a worker reports 0 until it has measured its speed
        if not self.is_active or self._steps_left > 0 or not all_known:
            return None
        self._steps_left = STEPS_BETWEEN
        first_batch = step.batch + 1 + int(max(report.loaded for report in reports))  # that no worker is loading
        balance = Balance(first_batch, seconds)
        # A step as microbatches are spread now, and as the new balance would spread them.
        step_seconds = _slowest(self.microbatches(self._balances[-1]), seconds)
        predicted_seconds = _slowest(self.microbatches(balance), seconds)
        if step_seconds < LEAST_GAIN * predicted_seconds:
            return None
        # A balance that has not begun by then never does.
        self._balances = [older for older in self._balances if older.batch < first_batch] + [balance]
        return balance

    def microbatches(self, balance: Balance) -> tuple[int, ...]:
        """Microbatches of each worker in a full step."""
        seconds = balance.seconds or (1.0,) * self._num_workers
        return tuple(map(len, shards_by_speed(most_workers(self._plan.recipe), seconds)))


def _slowest(microbatches: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds until the last worker has finished."""
    return max(count * each for count, each in zip(microbatches, seconds, strict=True))
