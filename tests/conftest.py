"""Fixtures for everyone."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from ray_yolo.core import deadline

# Examples of each property. On a busy machine any example may take long.
settings.register_profile("quick", max_examples=25, deadline=None)  # `make test`
settings.register_profile("thorough", max_examples=100, deadline=None)
settings.load_profile("thorough")

ROOT = Path(__file__).parents[1]
RAY_SETTINGS = {
    "RAY_worker_niceness": "0",  # 15 otherwise, which loses against everything else on a small machine
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # every report waits for this poll
    "RAY_metrics_report_interval_ms": "1000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's coming default; silences its announcement
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files with tests of Ray come first: they take the longest."""
    items.sort(key=lambda item: scope_of(item.nodeid) != "ray")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: Any, nextitem: Any) -> None:
    """After each file, all CPUs of the shared Ray are free: what a test leaves would stop another one far from it.

    End Ray with the last file that uses it. If Ray's head does not answer for 60 s, as on a very busy machine, Ray ends
    this process, in whatever test that is then.
    """
    if nextitem and "ray" in sys.modules and item.path != nextitem.path and scope_of(item.nodeid) == "ray":
        assert_cpus_are_free(str(item.path))
    if nextitem and "ray" in sys.modules and scope_of(item.nodeid) == "ray" != scope_of(nextitem.nodeid):
        sys.modules["ray"].shutdown()


def assert_cpus_are_free(file: str, patience_seconds: float = 30.0) -> None:
    """Assert that nothing holds a CPU of the connected Ray, if there is one; some are freed a moment later. What is
    left is removed, so that the files after it have their room."""
    ray = sys.modules["ray"]
    if not ray.is_initialized():
        return
    deadline = time.monotonic() + patience_seconds
    while (free := ray.available_resources()).get("CPU") != ray.cluster_resources().get("CPU"):
        if time.monotonic() > deadline:
            from ray_yolo.runtime import cluster, ray_internals

            left = cluster.placement_groups()
            cluster.free([group.id for group in left])
            raise AssertionError(f"{file} has left on Ray: {left}, {ray_internals.holdings()}; free: {free}")
        time.sleep(0.2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For two processes side by side (`make test`): no file is in both, and those with tests of Ray are in one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        _split_scope = staticmethod(scope_of)

    return ByFile(config, log)


@cache
def _file_scope(file: str) -> str:
    return "ray" if "mark.ray" in (ROOT / file).read_text() else file


def scope_of(nodeid: str) -> str:
    """What a test is kept together with."""
    return _file_scope(nodeid.partition("::")[0])


@pytest.fixture(autouse=True)
def _records_are_made_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings in the process of a test start no process for their records, unless the test is marked."""
    if "ray_yolo.sinks.run_logger" in sys.modules and not request.node.get_closest_marker("record_process"):
        from tests.support.records import make_here

        make_here(monkeypatch)


@pytest.fixture
def own_signal_handlers() -> Iterator[None]:
    """Those of a command are gone after a test that has run one in this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_deadline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process of the tests is no command, even if a test runs one in it: no deadline ends it, and none is left."""
    monkeypatch.setattr(deadline, "end_process_at_deadline", lambda: None)
    yield
    deadline.clear()


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """A server of S3 with a bucket, s3://bucket, and the environment by which it is reached, which is set."""
    from tests.support.object_storage import s3_server

    with s3_server() as settings, pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        yield settings


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The same of Azure's storage, az://bucket."""
    from tests.support.object_storage import azure_server

    with azure_server(tmp_path_factory.mktemp("azurite")) as settings, pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One small Ray for all tests that need one: starting it takes longer than most of them."""
    os.environ.update(RAY_SETTINGS)

    import ray

    from ray_yolo.runtime.cluster import own_token

    own_token()
    ray.shutdown()  # tests before this one may have left a Ray that a search has started: a process is in one cluster
    ray.init(address="local", num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
