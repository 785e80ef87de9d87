"""A Ray cluster of two machines with token, jobs, tracker and storage, as users have one: `make cluster-test`."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ray_yolo.core.events import CheckpointEvent, Event, StartEvent, StepEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from tests.support import machines
from tests.support.machines import Machines, wait_for
from tests.support.run_log import only

pytestmark = [pytest.mark.root, pytest.mark.ray, pytest.mark.timeout(1800),
              pytest.mark.skipif(bool(machines.missing()), reason=machines.missing() or "-")]

EPOCHS = 80  # a node that comes back takes its time
RECIPE = ["--data", "shapes", "--model", "yolov5n", "--imgsz", "64", "--epochs", str(EPOCHS), "--batch-size", "16",
          "--microbatch", "8", "--exact", "--noval", "--noplots"]
STORAGE = "storage"  # of what is not a job's
S3, BUCKET = "http://10.77.0.254:5001", "s3://bucket/vision"  # the job's: its nodes have no folder in common
SERVE_S3 = "from moto.server import main; main(['-H', '10.77.0.254', '-p', '5001'])"
MAKE_BUCKET = f"import urllib.request as r; r.urlopen(r.Request('{S3}/bucket', method='PUT'))"
HEAD, DASHBOARD, TRACKER = "10.77.0.1:6379", "http://127.0.0.1:8265", "http://127.0.0.1:5000"
RAY = f"#!{sys.executable}\nfrom ray.scripts.scripts import main\n\nmain()\n"  # `ray stop` knows processes by this name
START = "./ray start --num-cpus=1 --object-store-memory=100000000 --block"
SCRIPTS = {  # as a service manager keeps nodes: the head tells jobs of the tracker, the other one is started again
    "n1": f"MLFLOW_TRACKING_URI={TRACKER} {START} --head --node-ip-address=10.77.0.1 > n1.log 2>&1\nsleep infinity",
    "n2": f"""export RAY_YOLO_CACHE=$PWD/cache-n2
              until [[ -e over ]]; do
                  {START} --address={HEAD} --node-ip-address=10.77.0.2 >> n2.log 2>&1
                  sleep 1
              done
              sleep infinity"""}
ASK = "import ray, time; ray.init('auto', log_to_driver=False, logging_level='ERROR'); "


class Service:
    """Two nodes, of which the first one has the head and the tracking server."""

    def __init__(self, nodes: Machines, folder: Path) -> None:
        self.nodes, self.folder = nodes, folder
        self.uninterrupted = folder / STORAGE / "runs" / "train" / "calm"

    @property
    def run_dir(self) -> Path:
        """The job's run on the driver's disk."""
        return next(self.folder.glob("cache/*/*/runs/train/cut"), self.folder / "cut")

    @property
    def events(self) -> list[Event]:
        log = self.run_dir / EVENTS_FILE
        return read_events(log) if log.exists() else []

    def read(self, log: str) -> str:
        return (self.folder / log).read_text() if (self.folder / log).exists() else ""

    def train(self, name: str, *flags: str | Path, **env: str) -> "subprocess.CompletedProcess[str]":
        return self.nodes.run(name, sys.executable, "-m", "ray_yolo.train", *RECIPE,
                              "--storage-path", self.folder / STORAGE, *flags, **env)

    def await_nodes(self, number: int) -> None:
        """Wait until Ray counts so many."""
        code = f"{ASK}\nwhile sum(node['Alive'] for node in ray.nodes()) != {number}: time.sleep(0.5)"
        assert self.nodes.run("n1", "timeout", "600", sys.executable, "-c", code).returncode == 0

    def trained(self, workers: int, steps: int) -> bool:
        """Whether so many have trained together for so many steps since the last change."""
        events = self.events
        last = max((place for place, event in enumerate(events) if isinstance(event, StartEvent)), default=0)
        return bool(events) and isinstance(event := events[last], StartEvent) and event.num_workers == workers and (
            len(only(StepEvent, events[last:])) >= steps)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as name:  # /tmp is each node's own
        folder = Path(name)
        for part in (STORAGE, "home"):
            (folder / part).mkdir()
        (folder / "token").touch(0o600)
        (folder / "token").write_text("c" * 64)
        (folder / "ray").write_text(RAY)
        (folder / "ray").chmod(0o755)
        settings = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": f"{name}/home", "RAY_YOLO_CACHE": str(folder / "cache"),
            "AWS_ENDPOINT_URL": S3, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "canary-of-the-tests",
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "10", **machines.PATIENCE, "RAY_metrics_report_interval_ms": "2000",
            "RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "3000",
            "RAY_health_check_failure_threshold": "4"}  # 65 s otherwise
        with Machines(folder, SCRIPTS, settings) as nodes, (folder / "tracker.log").open("w") as log:
            quiet = f"TMPDIR={folder}/home", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false"  # it leaves /dev/shm alone
            nodes.start("n1", "env", *quiet, sys.executable, "-m", "mlflow", "server",
                        "--port", "5000", "--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/tracker.db",
                        "--artifacts-destination", folder / "artifacts", stdout=log, stderr=log)
            nodes.start("control", sys.executable, "-c", SERVE_S3, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_for(lambda: nodes.run("control", sys.executable, "-c", MAKE_BUCKET).returncode == 0)
            service = Service(nodes, folder)
            for log, word in (("n1.log", "Ray runtime started"), ("tracker.log", "Uvicorn running")):
                wait_for(lambda log=log, word=word: word in service.read(log))
            service.await_nodes(2)
            yield service


def listening(service: Service, name: str) -> set[tuple[str, int]]:
    """(address as the kernel writes it, port) of whatever waits for connections on a machine."""
    rows = [line.split() for line in service.nodes.run(name, "cat", "/proc/net/tcp").stdout.splitlines()[1:]]
    return {(row[1].partition(":")[0], int(row[1].partition(":")[2], 16)) for row in rows if row[3] == "0A"}


def test_what_is_for_the_head_alone_cannot_be_reached_from_another_node(service: Service) -> None:
    there = listening(service, "n1")
    ports = {port for _, port in there} - {port for address, port in there if address != "0100007F"}
    assert {8265, 5000} <= ports
    code = ("import socket, sys\n"
            "for port in sys.argv[1:]: print(port, socket.socket().connect_ex(('10.77.0.1', int(port))))")
    messages = service.nodes.run("n2", sys.executable, "-c", code, *map(str, sorted(ports)), "6379").stdout.splitlines()
    # connection refused; the head lets nodes in
    assert messages == [f"{port} 111" for port in sorted(ports)] + ["6379 0"]


@pytest.mark.parametrize("token", [{"RAY_AUTH_TOKEN_PATH": "", "RAY_AUTH_TOKEN": "d" * 64},
                                   {"RAY_AUTH_TOKEN_PATH": ""}], ids=["wrong", "none"])
def test_the_cluster_refuses_clients_without_the_token(service: Service, token: dict[str, str]) -> None:
    refused = service.train("n2", "--num-workers", "1", "--address", HEAD, **token)
    assert refused.returncode == 4, refused.stdout
    assert "token" in refused.stdout.splitlines()[-1]
    assert "Traceback" not in refused.stdout
    ray, touched = service.folder / "ray", service.folder / "touched"
    job = service.nodes.run("n1", ray, "job", "submit", "--address", DASHBOARD, "--", "touch", touched, **token)
    node = service.nodes.run("n2", "timeout", "60", ray, "start", f"--address={HEAD}", "--node-ip-address=10.77.0.2",
                             **token)
    assert job.returncode
    assert node.returncode
    assert not touched.exists()
    service.await_nodes(2)


def test_a_training_survives_a_cut_network_with_the_weights_of_an_uninterrupted_run(service: Service) -> None:
    uninterrupted = service.train("control", "--num-workers", "0", "--name", "calm", "--mlflow-uri", "off")
    assert uninterrupted.returncode == 0, uninterrupted.stdout
    log = service.folder / "job.log"
    with log.open("w") as stream:
        job = service.nodes.start(
            "n1", service.folder / "ray", "job", "submit", "--address", DASHBOARD, "--", sys.executable, "-m",
            "ray_yolo.train", *RECIPE, "--storage-path", BUCKET, "--num-workers", "2",
            "--name", "cut", stdout=stream, stderr=stream)
    wait_for(lambda: service.trained(2, 20) or job.poll() is not None)
    wait_for(lambda: scraped(service) >= {"ray_yolo_step", "ray_yolo_worker_step"})
    service.nodes.payload("n2", "down")
    wait_for(lambda: service.trained(1, 1) or job.poll() is not None)
    service.await_nodes(1)
    service.nodes.payload("n2", "up")
    wait_for(lambda: service.trained(2, 1) or job.poll() is not None)
    assert job.wait(600) == 0, log.read_text()
    assert [start.num_workers for start in only(StartEvent, service.events)] == [2, 1, 2]
    verify = sys.executable, "-m", "ray_yolo.verify", f"{BUCKET}/runs/train/cut", service.uninterrupted
    compared = service.nodes.run("n1", *verify)
    assert compared.returncode == 0, compared.stdout
    assert compared.stdout.count(" ok") > 4
    ends = [
        only(CheckpointEvent, read_events(folder / EVENTS_FILE))[-1]
        for folder in (service.run_dir, service.uninterrupted)
    ]
    assert ends[0].digest == ends[1].digest
    assert ends[0].step == ends[1].step


def scraped(service: Service) -> set[str]:
    """The metrics of ours that a Prometheus with the settings that Ray writes down would collect."""
    code = ("import json, re, urllib.request, yaml\n"
            "asked = yaml.safe_load(open('/tmp/ray/session_latest/metrics/prometheus/prometheus.yml'))\n"
            "for file in asked['scrape_configs'][0]['file_sd_configs'][0]['files']:\n"
            "    for target in json.load(open(file))[0]['targets']:\n"
            "        text = urllib.request.urlopen(f'http://{target}/metrics', timeout=20).read().decode()\n"
            "        print('target', target, *sorted(set(re.findall(r'^ray_yolo_\\w+', text, re.M))))")
    messages = [line.split() for line in service.nodes.run("n1", sys.executable, "-c", code).stdout.splitlines()]
    nodes = [words for words in messages if words[0] == "target"]
    assert {words[1].partition(":")[0] for words in nodes} == {"10.77.0.1", "10.77.0.2"}, messages
    return {name for words in nodes for name in words[2:]}


def test_it_is_one_run_of_the_tracking_server(service: Service) -> None:
    client = MlflowClient(f"sqlite:///{service.folder}/tracker.db")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/box_loss")
    assert [point.step for point in history] == list(range(1, EPOCHS + 1))


def test_nothing_is_left(service: Service) -> None:
    code = f"{ASK}print(sorted(kind for kind, free in ray.available_resources().items() if kind == 'CPU' and free < 2))"
    assert service.nodes.run("n1", sys.executable, "-c", code).stdout.splitlines()[-1] == "[]"
    (service.folder / "over").touch()
    for name in ("n2", "n1"):
        service.nodes.run(name, service.folder / "ray", "stop", "--grace-period", "20")
    for name in ("n1", "n2"):
        deadline = time.monotonic() + 60
        while left := [command for command in service.nodes.processes(name) if "ray start" not in command]:  # it waits
            assert time.monotonic() < deadline, left
            time.sleep(1)
        # the lock of the image cache stays, and is empty: to remove a lock is a race
        assert service.nodes.run(name, "find", "/dev/shm", "-type", "f", "-size", "+0").stdout == ""
        there = service.nodes.run(name, "ls", "/tmp").stdout.split()
        others = "ray", "pymp-", "torchinductor_"  # Ray's own, its dashboard's, and torch's as DDP is imported
        assert [file for file in there if not file.startswith(others)] == []
    # which have a node's name
    cut, uninterrupted = ({path.name for path in run.glob("*") if "tfevents" not in path.name}
                 for run in (service.run_dir, service.uninterrupted))
    assert cut - uninterrupted <= {"ray", "mlflow.json", ".stored-at", ".holder"}
    assert not [path for path in service.folder.glob("cache-n2/*/**/*") if path.is_file()]
