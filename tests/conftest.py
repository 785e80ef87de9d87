"""Fixtures for everyone."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from ray_yolo.core import deadline

settings.register_profile("untimed", deadline=None)  # on a busy machine any example may take long
settings.load_profile("untimed")

ROOT = Path(__file__).parents[1]
RAY_SETTINGS = {
    "RAY_worker_niceness": "0",  # 15 otherwise, which loses against everything else on a small machine
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # every report waits for this poll
    "RAY_metrics_report_interval_ms": "1000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's coming default; silences its announcement
}


DURATIONS = ROOT / "tests" / "durations.json"
"""CPU seconds of the tests that take more than LONG, by name; of a parametrised one all cases together."""
LONG, UNRECORDED = 1.0, 3.0
"""CPU seconds: tests above the first are not in `make test`, tests above the second are recorded or marked."""
YARDSTICK = 0.04
"""CPU seconds of the work in `slowness` on the machine of the record; UNRECORDED is longer on a slower one."""
IMPORTED = 50
"""Modules: a test that imports more for the first time pays for those after it."""
NOT_QUICK = ("ray", "slow", "faults", "gpu", "realdata", "root", "azure")
SETUPS: dict[tuple[str, str], float] = {}  # (file, fixture): CPU seconds of its set-up for each test that uses it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write what the tests take to {DURATIONS.name}")
    parser.addoption("--check-durations", action="store_true",
                     help=f"fail tests above {UNRECORDED:g} CPU seconds that are neither recorded nor marked")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `long` what `make test` leaves out; the files with tests of Ray come first: they take the longest."""
    recorded = read_durations()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "smoke" not in marks and (not marks.isdisjoint(NOT_QUICK) or name_of(item.nodeid) in recorded):
            item.add_marker("long")
    items.sort(key=lambda item: scope_of(item.nodeid) != "ray")


def read_durations() -> dict[str, float]:
    """What DURATIONS holds; empty without the file."""
    return dict(json.loads(DURATIONS.read_text())) if DURATIONS.exists() else {}


def name_of(nodeid: str) -> str:
    """A test's id without the case."""
    return nodeid.partition("[")[0]


def exists(name: str) -> bool:
    """Whether the file of a test has a function of its name."""
    path, function = ROOT / name.partition("::")[0], name.rpartition("::")[2]
    return path.exists() and f"def {function}(" in path.read_text()


def cpu_seconds() -> float:
    """What this process, its ended children and its fork server's have used. Ray's processes are not among them."""
    server = forkserver._forkserver._forkserver_pid  # None until it is used
    try:
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        fields = []
    return sum(os.times()[:4]) + sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(request: Any) -> Iterator[None]:
    """Note what a fixture costs each of its users in the file: which of them comes first is no property of a test."""
    start = cpu_seconds()
    try:
        return (yield)
    finally:
        test, name = request._pyfuncitem, request.fixturename
        if request.scope == "function":
            users = 1
        else:
            users = sum(item.path == test.path and name in item.fixturenames for item in test.session.items)
        SETUPS[test.path.as_posix(), name] = (cpu_seconds() - start) / users


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    """Note a test's CPU seconds. On request, one above UNRECORDED fails unless it is recorded or marked."""
    start, modules = cpu_seconds(), len(sys.modules)
    try:
        yield
    finally:
        setup = sum(SETUPS.get((item.path.as_posix(), name), 0) for name in item.fixturenames)
        seconds = setup + cpu_seconds() - start
        item.user_properties.append(("cpu", seconds))
    marks = {mark.name for mark in item.iter_markers()}
    exempt = not marks.isdisjoint({"smoke", "long"}) or len(sys.modules) - modules > IMPORTED
    checked = item.config.getoption("--check-durations") and not exempt and seconds > UNRECORDED
    if checked and seconds > UNRECORDED * slowness():
        pytest.fail(f"{seconds:.1f} CPU seconds: record it with --record-durations, or mark it with smoke or long")


def slowness() -> float:
    """How much slower this machine computes than that of the record, at least 1."""
    start = time.process_time()
    sum(number % 7 for number in range(1_000_000))
    return max(1.0, (time.process_time() - start) / YARDSTICK)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: Any, nextitem: Any) -> None:
    """End Ray with the last file that uses it. If Ray's head does not answer for 60 s, as on a very busy machine, Ray
    ends this process, in whatever test that is then."""
    if nextitem and "ray" in sys.modules and scope_of(item.nodeid) == "ray" != scope_of(nextitem.nodeid):
        sys.modules["ray"].shutdown()


class DurationRecorder:
    """Sums the CPU seconds of each test over its cases and rewrites DURATIONS at the end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            name = name_of(report.nodeid)
            self.seconds[name] = self.seconds.get(name, 0) + dict(report.user_properties)["cpu"]

    def pytest_sessionfinish(self) -> None:
        recorded = {**read_durations(), **self.seconds}
        above = {name: round(seconds, 1) for name, seconds in sorted(recorded.items())
                 if seconds > LONG and exists(name)}
        DURATIONS.write_text(json.dumps(above, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):  # xdist's workers report to it
        config.pluginmanager.register(DurationRecorder())


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
    ray.init(address="local", num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
