"""Every training command that cluster/ shows or runs is one that our own command line accepts."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from ray_yolo.cli import parse_train

CLUSTER = Path(__file__).parents[2] / "cluster"
SHOWN = re.compile(r"(?:python -m ray_yolo\.train|sbatch cluster/slurm\.sh)((?: [^\s`|]+)+)")


def commands() -> dict[str, list[str]]:
    """Flags of every command that is written out, by file and line; what slurm.sh makes up is in its own test."""
    jobs = {path.name: next(yaml.safe_load_all(path.read_text())) for path in CLUSTER.glob("rayjob*.yaml")}
    found = {f"{name}:entrypoint": shlex.split(job["spec"]["entrypoint"])[3:] for name, job in jobs.items()}
    for path in (path for path in sorted(CLUSTER.iterdir()) if path.suffix in (".md", ".sh")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for shown in SHOWN.findall(line):
                if "$" not in shown:
                    found[f"{path.name}:{number}"] = shlex.split(shown)
    return found


COMMANDS = commands()


def test_the_commands_are_found() -> None:
    assert {place.partition(":")[0] for place in COMMANDS} == {
        "README.md", "rayjob.yaml", "rayjob-cpu.yaml", "rayjob-spot.yaml", "slurm.sh"}


@pytest.mark.parametrize("place", COMMANDS)
def test_our_command_line_accepts_it(place: str) -> None:
    parse_train(COMMANDS[place])


def test_a_misspelt_flag_is_refused() -> None:
    with pytest.raises((SystemExit, ValueError)):
        parse_train([*COMMANDS["rayjob.yaml:entrypoint"], "--num-worker-count", "8"])
