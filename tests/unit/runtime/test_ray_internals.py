"""Ray's private names that we use exist and mean what we take them for. Seen with Ray 2.60.0."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import ray.exceptions

from ray_yolo.core.errors import InputError
from ray_yolo.core.internals import NEEDED
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


def test_tune_keeps_so_many_processes_of_paused_trials() -> None:
    from ray.tune.execution.tune_controller import TrialRunnerWrapper, TuneController
    from ray.tune.utils.object_cache import _ObjectCache

    assert "self._actor_cache = _ObjectCache(" in inspect.getsource(TuneController.__init__)
    cache = _ObjectCache()
    controller = TrialRunnerWrapper(cast(Any, SimpleNamespace(_actor_cache=cache)), trial_executor=None)
    ray_internals.keep_trial_processes(controller, SimpleNamespace(placement_group_factory="its resources"), 3)
    assert [cache.cache_object("its resources", number) for number in range(4)] == [True, True, True, False]
    assert list(cache.flush_cached_objects()) == []
