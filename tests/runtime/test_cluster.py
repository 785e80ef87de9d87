"""Which cluster a command uses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_yolo.config import Placement
from ray_yolo.errors import ResourcesError
from ray_yolo.runtime import cluster


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that Ray is asked for, on a machine where nothing is known of any cluster."""
    addresses: list[str] = []

    def init(address: str, **_: Any) -> None:
        addresses.append(address)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "DRIVER_ENVIRONMENT", {})
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return addresses


def leave_word(folder: Path, address: str) -> None:
    (folder / "ray").mkdir()
    (folder / "ray" / "ray_current_cluster").write_text(address + "\n")


def test_without_a_cluster_a_local_one_is_started(asked: list[str]) -> None:
    cluster.connect(Placement(gpus_per_worker=0.0))
    assert asked == ["local"]


def test_a_head_on_this_machine_is_used_as_long_as_it_lives(asked: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        leave_word(tmp_path, address)
        cluster.connect(Placement(gpus_per_worker=0.0))
    cluster.connect(Placement(gpus_per_worker=0.0))
    assert asked == ["auto", "local"]  # by its address Ray would not use this user's token


def test_the_environment_is_taken_at_its_word(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        cluster.connect(Placement(gpus_per_worker=0.0))
    assert asked == [address]
    with pytest.raises(ResourcesError, match=f"nobody answers at {address}"):
        cluster.connect(Placement(gpus_per_worker=0.0))


def test_each_cluster_of_our_own_has_a_token_of_its_own(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = []
    for _ in range(2):
        monkeypatch.setenv("RAY_AUTH_TOKEN", "")
        cluster.connect(Placement(gpus_per_worker=0.0))
        tokens.append(os.environ["RAY_AUTH_TOKEN"])
    assert asked == ["local", "local"]
    assert [len(token) for token in tokens] == [64, 64]
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize("given", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "file"])
def test_a_token_of_the_user_is_used(given: str, asked: list[str], tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    if given == "file":
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("mine")
    else:
        monkeypatch.setenv(given, "mine")
    cluster.connect(Placement(gpus_per_worker=0.0))
    assert asked == ["local"]
    assert os.environ["RAY_AUTH_TOKEN"] == ("mine" if given == "RAY_AUTH_TOKEN" else "")


def test_a_cluster_of_others_is_shown_no_token_of_ours(asked: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        leave_word(tmp_path, f"127.0.0.1:{head.getsockname()[1]}")
        cluster.connect(Placement(gpus_per_worker=0.0))
    assert asked == ["auto"]
    assert os.environ["RAY_AUTH_TOKEN"] == ""


KNOCK = """
import urllib.error, urllib.request
import ray
from ray_yolo.config import Placement
from ray_yolo.runtime import cluster

cluster.connect(Placement(address="local"))
try:
    print(urllib.request.urlopen(f"http://{ray._private.worker.get_dashboard_url()}/api/jobs/").status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.mark.ray
def test_a_cluster_of_our_own_lets_nobody_in_and_leaves_no_token(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", KNOCK], cwd=Path(__file__).parents[2], env=environment,
                          capture_output=True, text=True, timeout=120)
    assert done.stdout == "401\n", done.stderr
    assert not (tmp_path / ".ray").exists()
