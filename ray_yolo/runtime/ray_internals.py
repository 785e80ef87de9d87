"""Ray's private names: modules, keys of its tables, and environment variables. Written for Ray 2.60.0."""

from __future__ import annotations

import importlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group_table

from ray_yolo.core.internals import internal

# Read by the driver before Ray starts; variables that the user has set take precedence.
DRIVER_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # delay until a report or a dead worker is noticed (Ray: 2 s)
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "120",  # a frozen worker counts as dead (Ray: 600 s)
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "180",  # many workers import torch at the same time on a small node
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",  # for workers that hang while others have failed (Ray: 30 s)
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # saves one process and one error line at each start
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # of workers that are killed with their bundles after training
    "RAY_AIR_NEW_OUTPUT": "0",  # the new output announces experiments even in silent mode
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # the report of a failed trial has no fitness
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # the sweep's display prints them
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # they copy the ledger, and leave a file of each trial open
    # Our searcher limits the number of pending trials. With Tune's limit of one, each trial waits for the start of the
    # previous process. If another trial leaves its process, Tune drops the starting one. Short trials then get no third
    "TUNE_MAX_PENDING_TRIALS_PG": "200",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # keep CUDA_VISIBLE_DEVICES if no GPU is requested
}
TRIAL_END_VARIABLE = "TUNE_FUNCTION_THREAD_TIMEOUT_S"
"""Seconds that Tune gives a trial's thread to end."""


def available_resources() -> Mapping[str, Mapping[str, float]]:
    """The free resources of each node, by its id."""
    return cast("Mapping[str, Mapping[str, float]]", internal("ray._private.state", "available_resources_per_node")())


def draining_nodes() -> set[str]:
    """The ids of draining nodes."""
    return set(internal("ray._private.state", "state").get_draining_nodes())


def other_jobs() -> dict[str, str]:
    """The commands of the cluster's other running jobs, each with its driver's node, by their ids."""
    own = ray.get_runtime_context().get_job_id()
    return {job.job_id.hex(): f"{job.entrypoint} (on {job.driver_address.ip_address})"
            for job in _running_jobs() if job.job_id.hex() != own}


class GroupRow(NamedTuple):
    """A placement group that is placed, or waits for some of its bundles."""

    id: str
    name: str
    strategy: str  # its name is the one that Ray's users give
    bundles: Sequence[tuple[Mapping[str, float], str, Mapping[str, str]]]
    """What each reserves, its node ('': it waits), and the label selector of the node."""


def placement_group_rows() -> list[GroupRow]:
    """The placement groups that are placed or wait.

    Ray keeps removed groups, many thousands in a few days. Its own table makes a dictionary of each.
    """
    messages = _messages()
    strategies = internal("ray.core.generated.common_pb2", "PlacementStrategy")
    rows = []
    for data in _state().get_placement_group_table():
        row = messages.PlacementGroupTableData.FromString(data)
        if row.state == messages.PlacementGroupTableData.REMOVED:
            continue
        waits = row.state == messages.PlacementGroupTableData.PENDING
        bundles = [(dict(bundle.unit_resources), "" if waits else bundle.node_id.strip(b"\xff").hex(),
                    dict(bundle.label_selector)) for bundle in row.bundles]
        rows.append(GroupRow(row.placement_group_id.hex(), row.name, strategies.Name(row.strategy), bundles))
    return rows


class Holding(NamedTuple):
    """Resources that an actor holds outside of placement groups."""

    job: str  # id; of an entry point, that of its command, '' if this is not connected
    is_entry_point: bool  # `ray job submit` has started it
    name: str  # the actor's class
    node: str
    resources: Mapping[str, float]


def holdings() -> list[Holding]:
    """What the actors of all jobs hold outside of placement groups."""
    own = ray.get_runtime_context().get_job_id()
    jobs = sorted((job.job_id.hex() == own, job.config.metadata.get("job_submission_id", ""), job.job_id.hex())
                  for job in _running_jobs())
    of_submission = {submission: job for _, submission, job in jobs}  # of several commands, this one
    prefix = internal("ray._raylet", "RAY_INTERNAL_NAMESPACE_PREFIX") + "job_actor_"
    found = []
    for data in _state().get_actor_table(None, "ALIVE"):
        actor = _messages().ActorTableData.FromString(data)
        if actor.required_resources and not actor.placement_group_id.strip(b"\xff"):
            is_entry_point = actor.name.startswith(prefix)
            job = of_submission.get(actor.name.removeprefix(prefix), "") if is_entry_point else actor.job_id.hex()
            found.append(Holding(job, is_entry_point, actor.class_name, actor.address.node_id.hex(),
                                 dict(actor.required_resources)))
    return found


def _running_jobs() -> list[Any]:
    """The cluster's programs that have not ended, without Ray's own, as Ray's messages."""
    internal_namespaces = internal("ray._raylet", "RAY_INTERNAL_NAMESPACE_PREFIX")
    jobs = map(_messages().JobTableData.FromString,
               _state().get_job_table(skip_submission_job_info_field=True, skip_is_running_tasks_field=True))
    return [job for job in jobs if not job.is_dead and not job.config.ray_namespace.startswith(internal_namespaces)]


def _state() -> Any:
    """Ray's tables of this cluster."""
    return internal("ray._private.state", "state")._connect_and_get_accessor()


def _messages() -> Any:
    return importlib.import_module("ray.core.generated.gcs_pb2")


def running_heads(leave_out: str) -> set[str]:
    """The addresses of the clusters that have a node on this machine, by the processes of this user and of root.

    Args:
        leave_out: part of the session folders of clusters that are not meant.
    """
    heads = set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            program, *words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            is_trusted = process.stat().st_uid in (0, os.getuid())
            if is_trusted and Path(program).name == "raylet" and not any(leave_out in word for word in words):
                heads |= {word.partition("=")[2] for word in words if word.startswith("--gcs-address=")}
    return heads


def creator_of(group: str) -> str:
    """The id of the job that has created a placement group: the end of the group's id."""
    return group[-2 * ray.JobID.size():]


def local_head(notify: Callable[[str], None]) -> str:
    """The address that `ray start` has noted on this machine; '' if there is none.

    All users may write to the note's folder. Pickled code is sent to the address and its replies are unpickled, so the
    note of another user is not used; `notify` gets a message then.
    """
    path = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(file) as note:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return ""
        if status.st_uid not in (0, os.getuid()):
            notify(f"{path} belongs to another user, so its cluster is not used; to use it, give its address "
                   f"({note.read(100).strip()!r}) with --address or RAY_ADDRESS")
            return ""
        return note.read().strip()


def on_node(node: str) -> dict[str, str]:
    """The label selector of one node, by its id."""
    return {internal("ray.util.placement_group", "NODE_ID_LABEL_KEY"): node}


def is_removed(group: PlacementGroup) -> bool:
    """Whether a placement group was removed."""
    return bool(placement_group_table(group)["state"] == "REMOVED")


def is_waiting(group: PlacementGroup) -> bool:
    """Whether a placement group waits for its first resources."""
    return bool(placement_group_table(group)["state"] == "PENDING")


def has_lost_all_nodes(group: PlacementGroup) -> bool:
    """Whether Ray reschedules all bundles of a placement group."""
    table = placement_group_table(group)
    return table["state"] == "RESCHEDULING" and not any(table["bundles_to_node_id"].values())


@cache
def in_place_backend(prepare: Callable[[], None]) -> Any:
    """A Ray Train backend whose workers form their process groups themselves, so that Ray may replace one alone.

    Each worker, and each replacement, calls `prepare` in its main thread: the train function runs in another one.
    """
    base: Any = internal("ray.train.torch.config", "_TorchBackend")

    class InPlaceBackend(base):
        """Read by Ray."""

        has_replica_groups = True

        def on_start(self, worker_group: Any, backend_config: object) -> None:
            worker_group.execute(prepare)
            if hasattr(worker_group, "replace_replica_group"):  # all workers, not a replacement alone
                replace_after_all_lost(worker_group)

        def on_training_start(self, worker_group: Any, backend_config: object) -> None: ...

        def on_shutdown(self, worker_group: Any, backend_config: object) -> None: ...

    return InPlaceBackend


def replace_after_all_lost(worker_group: Any) -> None:
    """Make a group of Ray Train replace a worker also if others are lost with it, as with their node.

    Ray replaces lost workers one after the other. Each time it asks all others to drop their results, also those that
    are lost too. This fails, and all workers would restart. Those that are lost are therefore shut down first: Ray
    leaves out what is shut down, until it is replaced in its turn.
    """
    replace = worker_group.replace_replica_group

    def replace_one(number: int) -> None:
        asked = {}
        for other, group in enumerate(worker_group._replica_groups):
            if other != number and group.is_active():
                asked[other] = [worker.actor.clear_result_queue.remote() for worker in group.get_workers()]
        for other, answers in asked.items():
            try:
                ray.get(answers)
            except RayActorError:
                worker_group._replica_groups[other].shutdown()
        replace(number)

    worker_group.replace_replica_group = replace_one


def expect_no_result_files() -> None:
    """Suppress Tune's warning at its end that the disabled loggers have written no files."""
    logging.getLogger("ray.tune.analysis.experiment_analysis").setLevel(logging.ERROR)


def keep_trial_processes(tune_controller: Any, trial: Any, number: int) -> None:
    """Make Tune keep `number` processes of paused trials for other trials; by default it ends all but one."""
    tune_controller._tune_controller._actor_cache.increase_max(trial.placement_group_factory, number)
