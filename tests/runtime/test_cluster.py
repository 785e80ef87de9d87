"""Which cluster a command uses."""

from __future__ import annotations

import socket
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
