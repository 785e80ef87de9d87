"""Secrets in environment, flags, addresses and errors of a training: none is in anything that it leaves behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.support.jobs import make_config
from tests.support.machines import wait_for

KEY = "AKIAC4N4RYC4N4RYC4NA"
SECRETS = {  # kind -> what must not be found
    "AWS keys": (KEY, "c4n4ry/aws/secret+key"), "MLflow password": ("c4n4ry-mlflow-password",),
    "bearer token": ("c4n4ry-bearer-token",), "Ray's token": ("c4n4ry0ra" * 7,),
    "presigned address": ("c4n4ry0signature", "c4n4ry0session"), "password": ("c4n4ry-database-password",)}
PRESIGNED = ("https://bucket.s3.amazonaws.com/set.zip?X-Amz-Credential=" + KEY + "%2F20260101&X-Amz-Security-Token="
             "c4n4ry0session&X-Amz-Signature=c4n4ry0signature")
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": "c4n4ry/aws/secret+key", "RAY_AUTH_TOKEN": "c4n4ry0ra" * 7,
    "RAY_AUTH_MODE": "token", "MLFLOW_TRACKING_TOKEN": "c4n4ry-bearer-token", "DATA_URL": PRESIGNED,
    "DB_PASSWORD": "c4n4ry-database-password", "RAY_worker_niceness": "0"}
# A worker that fails as libraries do: with all that it was given, in its message and in that of its cause.
TRAINING = """
import os
from ray_yolo.runtime.workers import worker

train = worker.train_worker

def fails(config):
    from ray_yolo.engine.session import Session

    after_step = Session.after_step

    def after(session, *given):
        after_step(session, *given)
        if session.learner.state.progress.step == 3:
            said = "\\n".join(f"{name}={os.environ[name]}" for name in ("AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"))
            try:
                raise KeyError(f"Authorization: Bearer {os.environ['MLFLOW_TRACKING_TOKEN']} {os.environ['DATA_URL']}")
            except KeyError as error:
                said += f" RAY_AUTH_TOKEN={os.environ['RAY_AUTH_TOKEN']} {os.environ['DATA_URL']}"
                raise OSError(said) from error

    Session.after_step = after
    return train(config)

worker.train_worker = fails
from ray_yolo.cli import train as main
from ray_yolo.cli import run

raise SystemExit(run(main))
"""


@pytest.fixture
def tracker(tmp_path: Path) -> Iterator[str]:
    """The address of an MLflow server, with a user and a password in it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/tracker.db",
             "--artifacts-destination", str(tmp_path / "artifacts")]
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1", *store]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: answers(port))
        yield f"http://ann:c4n4ry-mlflow-password@127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def answers(port: int) -> bool:
    with socket.socket() as line:
        return line.connect_ex(("127.0.0.1", port)) == 0


def leaks(*folders: Path) -> dict[str, list[str]]:
    """Kind of secret -> files that have one, or its name."""
    found: dict[str, list[str]] = {}
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes() + os.fsencode(path.name)
        for kind, secrets in SECRETS.items():
            if any(secret.encode() in content for secret in secrets):
                found.setdefault(kind, []).append(str(path))
    return found


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_no_secret_is_left_anywhere(tmp_path: Path, tracker: str) -> None:
    for folder in ("given", "storage"):
        (tmp_path / folder).mkdir()
    files = make_config(tmp_path / "given", 1)
    data = tmp_path / "given" / "data" / "data.yaml"
    data.write_text(data.read_text() + f"download: {PRESIGNED}\n")
    flags = ["--data", str(data), "--model", files.recipe.model, "--imgsz", "64", "--epochs", "2", "--batch-size", "8",
             "--num-workers", "2", "--cpus-per-worker", "0.5", "--max-failures", "1", "--mlflow-uri", tracker,
             "--storage-path", str(tmp_path / "storage")]
    (tmp_path / "training.py").write_text(TRAINING)
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as short:  # Ray's sockets need short names
        env = {**os.environ, **ENVIRONMENT, "RAY_TMPDIR": short, "HOME": str(tmp_path / "home")}
        done = subprocess.run([sys.executable, tmp_path / "training.py", *flags], env=env, cwd=tmp_path / "storage",
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        (tmp_path / "storage" / "console.txt").write_text(done.stdout)
        assert done.returncode == 3, done.stdout
        client = MlflowClient(f"sqlite:///{tmp_path}/tracker.db")
        (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
        assert run.info.status == "FAILED"
        (tmp_path / "storage" / "tracked.txt").write_text(f"{run.data.params}{run.data.tags}")
        assert list((tmp_path / "artifacts").rglob("events.jsonl"))
        assert not list(Path(short).rglob("*.log"))  # the command's own Ray is removed with its logs
        assert leaks(tmp_path / "storage", tmp_path / "artifacts", tmp_path / "home", Path(short)) == {}


def test_a_leak_is_found(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c4n4ry0signature.txt").write_bytes(b"\\0 c4n4ry-database-password")
    assert leaks(tmp_path).keys() == {"presigned address", "password"}
