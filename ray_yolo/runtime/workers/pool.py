"""A pool of workers: each is a Ray task in its own placement-group bundle, where a lost worker is replaced.

Ray reserves a bundle as soon as its resources are available. If its node is lost, Ray reserves it again on another
node. The minimum number of workers share one placement group with the placement strategy. Each further worker has its
own group, which waits for resources without blocking the others. The pool therefore need not track nodes: a bundle is
either used or waits. Only while another program of the cluster waits for what a further worker holds, this worker
leaves, and its bundle is given away (`runtime/sharing.py`). The workers train the jobs of a queue (`job_queue.py`).

An elastic training is a pool with one job; a sweep is a pool with many. Ray Train would restart all workers whenever
their number changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import LostWorkersError, ResourcesError
from ray_yolo.core.events import Emit, PlacementEvent
from ray_yolo.core.formatting import format_count
from ray_yolo.runtime import cluster
from ray_yolo.runtime.ray_internals import has_lost_all_nodes, is_removed, is_waiting
from ray_yolo.runtime.sharing import Bundle, Decision, GroupKind, Sharing, group_name
from ray_yolo.runtime.workers.client import QueueHandle, answer
from ray_yolo.runtime.workers.failures import FailurePolicy
from ray_yolo.runtime.workers.watchdog import drain_nodes

_POLL_SECONDS = 1.0
_GATHER_SECONDS = 1.0  # errors of other workers may be the cause of a failure for this long
_END_SECONDS = 15.0  # the other workers may finish this long after the first

WorkerFunction = Callable[[dict[str, Any], int], Any]


class WorkerPool:
    """The bundles of a training's or a sweep's workers. A context that frees all bundles and ends their workers.

    Args:
        work: called with `config` and the bundle's number.
        gpus: of each worker.
        emit: takes the event of each placement group.
    """

    def __init__(self, work: WorkerFunction, config: Mapping[str, Any], placement: Placement, gpus: float,
                 emit: Emit = lambda event: None) -> None:
        self._resources, self._emit = cluster.resources_of(placement, gpus), emit
        self._placement = placement
        self.groups: list[PlacementGroup] = []
        shared = self._request(0, placement.min_workers, placement.placement_strategy)
        self._given_groups: dict[int, str] = {}  # id of the former group of each bundle that is given away
        # None: it is given away
        self._bundles: list[tuple[PlacementGroup, int] | None] = [(shared, index)
                                                                  for index in range(placement.min_workers)]
        self._config = ray.put(dict(config))
        self._task = ray.remote(  # max_calls: a process for each
            max_calls=1, max_retries=0, num_cpus=placement.cpus, num_gpus=gpus,
            runtime_env={"env_vars": cluster.worker_environment(placement)})(work)
        self._running: dict[Any, int] = {}
        self.grow(placement.max_workers)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self.groups:
            remove_placement_group(group)

    def __len__(self) -> int:
        return len(self._bundles)

    def grow(self, size: int) -> range:
        """Request bundles until there are at least `size`. Returns the numbers of the new ones."""
        new = range(len(self), max(size, len(self)))
        self._bundles += [(self._request(number), 0) for number in new]
        return new

    @property
    def given(self) -> list[int]:
        """The bundles that are given away."""
        return [number for number, bundle in enumerate(self._bundles) if bundle is None]

    def waiting_extras(self) -> list[int]:
        """The bundles above the minimum that wait for resources."""
        return [number for number, bundle in enumerate(self._bundles)
                if number >= self._placement.min_workers and bundle and is_waiting(bundle[0])]

    def give(self, number: int) -> None:
        """Remove the bundle of a worker above the minimum that has ended, or has not started."""
        bundle = self._bundles[number]
        if bundle is None:
            return
        group, _ = bundle
        self._bundles[number] = None
        self._given_groups[number] = group.id.hex()
        self._running = {task: other for task, other in self._running.items() if other != number}
        self.groups.remove(group)
        remove_placement_group(group)

    def take_back(self, number: int) -> None:
        """Request a bundle again that was given away, and start a worker in it."""
        self._bundles[number] = (self._request(number, instead_of=self._given_groups.pop(number)), 0)
        self.launch(number)

    def replace_lost_groups(self) -> list[int]:
        """Replace placement groups that have lost all their nodes by new groups of one bundle.

        As long as a lost group does not fit, Ray (2.60) tries to place it about 90,000 times a second. The head and its
        agent then use one core each. For a new group, Ray waits between two attempts.

        Returns:
            The bundles whose tasks have to be launched again: a task that waits in the old group never starts.
        """
        relaunch: list[int] = []
        for group in tuple(self.groups):
            if not has_lost_all_nodes(group):
                continue
            numbers = {number for number, bundle in enumerate(self._bundles) if bundle and bundle[0] == group}
            for number in numbers:
                self._bundles[number] = (self._request(number, instead_of=group.id.hex()), 0)
            relaunch += [number for number in self._running.values() if number in numbers]
            self._running = {task: number for task, number in self._running.items() if number not in numbers}
            self.groups.remove(group)
            remove_placement_group(group)
        return relaunch

    def _request(self, number: int, bundles: int = 1, strategy: str = "PACK", instead_of: str = "") -> PlacementGroup:
        kind: GroupKind = "minimum" if number < self._placement.min_workers else "extra"
        name = group_name(kind, self._placement.priority, number)
        self.groups.append(placement_group([self._resources] * bundles, strategy=strategy, name=name))
        self._emit(PlacementEvent(group=self.groups[-1].id.hex(), instead_of=instead_of))
        return self.groups[-1]

    def launch(self, number: int) -> None:
        """Start a worker as soon as its bundle is ready.

        Raises:
            LostWorkersError: if another process has removed the group, as stopping a training does.
        """
        bundle = self._bundles[number]
        assert bundle is not None, "it is not given away"
        group, index = bundle
        if is_removed(group):
            raise LostWorkersError("the workers' placement group was removed")
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        self._running[self._task.options(scheduling_strategy=strategy).remote(self._config, number)] = number

    def ended(self, seconds: float) -> tuple[dict[int, Any], dict[int, Exception]]:
        """The results and the errors of ended workers; waits up to `seconds` for the first of them."""
        returned: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        if self.wait(seconds, 1):
            for task in self.wait(_GATHER_SECONDS):
                number = self._running.pop(task)
                try:
                    returned[number] = ray.get(task, timeout=_END_SECONDS)
                except ray.exceptions.RayTaskError as error:
                    failed[number] = cast(Exception, error.cause or error)
                except ray.exceptions.RayError as error:
                    failed[number] = error
        return returned, failed

    def wait(self, seconds: float, number: int = 0) -> list[Any]:
        """The ended tasks, when `number` tasks have ended (0: all), or after `seconds`."""
        if not self._running:
            time.sleep(seconds)
            return []
        return ray.wait(list(self._running), num_returns=number or len(self._running), timeout=seconds)[0]


class Supervisor:
    """Relaunches the workers of a pool, and makes them leave draining nodes.

    A job's driver decides about the failures of workers that train it, and the policy given here about the others.
    """

    def __init__(self, pool: WorkerPool, queue: QueueHandle, placement: Placement, gpus: float, policy: FailurePolicy
                 ) -> None:
        self._pool, self._queue, self._policy = pool, queue, policy
        self._placement, self._gpus = placement, gpus
        self._draining: set[str] = set()  # nodes
        self._leaving: dict[int, str] = {}  # workers on draining nodes: their end is no failure
        self._held: dict[int, str] = {}  # empty bundles on draining nodes; launched once Ray has moved them
        self._trainable_at = time.monotonic()  # a worker was present or could be placed last at this time
        place = Bundle(cluster.resources_of(placement, gpus))
        self._sharing = Sharing(cluster.own_job(), place, time.monotonic)
        self._giving: set[int] = set()  # bundles whose workers are about to leave for other programs
        self._share_at = time.monotonic()

    def poll(self) -> bool:
        """Check all bundles once. Returns whether there is no more work."""
        returned, failed = self._pool.ended(_POLL_SECONDS)
        if any(returned.values()):
            return True
        self._draining, leaving = drain_nodes(self._drain, self._draining, self._policy.notify)
        self._leaving |= leaving
        present = self._present()
        relaunch = self._pool.replace_lost_groups() if failed or present < len(self._pool) else []
        if failed or relaunch:
            self._report(failed, relaunch)
        for number in (*returned, *failed, *relaunch):
            if number in self._giving:
                self._giving.discard(number)
                self._pool.give(number)
            else:
                self._held[number] = self._leaving.pop(number, "")
        for number in [number for number, node in self._held.items() if node not in self._draining]:
            del self._held[number]
            self._pool.launch(number)
        if cluster.is_shared() and time.monotonic() >= self._share_at:
            decision = self._decide()
            self._share_at = time.monotonic() + decision.look_again
            self._share(decision)
        self._check_room(present)
        return False

    def _decide(self) -> Decision:
        """What to do with the places above the minimum; nothing, if Ray does not answer."""
        try:
            groups, nodes = cluster.placement_groups(), cluster.nodes_with_places()
        except Exception:  # of Ray's client, which has many kinds: to share is optional, and training goes on
            return Decision()
        return self._sharing.decide(groups, nodes, self._giving)

    def _share(self, decision: Decision) -> None:
        """Give a place to another program of the cluster that waits for it, or request places again."""
        if decision.give is not None:
            if decision.give in self._held:  # its worker has left a draining node
                del self._held[decision.give]
                self._pool.give(decision.give)
            else:
                self._giving.add(decision.give)  # until its worker has left
            self._policy.notify(f"worker place {decision.give} is given to {cluster.describe_job(decision.to)}, which "
                                "waits for it; it is requested again when there is room for it")
        if self._giving or self._pool.given:
            given = {*self._giving, *self._pool.given}
            answer(self._queue.give_bundles.remote(given))  # again: a queue that was restarted does not know it
        if decision.withdraws:
            for number in self._pool.waiting_extras():
                self._pool.give(number)
        if decision.takes_back and self._pool.given and not self._giving:
            numbers = self._pool.given[:decision.takes_back]
            answer(self._queue.give_bundles.remote({*self._pool.given} - {*numbers}))
            for number in numbers:
                self._pool.take_back(number)
                self._sharing.took_back(number)
            count = format_count(len(numbers), "worker place")
            self._policy.notify(f"requested again: {count} that other programs got")

    def _report(self, failed: Mapping[int, Exception], relaunch: Collection[int]) -> None:
        """Report lost workers to the queue; decide about those that trained nothing."""
        moved = {number: LostWorkersError("its node is lost") for number in relaunch}
        without_job = answer(self._queue.mark_departed.remote({**moved, **failed}))
        counted = {number: failed[number] for number in without_job
                   if number in failed and number not in self._leaving and number not in self._giving}
        if counted:
            self._policy.decide_idle(counted, answer(self._queue.progress.remote()))

    def _drain(self, nodes: Collection[str]) -> dict[int, str]:
        return cast("dict[int, str]", answer(self._queue.drain_nodes.remote(nodes)))

    def _check_room(self, present: int) -> None:
        """Raise a ResourcesError if for `wait_for_resources` seconds no worker was present and none could be placed."""
        missing = "" if present else cluster.missing_resources(self._placement, 1, self._gpus)
        now = time.monotonic()
        self._trainable_at = self._trainable_at if missing else now
        if now > self._trainable_at + self._placement.wait_for_resources:
            raise ResourcesError(f"no workers left: {missing}; rerun the same command when nodes are available")

    def _present(self) -> int:
        return cast(int, answer(self._queue.present.remote()))
