"""cluster/skypilot.yaml: SkyPilot's schema, the rules that it does not know, and its script, run with stand-ins."""

import copy
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_yolo.cli import parse_train
from tests.support.stubs import Stubs

PATH = Path(__file__).parents[2] / "cluster" / "skypilot.yaml"
TASK: dict[str, Any] = yaml.safe_load(PATH.read_text())
IPS = "10.0.0.1\n10.0.0.2\n"
HEAD = "10.0.0.1:6379"
AGENT = ["--dashboard-agent-listen-port", "52366"]  # 52365 belongs to SkyPilot's own Ray
# A head runs until it is ended; `ray status` succeeds as often as the file says.
RAY = """
note(environment={name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_NODE_MARKET_TYPE")})
if "--block" in argv:
    signal.signal(signal.SIGTERM, lambda *_: (note(event="head ended"), sys.exit(0)))
    time.sleep(60)
if argv[0] == "status":
    answers = os.environ["STATUS"].split()
    asked = sum('"status"' in line for line in open(log))
    sys.exit(int(answers[min(asked, len(answers)) - 1]))
"""


def faults(task: dict[str, Any]) -> str:
    """What SkyPilot's schemas have to say about a task."""
    schemas = pytest.importorskip("sky.utils.schemas", reason="pip install skypilot")
    from sky.utils.common_utils import validate_schema

    try:
        validate_schema(task, schemas.get_task_schema())
        validate_schema(task["resources"], schemas.get_resources_schema())
    except ValueError as error:
        return str(error)
    return ""


def test_skypilot_accepts_it() -> None:
    assert faults(TASK) == ""


def _misspell(task: dict[str, Any]) -> None:
    task["num_node"] = task.pop("num_nodes")


def _misspell_inside(task: dict[str, Any]) -> None:
    task["resources"]["use_spots"] = task["resources"].pop("use_spot")


def _ill_type(task: dict[str, Any]) -> None:
    task["envs"]["STORAGE"] = 1


@pytest.mark.parametrize("spoil", [_misspell, _misspell_inside, _ill_type])
def test_skypilot_refuses_a_spoilt_copy(spoil: Callable[[dict[str, Any]], None]) -> None:
    task = copy.deepcopy(TASK)
    spoil(task)
    assert faults(task)


def test_nodes_are_spot_and_say_so() -> None:
    """Ray makes a label of the variable: see `ray_yolo.runtime.workers.worker.MARKET_TYPE`."""
    assert TASK["resources"]["use_spot"] is True
    assert TASK["envs"]["RAY_NODE_MARKET_TYPE"] == "spot"
    assert TASK["num_nodes"] > 1


def test_the_token_is_a_secret_that_the_file_does_not_hold() -> None:
    assert TASK["secrets"] == {"RAY_AUTH_TOKEN": None}
    assert "--secret RAY_AUTH_TOKEN" in PATH.read_text()


class Node:
    """The script on one of two nodes."""

    def __init__(self, folder: Path, rank: int, status: str = "0", code: int = 0) -> None:
        self.stubs = Stubs(folder / "bin")
        self.stubs.add("ray", RAY.replace("open(log)", f"open({str(self.stubs.log)!r})"))
        self.stubs.add("python", f"note()\nsys.exit({code})")
        self.stubs.add("sleep")
        activate = folder / "ray-yolo" / "bin" / "activate"
        activate.parent.mkdir(parents=True)
        activate.touch()
        environment = {**os.environ, **TASK["envs"], "PATH": f"{self.stubs.folder}:{os.environ['PATH']}",
                       "HOME": str(folder), "RAY_AUTH_TOKEN": "secret", "SKYPILOT_NODE_RANK": str(rank),
                       "SKYPILOT_NODE_IPS": IPS, "SKYPILOT_NUM_NODES": "2", "STATUS": status}
        self.done = subprocess.run(["bash", "-c", TASK["run"]], env=environment, capture_output=True, text=True,
                                   timeout=60, check=False)

    def calls(self, command: str, *first: str) -> list[list[str]]:
        calls = [call for call in self.stubs.calls if call["command"] == command and "event" not in call]
        return [call["argv"] for call in calls if tuple(call["argv"][:len(first)]) == first]


@pytest.mark.parametrize("code", [0, 3])
def test_the_first_node_starts_ray_trains_and_ends_ray(tmp_path: Path, code: int) -> None:
    node = Node(tmp_path, 0, status="1 0", code=code)
    assert node.done.returncode == code, node.done.stderr
    assert node.calls("ray", "start") == [
        ["start", "--head", "--block", "--port", "6379", "--dashboard-host", "127.0.0.1", *AGENT]]
    [train] = node.calls("python")
    assert node.stubs.calls[-1].get("event") == "head ended"
    assert train[train.index("--address") + 1] == HEAD
    assert all(call["environment"] == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret",
                                       "RAY_NODE_MARKET_TYPE": "spot"}
               for call in node.stubs.calls if "environment" in call)


def test_other_nodes_join_and_stay_until_the_head_has_ended(tmp_path: Path) -> None:
    """With 0: SkyPilot waits for all nodes, and ends the job if one has failed."""
    node = Node(tmp_path, 1, status="0 0 1")
    assert (node.done.returncode, node.calls("python")) == (0, [])
    assert node.calls("ray") == [["start", "--address", HEAD, *AGENT], *[["status", "--address", HEAD]] * 3]


def test_a_head_that_cannot_start_fails_the_job(tmp_path: Path) -> None:
    script = TASK["run"].replace("ray start --head", "false")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASK, "run", script)
        node = Node(tmp_path, 0, status="1")
    assert (node.done.returncode, node.calls("python")) == (1, [])


def test_our_command_line_accepts_its_command(tmp_path: Path) -> None:
    [words] = Node(tmp_path, 0).calls("python")
    assert words[:2] == ["-m", "ray_yolo.train"]
    config, *_ = parse_train(words[2:])
    low, high = config.placement.min_workers, config.placement.max_workers
    gpus = int(TASK["resources"]["accelerators"].partition(":")[2])
    assert (low, high) == (gpus, gpus * TASK["num_nodes"])  # it continues while one node is left
    assert config.placement.name  # so that the command continues the same run
    assert config.placement.storage_path == TASK["envs"]["STORAGE"]
    assert config.recipe.data.startswith(TASK["envs"]["STORAGE"])
    assert (config.placement.max_failures, config.placement.save_steps) == (-1, 200)
    with pytest.raises((SystemExit, ValueError)):
        parse_train([*words[2:], "--num-worker-count", "8"])


def test_the_set_up_installs_the_package_with_the_versions_of_the_clone() -> None:
    commands = [shlex.split(line) for line in TASK["setup"].splitlines()]
    assert ["uv", "pip", "install", "--constraint", "constraints.txt", ".[s3]"] in commands
    assert TASK["workdir"] == "."
    [activated] = {line for part in ("setup", "run") for line in TASK[part].splitlines() if line.startswith("source ")}
    assert activated == "source ~/ray-yolo/bin/activate"
