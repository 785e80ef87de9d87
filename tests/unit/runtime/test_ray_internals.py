"""Ray's private names that we use exist and mean what we take them for. Seen with Ray 2.60.0."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import ray.exceptions
from ray.util.placement_group import placement_group, remove_placement_group

from ray_yolo.core.errors import InputError
from ray_yolo.core.internals import NEEDED
from ray_yolo.runtime import ray_internals
from ray_yolo.runtime.ray_internals import DRIVER_ENVIRONMENT, TRIAL_END_VARIABLE

RAY = Path(ray.__file__).parent
IN_CORE = re.compile("RAY_([a-z].*)")  # read by Ray's C++ core, under their names there


def test_this_ray_was_seen() -> None:
    """With another one: run this file, mend `runtime/ray_internals.py`, and name it in `internals.NEEDED`."""
    assert ray.__version__.startswith(NEEDED["ray"].split()[1])


@pytest.fixture(scope="module")
def sources() -> str:
    folders = ("_common", "_private", "air", "train", "tune", "util")
    files = [path for folder in folders for path in (RAY / folder).rglob("*.py")]
    return "\n".join(path.read_text("utf-8") for path in (*files, RAY / "__init__.py"))


def test_ray_reads_the_variables_that_are_set_for_it(sources: str) -> None:
    core = (RAY / "_raylet.so").read_bytes()
    for name in (*DRIVER_ENVIRONMENT, TRIAL_END_VARIABLE):
        if found := IN_CORE.fullmatch(name):
            assert found[1].encode() in core, name
        else:
            assert re.search(rf"\b{name}\b", sources) or re.search(rf"\b{name.removeprefix('RAY_')}\b", sources), name


def test_failures_have_the_attributes_that_are_read(sources: str) -> None:
    for name in ("controller_failure", "health_check_failure", "preempted"):
        assert re.search(rf"self\.{name}\b|\b{name}:", sources), name


@pytest.mark.parametrize(("module", "name", "use"), [
    ("ray._private.state", "available_resources_per_node", ray_internals.available_resources),
    ("ray._private.state", "state", ray_internals.draining_nodes),
    ("ray.util.placement_group", "NODE_ID_LABEL_KEY", lambda: ray_internals.on_node("a")),
    ("ray.train.torch.config", "_TorchBackend", ray_internals.can_replace_in_place),
    ("ray.train.torch.config", "_TorchBackend", lambda: ray_internals.in_place_backend.__wrapped__(print)),
])
def test_a_ray_without_one_is_a_plain_error(module: str, name: str, use: Callable[[], Any],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(import_module(module), name)
    with pytest.raises(InputError, match=rf"ray {ray.__version__} has no {module}.{name}; this needs Ray 2\.60: "):
        use()


@pytest.mark.parametrize(("state", "nodes", "expected"), [
    ("RESCHEDULING", {0: "", 1: ""}, True), ("RESCHEDULING", {0: "a", 1: ""}, False), ("CREATED", {0: "a"}, False),
    ("PENDING", {0: ""}, False)])
def test_a_group_has_lost_its_nodes_when_none_is_left(state: str, nodes: dict[int, str], expected: bool,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"state": state, "bundles_to_node_id": nodes}
    monkeypatch.setattr(ray_internals, "placement_group_table", lambda group: table)
    group: Any = SimpleNamespace()
    assert ray_internals.has_lost_all_nodes(group) is expected


@pytest.mark.ray
def test_a_cluster_answers_each_query(ray_session: None) -> None:
    here = ray.get_runtime_context().get_node_id()
    assert here in ray_internals.available_resources()
    assert ray_internals.available_resources()[here]["CPU"] > 0
    assert ray_internals.draining_nodes() == set()
    group = placement_group([{"CPU": 1}], bundle_label_selector=[ray_internals.on_node(here)])
    nowhere = placement_group([{"CPU": 1}], bundle_label_selector=[ray_internals.on_node("f" * 56)])
    assert group.wait(30)
    assert not nowhere.wait(1)
    assert not ray_internals.is_removed(group)
    assert not ray_internals.has_lost_all_nodes(group)
    for each in (group, nowhere):
        remove_placement_group(each)
    deadline = time.monotonic() + 30
    while not ray_internals.is_removed(group):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_tune_keeps_so_many_processes_of_paused_trials() -> None:
    from ray.tune.execution.tune_controller import TrialRunnerWrapper, TuneController
    from ray.tune.utils.object_cache import _ObjectCache

    assert "self._actor_cache = _ObjectCache(" in inspect.getsource(TuneController.__init__)
    cache = _ObjectCache()
    controller = TrialRunnerWrapper(cast(Any, SimpleNamespace(_actor_cache=cache)), trial_executor=None)
    ray_internals.keep_trial_processes(controller, SimpleNamespace(placement_group_factory="its resources"), 3)
    assert [cache.cache_object("its resources", number) for number in range(4)] == [True, True, True, False]
    assert list(cache.flush_cached_objects()) == []
