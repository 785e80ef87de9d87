"""Ray's private names that we use exist and mean what we take them for. Seen with Ray 2.60.0."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import ray.exceptions

from ray_yolo.core.internals import NEEDED, internal
from ray_yolo.runtime import ray_internals

RAY = Path(ray.__file__).parent


def test_this_ray_was_seen() -> None:
    """With another one: run this file, mend `runtime/ray_internals.py`, and name it in `internals.NEEDED`."""
    assert ray.__version__.startswith(NEEDED["ray"].split()[1])


@pytest.fixture(scope="module")
def sources() -> str:
    folders = ("_common", "_private", "air", "train", "tune", "util")
    files = [path for folder in folders for path in (RAY / folder).rglob("*.py")]
    return "\n".join(path.read_text("utf-8") for path in (*files, RAY / "__init__.py"))


def test_the_tables_of_jobs_and_actors_have_the_fields_that_are_read() -> None:
    messages = ray_internals._messages()
    actor, job = messages.ActorTableData(), messages.JobTableData()
    for name in ("required_resources", "placement_group_id", "name", "job_id", "class_name"):
        assert hasattr(actor, name)
    assert actor.address.node_id == b""
    for name in ("is_dead", "entrypoint", "job_id"):
        assert hasattr(job, name)
    assert (job.driver_address.ip_address, job.config.ray_namespace, dict(job.config.metadata)) == ("", "", {})
    prefix = internal("ray._raylet", "RAY_INTERNAL_NAMESPACE_PREFIX")
    source = (RAY / "dashboard" / "modules" / "job" / "common.py").read_text()
    assert prefix == "_ray_internal_"
    assert 'JOB_ACTOR_NAME_TEMPLATE = f"{RAY_INTERNAL_NAMESPACE_PREFIX}job_actor_" + "{job_id}"' in source


def test_failures_have_the_attributes_that_are_read(sources: str) -> None:
    for name in ("controller_failure", "health_check_failure", "preempted"):
        assert re.search(rf"self\.{name}\b|\b{name}:", sources), name


@pytest.mark.parametrize(("state", "nodes", "expected"), [
    ("RESCHEDULING", {0: "", 1: ""}, True), ("RESCHEDULING", {0: "a", 1: ""}, False), ("CREATED", {0: "a"}, False),
    ("PENDING", {0: ""}, False)])
def test_a_group_has_lost_its_nodes_when_none_is_left(state: str, nodes: dict[int, str], expected: bool,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"state": state, "bundles_to_node_id": nodes}
    monkeypatch.setattr(ray_internals, "placement_group_table", lambda group: table)
    group: Any = SimpleNamespace()
    assert ray_internals.has_lost_all_nodes(group) is expected


class Group:
    """Of one worker, as Ray Train's replica groups here; `lost` workers do not answer."""

    def __init__(self, number: int, lost: set[int], happened: list[str]) -> None:
        self.number, self.lost, self.happened, self.active = number, lost, happened, True
        self.clear_result_queue = SimpleNamespace(remote=lambda: number)

    def is_active(self) -> bool:
        return self.active

    def get_workers(self) -> list[Any]:
        return [SimpleNamespace(actor=self)]

    def shutdown(self) -> None:
        self.active = False
        self.happened.append(f"shut down {self.number}")


class WorkerGroup:
    """Ray's replacement: it asks all others, and fails if one that is not shut down does not answer."""

    def __init__(self, lost: set[int]) -> None:
        self.lost, self.happened = lost, list[str]()
        self._replica_groups = [Group(number, lost, self.happened) for number in range(4)]

    def replace_replica_group(self, number: int) -> None:
        others = [group.number for group in self._replica_groups if group.active and group.number != number]
        ray_internals.ray.get(others)
        self._replica_groups[number] = Group(number, self.lost, self.happened)
        self.lost.discard(number)
        self.happened.append(f"replaced {number}")


@pytest.mark.parametrize("is_mended", [False, True])
def test_workers_that_are_lost_together_are_replaced_one_after_the_other(
        is_mended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the change Ray fails, and restarts all workers."""
    lost = {1, 2}

    def get(numbers: list[int]) -> None:
        if lost.intersection(numbers):
            raise ray.exceptions.ActorDiedError

    monkeypatch.setattr(ray_internals.ray, "get", get)
    workers = WorkerGroup(lost)
    if not is_mended:
        with pytest.raises(ray.exceptions.RayActorError):
            workers.replace_replica_group(1)
        return
    ray_internals.replace_after_all_lost(workers)
    for number in (1, 2):
        workers.replace_replica_group(number)
    assert workers.happened == ["shut down 2", "replaced 1", "replaced 2"]
    assert all(group.active for group in workers._replica_groups)


def test_ray_replaces_workers_by_the_names_that_are_used() -> None:
    from ray.train.v2._internal.execution.worker_group import ReplicaGroup, WorkerGroup

    for name in ("is_active", "get_workers", "shutdown"):
        assert callable(getattr(ReplicaGroup, name))
    source = inspect.getsource(WorkerGroup)
    assert "def replace_replica_group(self, replica_group_index: int)" in source
    assert "enumerate(self._replica_groups)" in source
    # What is mended: if Ray leaves out workers that are lost, `replace_after_all_lost` can go.
    asks_all_others = ("if i != replica_group_index and rg.is_active():\n"
                       "                for w in rg.get_workers():\n"
                       "                    clear_tasks.append(w.actor.clear_result_queue.remote())\n"
                       "        if clear_tasks:\n            ray.get(clear_tasks)")
    assert asks_all_others in source


def test_tune_keeps_so_many_processes_of_paused_trials() -> None:
    from ray.tune.execution.tune_controller import TrialRunnerWrapper, TuneController
    from ray.tune.utils.object_cache import _ObjectCache

    assert "self._actor_cache = _ObjectCache(" in inspect.getsource(TuneController.__init__)
    cache = _ObjectCache()
    controller = TrialRunnerWrapper(cast(Any, SimpleNamespace(_actor_cache=cache)), trial_executor=None)
    ray_internals.keep_trial_processes(controller, SimpleNamespace(placement_group_factory="its resources"), 3)
    assert [cache.cache_object("its resources", number) for number in range(4)] == [True, True, True, False]
    assert list(cache.flush_cached_objects()) == []
