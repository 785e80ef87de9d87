"""cluster/gcp.yaml against Ray's own launcher: what is like AWS is tested there; here rights and reach."""

import copy
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from ray.autoscaler._private import commands
from ray.autoscaler._private.util import prepare_config, validate_config

CLUSTER = Path(__file__).parents[2] / "cluster"
CONFIG: dict[str, Any] = yaml.safe_load((CLUSTER / "gcp.yaml").read_text())
AWS: dict[str, Any] = yaml.safe_load((CLUSTER / "aws.yaml").read_text())
NODES = {name: node["node_config"] for name, node in CONFIG["available_node_types"].items()}


class Cloud:
    """Google's clients, as far as the launcher asks for them: everything is there already."""

    def __getattr__(self, name: str) -> Any:
        return lambda **_: self

    def execute(self) -> dict[str, Any]:
        return {"projectId": "my-project", "lifecycleState": "ACTIVE", "email": "ray@all.rights", "bindings": []}


def launcher(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of Ray's launcher for this cloud, whose clients are not installed."""
    for client in ("google_auth_httplib2", "googleapiclient", "googleapiclient.discovery", "googleapiclient.errors",
                   "httplib2"):
        monkeypatch.setitem(sys.modules, client, MagicMock())
    return importlib.import_module(f"ray.autoscaler._private.gcp.{name}")


def test_ray_accepts_it() -> None:
    prepared = prepare_config(copy.deepcopy(CONFIG))
    validate_config(prepared)
    assert prepared["head_node_type"] == "head"


def test_the_head_has_the_rights_of_the_autoscaler_and_the_others_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's launcher gives a head that names no account one that administers compute and storage."""
    gcp = launcher("config", monkeypatch)
    monkeypatch.setattr(gcp, "construct_clients_from_provider_config", lambda _: (Cloud(),) * 4)
    begun = gcp.bootstrap_gcp(prepare_config(copy.deepcopy(CONFIG)))
    assert begun["head_node"]["serviceAccounts"][0]["email"] == "ray@all.rights"
    head = {**begun["head_node"], **begun["available_node_types"]["head"]["node_config"]}
    making = inspect.getsource(commands.get_or_create_head_node)
    assert 'head_node_config.update(head_config["node_config"])' in making  # the file's word is the last one
    assert head["serviceAccounts"] == [{"email": "ray-yolo-head@my-project.iam.gserviceaccount.com",
                                        "scopes": ["https://www.googleapis.com/auth/compute"]}]
    assert all("serviceAccounts" not in node for name, node in NODES.items() if name != "head")


def test_the_heads_role_has_what_the_autoscaler_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = set(yaml.safe_load((CLUSTER / "gcp-head-role.yaml").read_text())["includedPermissions"])
    source = inspect.getsource(launcher("node", monkeypatch).GCPCompute)
    calls = {"insert": "create", **{name: name for name in ("get", "list", "setLabels", "delete")}}
    assert all(f".{call}(" in source for call in calls)
    assert allowed == {f"compute.instances.{right}" for right in (*calls.values(), "setMetadata")} | {
        "compute.zoneOperations.get", "compute.disks.create", "compute.images.useReadOnly", "compute.subnetworks.use"}


def test_nodes_have_no_address_in_the_internet_and_no_key_of_the_project() -> None:
    assert CONFIG["provider"]["use_internal_ips"] is True
    assert all("accessConfigs" not in network for node in NODES.values() for network in node["networkInterfaces"])
    assert "ssh_private_key" in CONFIG["auth"]  # or Ray puts one into the project
    blocked = {"key": "block-project-ssh-keys", "value": "true"}
    assert all(blocked in node["metadata"]["items"] for node in NODES.values())


def test_what_is_no_clouds_own_business_is_as_on_aws() -> None:
    for key in ("cluster_name", "idle_timeout_minutes", "max_workers", "docker", "file_mounts", "setup_commands",
                "head_start_ray_commands", "worker_start_ray_commands"):
        assert CONFIG[key] == AWS[key]


def test_gpus_come_on_demand_and_spot() -> None:
    spot = {name: node["scheduling"].get("provisioningModel") for name, node in NODES.items() if name != "head"}
    assert spot == {"gpu": None, "gpu_spot": "SPOT"}
    types, same = CONFIG["available_node_types"], AWS["available_node_types"]
    assert all(types[name]["labels"] == same[name]["labels"] for name in spot)
