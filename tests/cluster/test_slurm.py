"""cluster/slurm.sh, run for real with stand-ins for SLURM and Ray."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_yolo.cli import parse_train
from tests.support.stubs import Stubs

SCRIPT = Path(__file__).parents[2] / "cluster" / "slurm.sh"
HOSTILE = ["--name", "it's a run", "--set", 'a="b c"', "$HOME `id` $(id); exit 1", "*", "", "--", "trailing\\"]

SRUN = """
note()
command = next(i for i, word in enumerate(argv) if not word.startswith("-"))
os.execvp(argv[command], argv[command:])
"""
# Ray starts nothing, runs the command of the head node and passes its exit status on, as the real one does.
RAY = """
if argv[0] == "stop":
    sys.exit()
note()
sys.exit(subprocess.run(argv[argv.index("--") + 1:]).returncode)
"""
PYTHON = """
if argv[:2] != ["-m", "ray_yolo.train"]:
    os.execv(sys.executable, [sys.executable, *argv])
token = os.environ["RAY_AUTH_TOKEN_PATH"]
mode = lambda path: oct(os.stat(path).st_mode & 0o777)
signal.signal(signal.SIGTERM, lambda *_: (note(event="stopped"), sys.exit(143)))
folder = os.environ["RAY_TMPDIR"]
note(event="train", folder=folder, owned=mode(folder), auth=os.environ["RAY_AUTH_MODE"],
     token=open(token).read(), path=token, modes=[mode(token), mode(os.path.dirname(token))])
time.sleep({seconds})
sys.exit({status})
"""


class TrainSpec:
    """One batch job of two nodes with 32 CPUs and 4 GPUs each."""

    def __init__(self, folder: Path) -> None:
        self.stubs = Stubs(folder / "bin")
        self.stubs.add("hostname", "print('10.0.0.7 172.17.0.1')")
        self.stubs.add("srun", SRUN)
        self.stubs.add("scontrol")
        self.stubs.add("ray", RAY)
        self.train()
        self.home = folder / "a home"
        self.home.mkdir()
        self.env = {
            **os.environ, "PATH": f"{self.stubs.folder}:{os.environ['PATH']}", "HOME": str(self.home),
            "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "32", "SLURM_GPUS_ON_NODE": "4",
            "SLURM_SUBMIT_DIR": str(folder),
        }

    def train(self, status: int = 0, seconds: int = 0) -> None:
        """What the training will do."""
        self.stubs.add("python", PYTHON.format(status=status, seconds=seconds))

    def start(self, *flags: str) -> subprocess.Popen:
        return subprocess.Popen(["bash", SCRIPT, *flags], env=self.env, text=True, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def run(self, *flags: str) -> int:
        process = self.start(*flags)
        process.communicate(timeout=60)
        return process.returncode

    def events(self, name: str) -> list[dict]:
        return [call for call in self.stubs.calls if call.get("event") == name]

    @property
    def requeued(self) -> bool:
        return [call["argv"] for call in self.stubs.calls if call["command"] == "scontrol"] == [["requeue", "4711"]]


@pytest.fixture
def job(tmp_path: Path) -> TrainSpec:
    return TrainSpec(tmp_path)


def test_arguments_arrive_unharmed(job: TrainSpec) -> None:
    assert job.run(*HOSTILE) == 0
    (train,) = job.events("train")
    assert train["argv"][-len(HOSTILE):] == HOSTILE


def test_the_allocation_becomes_the_placement(job: TrainSpec) -> None:
    job.run()
    (train,) = job.events("train")
    assert train["argv"] == ["-m", "ray_yolo.train", "--num-workers", "8", "--cpus-per-worker", "8",
                             "--storage-path", job.env["SLURM_SUBMIT_DIR"], "--name", "slurm-4711"]
    placement = parse_train(train["argv"][2:]).config.placement
    assert (placement.num_workers, placement.cpus_per_worker, placement.name) == (8, 8, "slurm-4711")
    before, run = (call["argv"] for call in job.stubs.calls if call["command"] == "srun")
    assert before[-3:-1] == ["bash", "-c"]
    assert before[-1].startswith("ray stop --force;")
    assert "--cpus-per-task=32" in run
    assert job.stubs.call("ray")["argv"][:7] == ["symmetric-run", "--address", "10.0.0.7:24711", "--min-nodes", "2",
                                                 "--num-cpus=32", "--num-gpus=4"]


def test_without_gpus_there_is_one_worker_a_node(job: TrainSpec) -> None:
    del job.env["SLURM_GPUS_ON_NODE"]
    job.run()
    (train,) = job.events("train")
    assert train["argv"][2:6] == ["--num-workers", "2", "--cpus-per-worker", "32"]
    assert "--num-gpus=0" in job.stubs.call("ray")["argv"]


def test_the_token_is_random_private_and_gone_afterwards(job: TrainSpec) -> None:
    for _ in range(2):
        job.run()
    first, second = job.events("train")
    assert first["auth"] == "token"
    assert first["modes"] == ["0o600", "0o700"]
    assert re.fullmatch("[0-9a-f]{64}", first["token"])
    assert first["token"] != second["token"]
    assert not any(first["token"] in word for call in job.stubs.calls for word in call["argv"])
    assert list(job.home.iterdir()) == []


def test_rays_folder_is_the_users_alone_has_no_known_name_and_is_gone_afterwards(job: TrainSpec) -> None:
    left = Path(tempfile.mkdtemp(prefix="ray_yolo-slurm.", dir="/tmp"))  # by a job that was killed
    for _ in range(2):
        job.run()
    first, second = job.events("train")
    assert re.fullmatch(r"/tmp/ray_yolo-slurm\.\w{6}", first["folder"])
    assert first["folder"] != second["folder"]
    assert first["owned"] == second["owned"] == "0o700"
    assert not [path for path in (left, Path(first["folder"]), Path(second["folder"])) if path.exists()]


@pytest.mark.parametrize("status", [0, 2, 3])
def test_the_exit_status_is_the_trainings(job: TrainSpec, status: int) -> None:
    job.train(status)
    assert job.run() == status
    assert not job.requeued


def test_the_time_limit_stops_the_driver_and_queues_again(job: TrainSpec) -> None:
    job.train(seconds=60)
    process = job.start()
    wait_for(lambda: bool(job.events("train")))
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert job.events("stopped")
    assert job.requeued
    assert list(job.home.iterdir()) == []


def test_a_ray_that_never_started_is_a_failure(job: TrainSpec) -> None:
    """`ray symmetric-run` exits 0 then."""
    job.stubs.add("ray")
    assert job.run() == 1


def test_the_script_is_sound() -> None:
    checks = [["bash", "-n"]] + [["shellcheck", "--severity=warning"]] * bool(shutil.which("shellcheck"))
    for check in checks:
        done = subprocess.run([*check, SCRIPT], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "set -euo pipefail" in SCRIPT.read_text()
    assert not re.search(r"\beval\b|\$\*|(?<!\")\$@", SCRIPT.read_text())
    assert os.access(SCRIPT, os.X_OK)


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"nothing happened for {seconds} s"
        time.sleep(0.05)
