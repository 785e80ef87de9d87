"""How a command reaches a Ray that others run: addresses, ports, and what its own job holds, on a real head."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.runtime.test_serving import weights
from tests.unit.test_cli import ROOT

__all__ = ["weights"]  # a fixture

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
RAY = Path(sys.executable).with_name("ray")


@dataclass(frozen=True)
class Head:
    """A cluster of four CPUs on this machine, with ports and a --temp-dir of its own."""

    port: int
    dashboard: int
    client: int
    environment: dict[str, str]

    def python(self, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code], env=self.environment | variables, cwd=ROOT, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)

    def submit(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`ray job submit`, whose agent may still start."""
        argv = [RAY, "job", "submit", "--address", f"http://127.0.0.1:{self.dashboard}", *words]
        deadline = time.monotonic() + 120
        while True:
            done = subprocess.run(argv, env=self.environment, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, check=False)
            if "submitted successfully" in done.stdout:
                return done
            assert time.monotonic() < deadline, done.stdout
            time.sleep(1)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    home = tmp_path_factory.mktemp("home")
    log = home / "head.log"
    free = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    port, dashboard, client = (server.getsockname()[1] for server in free)
    for server in free:
        server.close()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0",
                   "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as short, log.open("w") as stream:
        process = subprocess.Popen(
            [RAY, "start", "--head", "--block", "--num-cpus=4", f"--port={port}", f"--temp-dir={short}",
             f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}",
             "--dashboard-agent-listen-port=0"], env=environment, cwd=home, stdout=stream, stderr=stream)
        try:
            while "Ray runtime started" not in log.read_text():
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            yield Head(port, dashboard, client, environment)
        finally:
            process.terminate()
            process.wait(60)


CONNECT = """
import sys, time
from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import RayYoloError
from ray_yolo.runtime import cluster
for address in sys.argv[1:]:
    began = time.monotonic()
    try:
        cluster.connect(Placement(address=address))
        print("connected")
    except RayYoloError as error:
        print(error.exit_code, error)
    assert time.monotonic() - began < 45
"""


def test_each_port_that_is_not_the_heads_is_named(head: Head) -> None:
    """The dashboard's port was waited for without end, and Ray Client's address was accepted."""
    places = [f"127.0.0.1:{head.dashboard}", f"ray://127.0.0.1:{head.client}", f"127.0.0.1:{head.client}",
              f"127.0.0.1:{head.port}"]
    done = subprocess.run([sys.executable, "-c", CONNECT, *places], env=head.environment, cwd=ROOT, text=True,
                          capture_output=True, check=False)
    dashboard, scheme, client, connected = done.stdout.splitlines()
    assert dashboard.startswith(f"4 address: {places[0]} is the port of a web server, such as the dashboard")
    assert scheme.startswith(f"2 address: {places[1]} is Ray Client's address, through which no training runs")
    assert client.startswith(f"4 address: {places[2]}: ")
    assert connected == "connected"


def test_a_head_that_does_not_answer_is_given_up(head: Head) -> None:
    """It is frozen: its port accepts connections."""
    (server,) = [int(process.name) for process in Path("/proc").glob("[0-9]*")
                 if f"--gcs_server_port={head.port}".encode() in (process / "cmdline").read_bytes().split(b"\0")]
    os.kill(server, signal.SIGSTOP)
    try:
        done = subprocess.run([sys.executable, "-c", CONNECT, f"127.0.0.1:{head.port}"], env=head.environment, cwd=ROOT,
                              text=True, stdout=subprocess.PIPE, check=False, timeout=120)
    finally:
        os.kill(server, signal.SIGCONT)
    assert done.stdout.startswith(f"4 address: no answer from 127.0.0.1:{head.port} (timed out)")


def test_a_head_of_another_folder_is_named(head: Head, tmp_path: Path) -> None:
    code = ("from ray_yolo.config.placement import Placement\nfrom ray_yolo.runtime import cluster\n"
            "print(cluster._address(Placement(), print))")
    *said, address = head.python(code, RAY_TMPDIR=str(tmp_path)).stdout.splitlines()
    assert address == "local"
    assert re.search(rf"another one runs here, at [0-9.]+:{head.port}: .*--address", said[-1])


HOLD = """
import ray
from ray_yolo.config.placement import Placement
from ray_yolo.runtime import cluster
ray.init(address="auto", log_to_driver=False)

@ray.remote(num_cpus=1)
class Reader:
    def ready(self):
        return True

reader = Reader.remote()
ray.get(reader.ready.remote())
print(cluster.room(Placement(num_workers=2, cpus_per_worker=1.0), 0.0), cluster._held_by_own("CPU"))
print("others:", cluster.other_jobs())
"""


def test_what_a_job_itself_holds_is_counted_and_ray_itself_is_no_job(head: Head) -> None:
    done = head.submit("--entrypoint-num-cpus", "2", "--", sys.executable, "-c", HOLD)
    lines = done.stdout.splitlines()
    assert "1 2 CPU for its entry point (--entrypoint-num-cpus), 1 CPU for actor Reader" in lines
    assert "others: {}" in lines


def test_a_training_that_its_own_entry_point_leaves_no_room_for_is_refused(head: Head, tmp_path: Path) -> None:
    """It waited for ever: three of the four CPUs are held by its own entry point."""
    done = head.submit(
        "--entrypoint-num-cpus", "3", "--", sys.executable, "-m", "ray_yolo.train", "--data", "shapes8", "--model",
        "yolov5n", "--imgsz", "64", "--epochs", "1", "--num-workers", "2", "--cpus-per-worker", "1",
        "--wait-for-resources", "1", "--storage-path", str(tmp_path))
    assert ("2 workers need 2 CPU, the cluster has 4, of which this job itself holds 3 CPU for its entry point "
            "(--entrypoint-num-cpus)") in done.stdout
    assert "exit code 4" in done.stdout


def test_a_job_without_a_working_directory_says_where_it_looked(head: Head) -> None:
    done = head.submit("--", sys.executable, "-m", "ray_yolo.train", "--data", "mine.yaml")
    assert "mine.yaml: no such file" in done.stdout
    assert re.search(r"this job has no working directory: it runs in /\S+ on \S+, .*--working-dir \.", done.stdout)


def test_more_replicas_than_the_cluster_can_hold_are_refused(head: Head, weights: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ray_yolo.serve", "--weights", str(weights), "--num-replicas", "8"], cwd=ROOT, text=True,
        env=head.environment | {"RAY_ADDRESS": f"127.0.0.1:{head.port}"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False, timeout=240)
    assert done.returncode == 4, done.stdout
    assert "8 replicas need 8 CPU, the cluster has 4; use --num-replicas 4, a smaller --cpus-per-replica" in done.stdout
