"""Independent parts of work on Ray workers: validation, prediction, AutoBatch and latencies.

The workers form no process group: each is an actor that computes one part after another, and the caller combines the
results. They are no tasks: Ray gives the process of a task to later ones, also on another GPU, but a process stays on
the GPU that it has used first.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, TypeVar, cast

import ray
import ray.exceptions
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import LostWorkersError, RayYoloError, ResourcesError, TrainingError
from ray_yolo.runtime import cluster
from ray_yolo.runtime.ray_internals import is_waiting
from ray_yolo.runtime.workers.failures import error_line

_POLL_SECONDS = 0.5
_REPORT_SECONDS = 5.0
Shared = TypeVar("Shared")
Part = TypeVar("Part")
Result = TypeVar("Result")


def map_on_workers(function: Callable[[Shared, Part], Result], shared: Shared, parts: Sequence[Part],
                   placement: Placement, gpus: float, *, retries: int = 0, timeout: float | None = None
                   ) -> Generator[tuple[int, Result]]:
    """Yield (number of the part, `function(shared, part)`) for each part, as soon as it is done.

    Each worker has the placement's CPUs and its `gpus`, and computes one part after another. With at most as many parts
    as workers, all parts run at the same time on workers of their own.

    Args:
        shared: sent once to each node; its arrays are read-only.
        retries: of a part whose worker is lost; -1: any number. An error of the function is final.
        timeout: seconds in which the next part must be done; None: no limit.

    Raises:
        RayYoloError: an error of this package in the function, with the worker's number; TrainingError for others.
        LostWorkersError: if a part's worker was lost more often than `retries`.
        ResourcesError: if the resources are not free within the placement's `timeout_seconds`, or after `timeout`.
    """
    wanted = min(placement.max_workers, max(placement.min_workers, cluster.room(placement, gpus)))
    num_workers = min(wanted, len(parts))
    group = _reserve(placement, gpus, num_workers)
    try:
        workers = [_start(placement, gpus, group, worker, retries) for worker in range(num_workers)]
        function_reference, shared_reference = ray.put(function), ray.put(shared)
        waiting = deque(enumerate(parts))
        idle = deque(range(num_workers))
        running: dict[ray.ObjectRef, tuple[int, int]] = {}  # result -> (part, worker)
        while waiting or running:
            while waiting and idle:
                number, part = waiting.popleft()
                worker = idle.popleft()
                result_reference = workers[worker].compute.remote(function_reference, shared_reference, part)
                running[result_reference] = number, worker
            done, _ = ray.wait(list(running), timeout=timeout)
            if not done:
                raise ResourcesError(f"{num_workers} workers did not all answer within {timeout:g} seconds; use "
                                     "--timeout-seconds to wait longer")
            number, worker = running.pop(done[0])
            idle.append(worker)
            try:
                result = cast(Result, ray.get(done[0]))
            except ray.exceptions.RayError as error:
                _raise(error, worker, retries)
            yield number, result
    finally:
        remove_placement_group(group)  # also ends the workers


class _PartWorker:
    """Computes parts in a process of its own."""

    def compute(self, function: Callable[[Any, Any], Any], shared: Any, part: Any) -> Any:
        return function(shared, part)


def _reserve(placement: Placement, gpus: float, num_workers: int) -> PlacementGroup:
    """One bundle of resources for each worker, all at once."""
    bundle = cluster.resources_of(placement, gpus)
    group = placement_group([bundle] * num_workers, strategy=placement.placement_strategy)
    try:
        _wait_for(group, placement, gpus, num_workers)
    except BaseException:  # otherwise the group would take the resources later
        remove_placement_group(group)
        raise
    return group


def _wait_for(group: PlacementGroup, placement: Placement, gpus: float, num_workers: int) -> None:
    """Wait until the resources of a group are free. A wait of some seconds is reported on the standard error output.

    Raises:
        ResourcesError: if they are not free within the placement's `timeout_seconds`.
    """
    began = time.monotonic()
    is_reported = False
    while is_waiting(group):  # `group.wait` would not be interrupted by signals
        time.sleep(_POLL_SECONDS)
        waited = time.monotonic() - began
        if waited >= placement.timeout_seconds:
            raise ResourcesError(f"{num_workers} workers were not free at once for {placement.timeout_seconds:g} "
                                 "seconds; use fewer --num-workers, or wait")
        if waited >= _REPORT_SECONDS and not is_reported:
            is_reported = True
            requested = placement.model_copy(update={"num_workers": num_workers})  # all at once
            text = cluster.describe_wait(requested, gpus) or f"waiting for {num_workers} workers"
            print(text, file=sys.stderr, flush=True)


def _start(placement: Placement, gpus: float, group: PlacementGroup, worker: int, retries: int
           ) -> ActorHandle[_PartWorker]:
    """Start the worker of a bundle. If its process is lost, Ray starts another one for the part."""
    options: dict[str, Any] = {
        "num_cpus": placement.cpus, "num_gpus": gpus,
        "max_restarts": -1 if retries else 0, "max_task_retries": retries,
        "runtime_env": {"env_vars": cluster.worker_environment(placement)},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=worker)}
    return ray.remote(_PartWorker).options(**options).remote()


def _raise(error: ray.exceptions.RayError, worker: int, retries: int) -> NoReturn:
    """Raise the error of a part, as one line with its worker."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    reason = f"worker {worker}: {error_line(cause)}"
    if isinstance(cause, RayYoloError):
        raise type(cause)(reason) from error
    if cause is error:  # the process or its node is gone
        raise LostWorkersError(f"{reason}; given up after {retries} restarts" if retries else reason) from error
    raise TrainingError(reason) from error
