"""cluster/submit.sh, run for real with a stand-in for Ray."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.stubs import Stubs

ROOT = Path(__file__).parents[2]
HOSTILE = ["--name", "it's a run", "--set", 'a="b c"', "$HOME $(id); exit 1", "*", "", "two\nlines"]
RAY = 'note(cwd=os.getcwd(), auth=os.environ.get("RAY_AUTH_MODE"), address=os.environ.get("RAY_API_SERVER_ADDRESS"))'


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    stubs = Stubs(tmp_path / "bin")
    stubs.add("ray", RAY)
    return stubs


def bash(stubs: Stubs, *command: str) -> str:
    """What a shell with the stand-ins on its PATH prints, in a folder of its own."""
    env = {"PATH": f"{stubs.folder}:{os.environ['PATH']}"}
    return subprocess.run(["bash", *command], env=env, cwd=stubs.folder, check=True, capture_output=True,
                          text=True).stdout


def test_arguments_arrive_unharmed_with_a_token_and_the_clone(stubs: Stubs) -> None:
    bash(stubs, str(ROOT / "cluster" / "submit.sh"), *HOSTILE)
    call = stubs.call("ray")
    assert call["argv"] == ["job", "submit", "--working-dir", ".", "--", "python", "-m", "ray_yolo.train", *HOSTILE]
    assert call["auth"] == "token"
    assert call["cwd"] == str(ROOT)


def test_the_printed_line_does_the_same_again(stubs: Stubs) -> None:
    printed = bash(stubs, str(ROOT / "cluster" / "submit.sh"), *HOSTILE)
    bash(stubs, "-c", printed)
    script, line = stubs.calls
    assert {**line, "cwd": script["cwd"]} == script


def test_a_failed_training_fails_the_command(stubs: Stubs) -> None:
    stubs.add("ray", "sys.exit(1)")
    with pytest.raises(subprocess.CalledProcessError) as failure:
        bash(stubs, str(ROOT / "cluster" / "submit.sh"))
    assert failure.value.returncode == 1
