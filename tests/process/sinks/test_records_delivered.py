"""The minute after the prompt: what becomes of records on a real MLflow server and in a bucket.

A training is a command in a process of its own. Its record process is frozen, killed or late, its folder is moved, and
its command is process 1 of a container. In the end the pictures are in the bucket and in MLflow, and nothing is twice.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from ray_yolo.core.events import EndEvent, StepEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.storage.store import open_store
from tests.process.sinks.test_record_process import PICTURES
from tests.support.jobs import make_config
from tests.support.machines import wait_for
from tests.support.object_storage import s3_server
from tests.support.servers import MlflowServer

pytestmark = [pytest.mark.slow, pytest.mark.record_process, pytest.mark.timeout(900)]

EPOCHS = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("mlflow"))
    server.wait_until_up()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


class Desk:
    """A place in which commands are given: a folder with a data set, a bucket's address, an MLflow server."""

    def __init__(self, folder: Path, storage: str, server: MlflowServer, bucket: dict[str, str]) -> None:
        self.folder, self.storage, self.server = folder, storage, server
        self.environment = {**os.environ, **bucket, "RAY_YOLO_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        self.config = make_config(folder, 0)

    def train(self, prefix: str = "", terminal: bool = True) -> subprocess.Popen[bytes]:
        """A training in the background of this test; at a terminal of its own, or in a job."""
        recipe = self.config.recipe
        train = [sys.executable, "-m", "ray_yolo.train", "--data", recipe.data, "--model", recipe.model, "--imgsz",
                 "64", "--batch-size", "8", "--epochs", str(EPOCHS), "--storage-path", self.storage, "--mlflow-uri",
                 self.server.uri]
        command = f"{prefix} {shlex.join(train)}".strip()
        words = ["script", "-qefc", command, "/dev/null"] if terminal else ["bash", "-c", f"exec {command}"]
        with (self.folder / "output.txt").open("w") as output:
            return subprocess.Popen(words, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
                                    stdout=output, stderr=output, start_new_session=True)

    def sync(self, run: str) -> None:
        subprocess.run([sys.executable, "-m", "ray_yolo.sync", run, "--mlflow-uri", self.server.uri], cwd=self.folder,
                       env=self.environment, check=True, timeout=600)

    @property
    def said(self) -> str:
        return (self.folder / "output.txt").read_text()

    def copy_of_run(self) -> Path:
        """The run's folder, or its working copy, once there is one with a step."""
        def found() -> Path | None:
            for log in sorted(self.folder.rglob(EVENTS_FILE)):
                if any(isinstance(event, StepEvent) for event in read_events(log)):
                    return log.parent
            return None

        folder = wait_for(found, 200)
        assert isinstance(folder, Path)
        return folder

    def record_process(self) -> int:
        """The pid of the process that makes the records."""
        def found() -> int:
            for folder in Path("/proc").iterdir():
                if not folder.name.isdigit():
                    continue
                try:
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    environment = (folder / "environ").read_bytes()
                except OSError:  # it has ended
                    continue
                if b"ray_yolo.sinks.records" in words and str(self.folder / "cache").encode() in environment:
                    return int(folder.name)
            return 0

        pid = wait_for(found, 200)
        assert isinstance(pid, int)
        return pid

    def in_bucket(self, run: str = "exp") -> set[str]:
        """The names of the files of a run at the top of its folder."""
        store = open_store(f"{self.storage}/runs/train/{run}")
        return {entry.name for entry in store.list("")}

    def is_tracked(self) -> bool:
        """Whether MLflow has a run of this desk that has ended."""
        client = MlflowClient(self.server.uri)
        return any(run.info.status == "FINISHED" and self.config.recipe.data in str(run.data.params | run.data.tags)
                   for experiment in client.search_experiments()
                   for run in client.search_runs([experiment.experiment_id]))

    def tracked(self, number: int = 1) -> list[set[str]]:
        """The files of each MLflow run of this desk. There must be so many, complete, and with one point an epoch."""
        client = MlflowClient(self.server.uri)
        everywhere = [run for experiment in client.search_experiments()
                      for run in client.search_runs([experiment.experiment_id])]
        own = [run for run in everywhere if str(self.config.recipe.data) in str(run.data.params | run.data.tags)]
        assert len(own) == number, [run.data.tags for run in everywhere]
        found = []
        for run in own:
            assert run.info.status == "FINISHED"
            points = client.get_metric_history(run.info.run_id, "metrics/mAP50-95")
            assert sorted(point.step for point in points) == list(range(1, len(points) + 1))
            assert len(points) == EPOCHS
            waiting, files = [""], set[str]()
            while waiting:
                for item in client.list_artifacts(run.info.run_id, waiting.pop() or None):
                    if item.is_dir:
                        waiting.append(item.path)
                    else:
                        files.add(Path(item.path).name)
            found.append(files)
        return found


@pytest.fixture
def desk(tmp_path: Path, server: MlflowServer, bucket: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Desk:
    """One whose runs are in a bucket."""
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)
    return Desk(tmp_path, f"s3://bucket/{tmp_path.name}", server, bucket)


def left_by_its_command(desk: Desk, terminal: bool = True) -> int:
    """A training whose record process is frozen until the command has ended. Returns the pid of that process."""
    process = desk.train(terminal=terminal)
    pid = desk.record_process()
    wait_for(lambda: Path(f"/proc/{pid}/cwd", EVENTS_FILE).exists(), 200)  # it works in the run's folder
    os.kill(pid, signal.SIGSTOP)
    assert process.wait(500) == 0, desk.said
    return pid


@pytest.mark.root
def test_a_command_that_is_process_1_of_a_container_leaves_nothing_to_do(desk: Desk) -> None:
    process = desk.train("unshare --pid --fork --mount-proc --kill-child")
    assert process.wait(600) == 0, desk.said
    assert desk.in_bucket() >= PICTURES
    assert desk.tracked()[0] >= PICTURES


def test_sync_draws_and_delivers_what_a_killed_process_has_not(desk: Desk) -> None:
    os.kill(left_by_its_command(desk), signal.SIGKILL)
    assert not desk.in_bucket() >= PICTURES
    desk.sync(f"{desk.storage}/runs/train/exp")
    assert desk.in_bucket() >= PICTURES
    assert desk.tracked()[0] >= PICTURES


def test_the_next_training_of_the_project_completes_the_one_before(desk: Desk) -> None:
    os.kill(left_by_its_command(desk), signal.SIGKILL)
    assert desk.train(terminal=False).wait(500) == 0, desk.said
    wait_for(lambda: desk.in_bucket() >= PICTURES and desk.in_bucket("exp2") >= PICTURES, 300)
    wait_for(lambda: all(names >= PICTURES for names in desk.tracked(2)), 300)


def test_sync_beside_the_process_that_still_draws_doubles_and_loses_nothing(desk: Desk) -> None:
    pid = left_by_its_command(desk)
    os.kill(pid, signal.SIGCONT)
    desk.sync(f"{desk.storage}/runs/train/exp")
    wait_for(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes(), 300)
    assert desk.in_bucket() >= PICTURES
    assert desk.tracked()[0] >= PICTURES


@pytest.mark.parametrize("is_deleted", [False, True])
def test_an_old_place_does_not_come_back(tmp_path: Path, server: MlflowServer, is_deleted: bool) -> None:
    desk = Desk(tmp_path, str(tmp_path), server, {})
    pid = left_by_its_command(desk)
    run = tmp_path / "runs" / "train" / "exp"
    moved = tmp_path / "elsewhere"
    run.rename(moved)
    if is_deleted:
        shutil.rmtree(moved)
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes(), 500)
    assert not run.exists()
    if not is_deleted:
        assert {path.name for path in moved.iterdir()} >= PICTURES
        assert desk.tracked()[0] >= PICTURES


def test_the_last_line_of_a_job_is_true(desk: Desk) -> None:
    """The job's server does not answer for a while, so the job waits. Then it says what is left, and that is so."""
    process = desk.train(terminal=False)
    log = desk.copy_of_run() / EVENTS_FILE
    desk.server.signal(signal.SIGSTOP)
    try:
        wait_for(lambda: any(isinstance(event, EndEvent) for event in read_events(log)), 300)
        begun = time.monotonic()
        assert process.wait(300) == 0, desk.said
        assert time.monotonic() - begun < 90
    finally:
        desk.server.signal(signal.SIGCONT)
    promises_more = "still being written in the background" in desk.said
    says_incomplete = "not complete; python -m ray_yolo.sync" in desk.said
    assert promises_more != says_incomplete
    if promises_more:
        wait_for(lambda: desk.in_bucket() >= PICTURES and desk.is_tracked(), 400)
        wait_for(lambda: desk.tracked()[0] >= PICTURES, 100)
    else:
        desk.sync(f"{desk.storage}/runs/train/exp")
        assert desk.tracked()[0] >= PICTURES
    kill_left(desk)


def kill_left(desk: Desk) -> None:
    """End what this desk has started and left."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if str(desk.folder / "cache").encode() in environment:
                os.kill(int(folder.name), signal.SIGKILL)
