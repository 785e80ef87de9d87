"""Which cluster a command uses."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.exceptions
import ray.util

from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import InputError, ResourcesError
from ray_yolo.runtime import cluster, ray_internals
from ray_yolo.runtime.ray_internals import Holding
from tests.support.servers import answering


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that `ray.init` gets, on a machine without any known cluster."""
    addresses: list[str] = []

    def init(address: str, **_: Any) -> None:
        addresses.append(address)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "DRIVER_ENVIRONMENT", {})
    monkeypatch.setattr(cluster, "running_heads", lambda leave_out: set())  # others may test here
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
    with answering() as address:
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
    with answering() as address:
        leave_word(tmp_path, address)
        monkeypatch.setattr(ray_internals.os, "fstat", owned)
        cluster.connect(Placement(gpus_per_worker=0.0))
        monkeypatch.undo()
    assert asked == ["auto" if used else "local"]
    message = f"ray_current_cluster belongs to another user, so its cluster is not used; .*'{address}'.*--address"
    assert bool(re.search(message, capsys.readouterr().err)) != used


def test_a_link_in_the_place_of_the_note_is_not_followed(asked: list[str], tmp_path: Path) -> None:
    with answering() as address:
        (tmp_path / "own").write_text(address)
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").symlink_to(tmp_path / "own")
        cluster.connect(Placement(gpus_per_worker=0.0))
    assert asked == ["local"]


def test_the_environments_address_has_no_fallback(
        asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with answering() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        cluster.connect(Placement(gpus_per_worker=0.0))
    assert asked == [address]
    with pytest.raises(ResourcesError):
        cluster.connect(Placement(gpus_per_worker=0.0))


def test_another_head_on_this_machine_is_named(
        asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of another --temp-dir, for example: there is no note in the default folder."""
    with answering() as head, answering(b"SSH-2.0-OpenSSH_9.2p1\r\n") as none:
        monkeypatch.setattr(cluster, "running_heads", lambda leave_out: {none, head})
        cluster.connect(Placement(gpus_per_worker=0.0))
    assert asked == ["local"]
    assert capsys.readouterr().err == (
        f"warning: this command starts a Ray of its own; another one runs here, at {head}: to use it, give its address "
        "with --address or RAY_ADDRESS\n")


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2p1\r\n", b""])
def test_ray_is_not_asked_at_other_ports(asked: list[str], monkeypatch: pytest.MonkeyPatch, reply: bytes) -> None:
    """Ray would wait for ever there."""
    monkeypatch.setattr(cluster, "_CONNECT_SECONDS", 0.3)
    with answering(reply) as address, pytest.raises(ResourcesError):
        cluster.connect(Placement(address=address))
    assert asked == []


def test_a_connection_of_ray_client_is_refused(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may have called `ray.init("ray://...")`."""
    monkeypatch.setattr(cluster.ray_client, "is_connected", lambda: True)
    with pytest.raises(InputError):
        cluster.connect(Placement())
    assert asked == []


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
    with answering() as address:
        leave_word(tmp_path, address)
        cluster.connect(Placement(gpus_per_worker=0.0))
    assert asked == ["auto"]
    assert os.environ["RAY_AUTH_TOKEN"] == ""


@pytest.mark.parametrize(("address", "kind"), [
    ("http://127.0.0.1:8265", InputError), ("nowhere", InputError), ("127.0.0.1:99999", ResourcesError)])
def test_other_addresses_are_refused(monkeypatch: pytest.MonkeyPatch, address: str, kind: type[Exception]) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # Ray itself refuses
    monkeypatch.setattr(cluster, "DRIVER_ENVIRONMENT", {})
    with pytest.raises(kind):
        cluster.connect(Placement(address=address))


def group(job: str, state: str, *bundles: dict[str, float]) -> dict[str, Any]:
    return {"placement_group_id": f"{'0' * 28}{job}", "state": state, "bundles": dict(enumerate(bundles))}


OWN, OTHER, THIRD = "02000000", "01000000", "03000000"
ENTRY = Holding(OWN, True, "JobSupervisor", "a", {"CPU": 3.0})
HOLDINGS = [ENTRY, Holding(OWN, False, "Reader", "b", {"CPU": 1.0, "GPU": 1.0}),
            ENTRY._replace(job=OTHER, resources={"CPU": 1.0}), ENTRY._replace(job="")]
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
    monkeypatch.setattr(cluster, "own_job", lambda: OWN)
    monkeypatch.setattr(cluster, "holdings", lambda: HOLDINGS)
    monkeypatch.setattr(cluster, "other_jobs", lambda: {
        OTHER: "python -m ray_yolo.train s3://ann:s3cr3t@host (on 10.0.0.1)", THIRD: "python notes.py (on 10.0.0.2)"})
    assert cluster.describe_wait(Placement(num_workers=2, cpus_per_worker=2.0), 1.0) == (
        "waiting for 2 workers of 2 CPU (1 are free), 1 GPU (0 are free), until they are free; this job itself holds "
        "3 CPU for its entry point (--entrypoint-num-cpus), 1 CPU, 1 GPU for actor Reader; other jobs on this cluster: "
        "python -m ray_yolo.train s3://***@host (on 10.0.0.1): 6 CPU, 2 GPU; python notes.py (on 10.0.0.2): nothing"
        if waits else "")


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
    nodes(monkeypatch, e=present)
    monkeypatch.setattr(cluster, "holdings", list)
    given = Placement(num_workers=2, cpus_per_worker=1, accelerator_type="A100")
    assert cluster.missing_resources(given, 2, 1.0) == lacking


def nodes(monkeypatch: pytest.MonkeyPatch, **resources: dict[str, float]) -> None:
    """A cluster of nodes with these resources, c of which is draining."""
    monkeypatch.setattr(ray, "nodes", lambda: [
        {"NodeID": node, "Alive": node != "d", "Resources": total} for node, total in resources.items()])
    monkeypatch.setattr(ray, "cluster_resources", lambda: sum(map(Counter, resources.values()), Counter()))
    monkeypatch.setattr(cluster, "draining_nodes", lambda: {"c"})
    monkeypatch.setattr(cluster, "own_job", lambda: OWN)
    monkeypatch.setattr(cluster, "holdings", lambda: HOLDINGS)


def test_what_this_job_itself_holds_never_becomes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 - 3 CPUs are left on a, 4 - 1 on b, none on c, which drains, and on d, which is dead."""
    nodes(monkeypatch, a={"CPU": 4.0}, b={"CPU": 4.0}, c={"CPU": 4.0}, d={"CPU": 4.0})
    one = Placement(num_workers=5, cpus_per_worker=1.0)
    assert cluster.room(one, 0.0) == 4
    assert cluster.missing_resources(one, 4, 0.0) == ""
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    assert cluster.missing_resources(one, 5, 0.0) == (
        "5 workers need 5 CPU, the cluster has 8, of which this job itself holds 3 CPU for its entry point "
        "(--entrypoint-num-cpus), 1 CPU for actor Reader")
    two = Placement(num_workers=2, cpus_per_worker=2.0)
    assert cluster.missing_resources(two, 2, 0.0, "replica") == (
        "2 replicas of 2 CPU each do not fit: the cluster's nodes have room for 1")


def test_nodes_are_requested_during_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes(monkeypatch, e={"CPU": 2.0})
    requested: list[int] = []
    monkeypatch.setattr(cluster, "request_resources", lambda bundles: requested.append(len(bundles)))
    placement = Placement(num_workers=8, cpus_per_worker=1.0, wait_for_resources=0.1)
    said: list[str] = []
    with pytest.raises(ResourcesError):
        cluster.wait_for_room(placement, 0.0, said.append)
    assert requested == [8, 0]
    assert len(said) == 1
