"""cluster/aws.yaml against Ray's own launcher, and what the launcher does not check."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.tags import TAG_RAY_CLUSTER_NAME

PATH = Path(__file__).parents[2] / "cluster" / "aws.yaml"
CONFIG: dict[str, Any] = yaml.safe_load(PATH.read_text())
NODE_TYPES = CONFIG["available_node_types"]


def launch(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as `ray up` completes and validates it."""
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def test_ray_accepts_it() -> None:
    assert launch(CONFIG)["head_node_type"] == "head"


def _misspell(config: dict[str, Any]) -> None:
    config["idle_timeout_minute"] = config.pop("idle_timeout_minutes")


def _misspell_inside(config: dict[str, Any]) -> None:
    config["available_node_types"]["gpu"]["max_worker"] = 4


def _ill_type(config: dict[str, Any]) -> None:
    config["max_workers"] = "8"


@pytest.mark.parametrize("spoil", [_misspell, _misspell_inside, _ill_type])
def test_ray_refuses_a_spoilt_copy(spoil: Callable[[dict[str, Any]], None]) -> None:
    config = copy.deepcopy(CONFIG)
    spoil(config)
    with pytest.raises(jsonschema.ValidationError):
        launch(config)


def test_the_defaults_install_nothing() -> None:
    """Ray's defaults for AWS install a nightly build of Ray unless setup_commands says otherwise."""
    prepared = launch(CONFIG)
    commands = [*prepared["head_setup_commands"], *prepared["worker_setup_commands"]]
    assert [command for command in commands if "ray" in command] == []


@pytest.mark.parametrize("which", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_every_ray_start_checks_tokens(which: str) -> None:
    starts = [command for command in CONFIG[which] if "ray start" in command]
    assert len(starts) == 1
    before, _, after = starts[0].partition("ray start")
    assert "export RAY_AUTH_MODE=token" in before
    assert "--dashboard-host=127.0.0.1" in after or "--head" not in after


def test_nothing_is_open_to_the_internet() -> None:
    """Ray opens port 22 to all addresses for each node type that does not name its security groups."""
    assert "0.0.0.0" not in PATH.read_text()
    assert all(node["node_config"]["SecurityGroupIds"] for node in NODE_TYPES.values())


def test_only_the_head_may_manage_nodes_and_only_its_own() -> None:
    """Ray's launcher gives a head that names no profile AmazonEC2FullAccess and AmazonS3FullAccess."""
    profiles = {name: node["node_config"].get("IamInstanceProfile") for name, node in NODE_TYPES.items()}
    assert profiles == {"head": {"Name": "ray-yolo-head"}, "gpu": None, "gpu_spot": None}
    policy = json.loads((PATH.parent / "aws-head-policy.json").read_text())["Statement"]
    actions = [rule["Action"] for rule in policy]
    allowed = {action for given in actions for action in ([given] if isinstance(given, str) else given)}
    assert allowed == {"ec2:DescribeInstances", "ec2:DescribeImages", "ec2:RunInstances", "ec2:CreateTags",
                       "ec2:TerminateInstances"}
    tags = [value for rule in policy for condition in rule.get("Condition", {}).values()
            for key, value in condition.items() if key.endswith(TAG_RAY_CLUSTER_NAME)]
    assert tags == [CONFIG["cluster_name"]] * 2


def test_nodes_are_in_private_subnets() -> None:
    assert CONFIG["provider"]["use_internal_ips"] is True


def test_gpus_come_on_demand_and_spot_and_go_when_idle() -> None:
    markets = {name: node["node_config"].get("InstanceMarketOptions", {}).get("MarketType")
               for name, node in NODE_TYPES.items() if node["resources"].get("GPU")}
    assert markets == {"gpu": None, "gpu_spot": "spot"}
    labels = {name: NODE_TYPES[name]["labels"] for name in markets}
    assert labels == {"gpu": {"ray.io/market-type": "on-demand"}, "gpu_spot": {"ray.io/market-type": "spot"}}
    assert all(NODE_TYPES[name]["min_workers"] == 0 for name in markets)
    assert 0 < CONFIG["idle_timeout_minutes"] <= 15
    assert NODE_TYPES["head"]["resources"] == {"CPU": 0}


def test_containers_have_shared_memory_and_a_pinned_image() -> None:
    assert any(option.startswith("--shm-size=") for option in CONFIG["docker"]["run_options"])
    assert not any("privileged" in option for option in CONFIG["docker"]["run_options"] if "no-new" not in option)
    assert CONFIG["docker"]["image"].partition(":")[2] not in ("", "latest")
