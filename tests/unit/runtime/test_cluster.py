"""Which cluster a command uses."""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.exceptions
import ray.util

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import InputError, ResourcesError
from ray_yolo.runtime import cluster, ray_internals


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that `ray.init` gets, on a machine without any known cluster."""
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


@pytest.mark.parametrize(("owner", "used"), [(os.getuid(), True), (0, True), (12345, False)])
def test_the_cluster_of_another_user_is_not_used_unasked(
        asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
        owner: int, used: bool) -> None:
    """All users may write to the folder of the note, and what Ray receives is unpickled."""
    def owned(file: int) -> os.stat_result:
        fields = list(status(file))
        fields[stat.ST_UID] = owner
        return os.stat_result(fields)

    status = os.fstat
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        leave_word(tmp_path, address)
        monkeypatch.setattr(ray_internals.os, "fstat", owned)
        cluster.connect(Placement(gpus_per_worker=0.0))
        monkeypatch.undo()
    assert asked == ["auto" if used else "local"]
    message = f"ray_current_cluster belongs to another user, so its cluster is not used; .*'{address}'.*--address"
    assert bool(re.search(message, capsys.readouterr().err)) != used


def test_a_link_in_the_place_of_the_note_is_not_followed(asked: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        (tmp_path / "own").write_text(f"127.0.0.1:{head.getsockname()[1]}")
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").symlink_to(tmp_path / "own")
        cluster.connect(Placement(gpus_per_worker=0.0))
    assert asked == ["local"]


def test_the_address_of_the_environment_is_used_without_a_fallback(
        asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        cluster.connect(Placement(gpus_per_worker=0.0))
    assert asked == [address]
    with pytest.raises(ResourcesError, match=f"no answer from {address}"):
        cluster.connect(Placement(gpus_per_worker=0.0))


def test_each_local_cluster_has_its_own_token(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = []
    for _ in range(2):
        monkeypatch.setenv("RAY_AUTH_TOKEN", "")
        cluster.connect(Placement(gpus_per_worker=0.0))
        tokens.append(os.environ["RAY_AUTH_TOKEN"])
    assert asked == ["local", "local"]
    assert [len(token) for token in tokens] == [64, 64]
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize("given", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "file"])
def test_the_users_token_is_used(given: str, asked: list[str], tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    if given == "file":
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("mine")
    else:
        monkeypatch.setenv(given, "mine")
    cluster.connect(Placement(gpus_per_worker=0.0))
    assert asked == ["local"]
    assert os.environ["RAY_AUTH_TOKEN"] == ("mine" if given == "RAY_AUTH_TOKEN" else "")


def test_another_cluster_gets_no_generated_token(asked: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        leave_word(tmp_path, f"127.0.0.1:{head.getsockname()[1]}")
        cluster.connect(Placement(gpus_per_worker=0.0))
    assert asked == ["auto"]
    assert os.environ["RAY_AUTH_TOKEN"] == ""


REFUSALS = [
    (ConnectionError("Could not find any running Ray instance. Please specify"), ResourcesError, "any running"),
    (TimeoutError("Timed out after 30 seconds while waiting for node. Did not"), ResourcesError, "30 seconds"),
    (RuntimeError("Timed out waiting for node info for node_id=5."), ResourcesError, "node info"),
    (RuntimeError(""), ResourcesError, "RuntimeError"),
    (Exception("The current node timed out during startup. This could"), ResourcesError, "timed out during startup"),
    (ray.exceptions.RpcError("the head hung up\nand more"), ResourcesError, "hung up"),
    (ray.exceptions.AuthenticationError("Token mode, but no token"), ResourcesError, "RAY_AUTH_TOKEN_PATH"),
    (RuntimeError("\nFailed to connect\nto it"), ResourcesError, "Failed to connect;"),
    (RuntimeError("no node (e.g. a head) found. Start one"), ResourcesError, r"no node \(e\.g\. a head\) found;"),
    (RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n    Python: 3.11.7\n"
                  "This process on node n2 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"), ResourcesError,
     r"started with: Ray: 2\.50\.0 Python: 3\.11\.7 This process on node n2 was started with: Ray: 2\.60\.0"),
]


@pytest.mark.parametrize(("fault", "kind", "message"), REFUSALS, ids=str)
def test_each_error_of_ray_at_its_start_is_one_line(asked: list[str], monkeypatch: pytest.MonkeyPatch,
                                                      fault: Exception, kind: type[Exception], message: str) -> None:
    def init(**_: Any) -> None:
        raise fault

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(kind, match=message) as refused:
        cluster.connect(Placement(gpus_per_worker=0.0))
    assert len(str(refused.value).splitlines()) == 1


def test_an_address_that_ray_cannot_read_is_bad_input(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise ValueError("Invalid Ray address: 'x'. It looks\nlike")

    monkeypatch.setattr(ray, "init", init)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with pytest.raises(InputError, match="Invalid Ray address") as refused:
            cluster.connect(Placement(address=address, gpus_per_worker=0.0))
    assert len(str(refused.value).splitlines()) == 1


def test_a_local_start_that_fails_is_no_wrong_address(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises ValueError if it finds too little shared memory, for example."""
    def init(address: str, **_: Any) -> None:
        if address == "local":
            raise ValueError("Attempting to cap object store memory usage at 5 bytes, but the minimum is 78643200")
        raise ConnectionError("none")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ResourcesError, match="address: local: Attempting to cap") as refused:
        cluster.connect(Placement(gpus_per_worker=0.0))
    assert "is not a cluster's address" not in str(refused.value)


@pytest.mark.parametrize(("address", "kind"), [
    ("http://127.0.0.1:8265", InputError), ("nowhere", InputError), ("127.0.0.1:99999", ResourcesError)])
def test_an_address_that_is_none_is_one_line(monkeypatch: pytest.MonkeyPatch, address: str,
                                             kind: type[Exception]) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # Ray itself refuses
    monkeypatch.setattr(cluster, "DRIVER_ENVIRONMENT", {})
    with pytest.raises(kind, match=address) as refused:
        cluster.connect(Placement(address=address))
    assert len(str(refused.value).splitlines()) == 1


def group(job: str, state: str, *bundles: dict[str, float]) -> dict[str, Any]:
    return {"placement_group_id": f"{'0' * 28}{job}", "state": state, "bundles": dict(enumerate(bundles))}


OWN, OTHER, THIRD = "02000000", "01000000", "03000000"
BUNDLE = {"CPU": 2.0, "GPU": 1.0}
PENDING = group(OWN, "PENDING", BUNDLE)
HELD = [group(OTHER, "CREATED", BUNDLE, BUNDLE), group(OTHER, "CREATED", {"CPU": 1.0}), group(OTHER, "REMOVED", BUNDLE),
        group(OWN, "CREATED", {"CPU": 1.0})]


@pytest.mark.parametrize(("groups", "waits"), [
    ([], False), ([*HELD, PENDING], True), ([{**PENDING, "state": "CREATED"}], False),
    ([group(OWN, "PENDING", {"CPU": 3.0})], False)])
def test_a_wait_for_reserved_resources_names_them_and_the_jobs_that_hold_some(
        monkeypatch: pytest.MonkeyPatch, groups: list[dict[str, Any]], waits: bool) -> None:
    monkeypatch.setattr(cluster, "placement_group_table", lambda: dict(enumerate(groups)))
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr(cluster, "other_jobs", lambda: {
        OTHER: "python -m ray_yolo.train s3://ann:s3cr3t@host (on 10.0.0.1)", THIRD: "python notes.py (on 10.0.0.2)"})
    assert cluster.describe_wait(Placement(num_workers=2, cpus_per_worker=2.0), 1.0) == (
        "waiting for 2 workers of 2 CPU (1 are free), 1 GPU (0 are free), until they are free; other jobs on this "
        "cluster: python -m ray_yolo.train s3://***@host (on 10.0.0.1): 5 CPU, 2 GPU; python notes.py (on 10.0.0.2): "
        "no placement group" if waits else "")


def test_a_long_command_of_another_job_keeps_its_end_and_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"python -m ray_yolo.train {'--set x=1 ' * 30} --name second (on 10.77.0.2)"
    monkeypatch.setattr(cluster, "other_jobs", lambda: {OTHER: command})
    said = cluster.describe_job(OTHER)
    assert len(said) < 110
    assert said.startswith("python -m ray_yolo.train --set")
    assert said.endswith("--name second (on 10.77.0.2)")


def test_the_gpus_of_a_worker_are_planned_without_a_call_to_ray() -> None:
    given = {"num_workers": 2, "gpus_per_worker": 0.5}
    assert cluster.planned_gpus(Placement.model_validate(given)) == 0.5
    elsewhere = Placement(num_workers=2, address="10.0.0.1:6379")
    assert cluster.planned_gpus(elsewhere) is None  # that cluster decides


@pytest.mark.parametrize(("present", "lacking"), [
    ({"CPU": 8, "GPU": 8, "accelerator_type:A100": 1.0}, ""),
    ({"CPU": 8, "GPU": 8, "accelerator_type:T4": 1.0}, "no node has a GPU of type A100"),
    ({"CPU": 8, "GPU": 1, "accelerator_type:A100": 1.0}, "2 workers need 2 GPU, the cluster has 1")])
def test_a_type_of_gpu_that_no_node_has_is_lacking(
        monkeypatch: pytest.MonkeyPatch, present: dict[str, float], lacking: str) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: present)
    given = Placement(num_workers=2, cpus_per_worker=1, accelerator_type="A100")
    assert cluster.missing_resources(given, 2, 1.0) == lacking
