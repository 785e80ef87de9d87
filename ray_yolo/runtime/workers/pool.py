"""Workers of a roster: each is a Ray task in a place of its own, which gets another worker when it has lost one.

A place is a bundle of a placement group: room that Ray gives when there is some, and again elsewhere when its node is
lost. The fewest workers have theirs together, as the placement strategy says; each further one has a group for itself,
which waits for room without holding anybody up. So nothing has to be known of nodes that leave and come, or of other
jobs: a place is filled or it waits, and the roster says who trains together.

For a range of workers, which Ray Train would start again, all of them, whenever their number changes. A fixed number is
Ray Train's (`runtime/workers/torch_trainer.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import ray
import ray.exceptions
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import LostWorkersError, ResourcesError
from ray_yolo.core.events import Summary
from ray_yolo.runtime import cluster
from ray_yolo.runtime.ray_internals import has_lost_all_nodes, is_removed
from ray_yolo.runtime.workers.coordinator import Coordinator
from ray_yolo.runtime.workers.failures import FailurePolicy
from ray_yolo.runtime.workers.job_queue import JobQueue
from ray_yolo.runtime.workers.rendezvous import answer

_POLL_SECONDS = 1.0
_MOMENT_SECONDS = 1.0  # workers that are lost within it are lost together
_END_SECONDS = 15.0  # for the others, when the first worker has come to the end
_SILENT_SECONDS = 10.0  # until it is told that there is no room

Work = Callable[[dict[str, Any], int], Any]


def uses_pool(placement: Placement) -> bool:
    """Whether workers come and go each for itself: a range of them; but a strict strategy is about all of them."""
    return isinstance(placement.num_workers, tuple) and not placement.placement_strategy.startswith("STRICT")


def workers_line(placement: Placement) -> str:
    """What a training would run on, in one line, as far as it is known before any cluster is asked."""
    if placement.num_workers == 0:
        return "this process, without Ray"
    low, high, cpus = placement.min_workers, placement.max_workers, placement.cpus_per_worker
    gpus = cluster.planned_gpus(placement)
    each = ", ".join((f"{cpus:g} CPU" if cpus != "auto" else "its part of a node's CPUs",
                      "1 GPU if the cluster has any" if gpus is None else f"{gpus:g} GPU",
                      *filter(None, [placement.accelerator_type])))
    number = f"{low} to {high}" if low < high else str(low)
    kind = "each in a place of its own" if uses_pool(placement) else "of Ray Train"
    return f"Ray: {number} workers {kind}, placed by {placement.placement_strategy}; each has {each}"


class WorkerPool:
    """The places of a training's workers. Use as a context: they are given back at its end, with whoever is in them.

    Args:
        work: called with `config` and the place's number.
        gpus: of each.
        placed: called with the id of each placement group, and of the one that it stands for, if there was one.
    """

    def __init__(self, work: Work, config: Mapping[str, Any], placement: Placement, gpus: float,
                 placed: Callable[[str, str], None] = lambda group, instead_of: None) -> None:
        few, self._bundle, self._placed = placement.min_workers, cluster.resources_of(placement, gpus), placed
        self._bundle |= {f"accelerator_type:{kind}": 0.001 for kind in filter(None, [placement.accelerator_type])}
        self.groups: list[PlacementGroup] = []
        together = self._ask(few, placement.placement_strategy)
        self._rooms = [(together, index) for index in range(few)]
        self._config = ray.put(dict(config))
        self._task = ray.remote(  # max_calls: a process for each
            max_calls=1, max_retries=0, num_cpus=placement.cpus, num_gpus=gpus,
            runtime_env={"env_vars": cluster.worker_environment(placement)})(work)
        self._running: dict[Any, int] = {}
        self.grow(placement.max_workers)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        cluster.free([group.id.hex() for group in self.groups])

    def __len__(self) -> int:
        return len(self._rooms)

    def grow(self, size: int) -> range:
        """Let there be at least so many. Returns the numbers of the new ones, which are empty."""
        new = range(len(self), max(size, len(self)))
        self._rooms += [(self._ask(), 0) for _ in new]
        return new

    def replace_lost_groups(self) -> list[int]:
        """Ask anew for places whose node is gone, unless others of their group are left.

        For as long as there is no room for it, Ray (2.60) tries to place such a group again without a pause, some
        90,000 times a second, which takes the head a core and its agent another; for a new group it waits between two
        tries.

        Returns:
            The places that have to be filled once more: whoever waited in the old group would never be told.
        """
        empty: list[int] = []
        for group in tuple(self.groups):
            if not has_lost_all_nodes(group):
                continue
            numbers = {number for number, (its, _) in enumerate(self._rooms) if its == group}
            for number in numbers:
                self._rooms[number] = (self._ask(instead_of=group.id.hex()), 0)
            empty += [number for number in self._running.values() if number in numbers]
            self._running = {task: number for task, number in self._running.items() if number not in numbers}
            self.groups.remove(group)
            cluster.free([group.id.hex()])
        return empty

    def _ask(self, bundles: int = 1, strategy: str = "PACK", instead_of: str = "") -> PlacementGroup:
        self.groups.append(placement_group([self._bundle] * bundles, strategy=strategy))
        self._placed(self.groups[-1].id.hex(), instead_of)
        return self.groups[-1]

    def launch(self, number: int) -> None:
        """Have a worker begin as soon as the place is there.

        Raises:
            LostWorkersError: if somebody else has given it back, as whoever stops a training does: it never will be.
        """
        group, index = self._rooms[number]
        if is_removed(group):
            raise LostWorkersError("the workers' room was taken away from them")
        there = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        self._running[self._task.options(scheduling_strategy=there).remote(self._config, number)] = number

    def ended(self, seconds: float) -> tuple[dict[int, Any], dict[int, Exception]]:
        """What the workers that have ended returned, and what ended the others; waits so long for the first of them."""
        returned: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        if self.wait(seconds, 1):
            for task in self.wait(_MOMENT_SECONDS):
                number = self._running.pop(task)
                try:
                    returned[number] = ray.get(task, timeout=_END_SECONDS)
                except ray.exceptions.RayTaskError as error:
                    failed[number] = cast(Exception, error.cause or error)
                except ray.exceptions.RayError as error:
                    failed[number] = error
        return returned, failed

    def wait(self, seconds: float, number: int = 0) -> list[Any]:
        """The tasks that have ended, once there are so many (0: all), or after so long."""
        if not self._running:
            time.sleep(seconds)
            return []
        return ray.wait(list(self._running), num_returns=number or len(self._running), timeout=seconds)[0]


def train_on_pool(work: Work, config: Mapping[str, Any], placement: Placement, gpus: float, policy: FailurePolicy,
                    placed: Callable[[str, str], None]) -> Summary:
    """How the training of a roster's workers, `work(config, number)`, ended.

    Args:
        judge: of failures.
        placed: see `WorkerPool`.

    Raises:
        RayYoloError: as the `FailurePolicy` says of workers that have failed.
        ResourcesError: if the cluster has no room for any worker, for as long as is waited for resources.
    """
    coordinator: ActorHandle[Coordinator] = config["coordinator"]
    with WorkerPool(work, config, placement, gpus, placed) as pool:
        for number in range(len(pool)):
            pool.launch(number)
        keeper = Supervisor(pool, coordinator, placement, gpus, policy)
        if not pool.groups[0].wait(_SILENT_SECONDS):
            policy.notify(f"there is no room yet for {placement.min_workers} workers of "
                       f"{cluster.described(placement, gpus)}: waiting for it")
        while (summary := keeper.poll()) is None:
            pass
        keeper.wait_for_the_others()
        return summary


class FailureHandler(Protocol):
    """Whoever puts up with workers that have failed together, or raises."""

    def decide(self, failures: Mapping[int, Exception], *, others_go_on: bool) -> None: ...
    def notify(self, text: str) -> None: ...


class Supervisor:
    """Keeps the places of a training's, or a crew's, workers filled."""

    def __init__(
        self,
        pool: WorkerPool,
        coordinator: ActorHandle[Coordinator] | ActorHandle[JobQueue],
        placement: Placement,
        gpus: float,
        policy: FailureHandler,
    ) -> None:
        self._places, self._coordinator, self._judge = pool, coordinator, policy
        self._placement, self._gpus = placement, gpus
        self._draining: set[str] = set()  # nodes
        self._leaving: dict[int, str] = {}  # workers on such nodes: whatever ends them is no failure
        self._held: dict[int, str] = {}  # places that are empty, and go elsewhere when their node is gone
        self._hopeful = time.monotonic()  # when somebody trained, or could have

    def poll(self) -> Any:
        """Look after all places once. Returns what a worker has returned that has come to the end of all work."""
        returned, failed = self._places.ended(_POLL_SECONDS)
        for end in returned.values():
            if end:
                return end
        self._watch_nodes()
        present = self._present()
        empty = self._places.replace_lost_groups() if failed or present < len(self._places) else []
        if failed or empty:
            answer(self._coordinator.mark_lost.remote([*failed, *empty]))
        if counted := {number: error for number, error in failed.items() if number not in self._leaving}:
            self._judge.decide(counted, others_go_on=self._present() > 0)
        self._held |= {number: self._leaving.pop(number, "") for number in (*returned, *failed, *empty)}
        for number in [number for number, node in self._held.items() if node not in self._draining]:
            del self._held[number]
            self._places.launch(number)
        self._check_room(present)
        return None

    def wait_for_the_others(self) -> None:
        """Let those who train come to the end, too; a worker that is just starting has nothing to end."""
        deadline = time.monotonic() + _END_SECONDS
        while self._present() and time.monotonic() < deadline:
            self._places.wait(_POLL_SECONDS)
        self._places.wait(_POLL_SECONDS)  # what they have told is on its way

    def _watch_nodes(self) -> None:
        """Have workers leave the nodes that are about to be taken away, after the step in hand."""
        draining = cluster.draining_nodes()
        if draining:
            self._leaving |= answer(self._coordinator.drain_nodes.remote(draining))
        for node in draining - self._draining:
            self._judge.notify(cluster.leave_notice(node))
        self._draining = draining

    def _check_room(self, present: int) -> None:
        """Give up when nobody trains and nobody can: a ResourcesError."""
        missing_resources = "" if present else cluster.missing_resources(self._placement, 1, self._gpus)
        now = time.monotonic()
        self._hopeful = self._hopeful if missing_resources else now
        if now > self._hopeful + self._placement.wait_for_resources:
            raise ResourcesError(
                f"nobody trains any more: {missing_resources}; the same command goes on when there are nodes"
            )

    def _present(self) -> int:
        return cast(int, answer(self._coordinator.present.remote()))
