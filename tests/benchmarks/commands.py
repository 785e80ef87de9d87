"""Whole commands from outside: when they reach a mark (a step, an epoch), and what their processes took until then."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.benchmarks.harness import HERE, PEER_PYTHON

Mark = dict[str, float]  # `wall` and `cpu` seconds since the command


def train_ours(data: str, folder: Path, *flags: str) -> Callable[[str], list[Mark]]:
    """A bare `ray_yolo.train` of yolov5n with these flags; gives what `follow` does for events of a type."""
    command = [sys.executable, "-m", "ray_yolo.train", "--data", data, "--model", "yolov5n",
               "--storage-path", str(folder), *flags]

    def marks(kind: str) -> list[Mark]:
        return follow(command, lambda: sum(file.read_text().count(f'"type":"{kind}"')
                                           for file in folder.glob("runs/train/*/events.jsonl")), folder)
    return marks


def train_peer(peer: str, data: str, folder: Path, imgsz: int, batch: int, epochs: int) -> Callable[[str], list[Mark]]:
    """A peer's bare training of yolov5n (`peer_train.py`); gives what `follow` does for its marks of a kind."""
    command = [str(PEER_PYTHON), str(HERE / "peer_train.py"), peer, data,
               *map(str, (imgsz, batch, epochs)), str(folder)]

    def marks(kind: str) -> list[Mark]:
        return follow(command, lambda: (folder / "marks").read_text().count(kind) if (folder / "marks").exists() else 0,
                      folder)
    return marks


def follow(command: Sequence[str], count: Callable[[], int], folder: Path) -> list[Mark]:
    """Run a command in a folder; what it had taken whenever `count` grew, and at its end.

    Raises:
        SystemExit: if it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began, found, last = time.perf_counter(), [], {"wall": 0.0, "cpu": 0.0}
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said, env=environment())
        while process.poll() is None:
            time.sleep(0.05)
            taken = {"wall": time.perf_counter() - began, "cpu": tree_seconds(process.pid)}
            found += [taken] * (count() - len(found))
            last = taken if taken["cpu"] else last  # it may just have ended
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}\n{(folder / 'said').read_text()[-3000:]}")
    return [*found, {"wall": time.perf_counter() - began, "cpu": last["cpu"]}]


def environment() -> Mapping[str, str]:
    """As a user's shell has it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PYTHONPATH", "GOMP_"))}


def tree_seconds(root: int) -> float:
    """CPU seconds of a process, of those below it, and of those that they have waited for."""
    seconds: dict[int, float] = {}
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has just ended
            continue
        number = int(folder.name)
        parents[number], seconds[number] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    inside = {root}
    for number in sorted(parents):
        above, path = number, []
        while above in parents and above not in inside:
            path.append(above)
            above = parents[above]
        if above in inside:
            inside.update(path)
    return sum(seconds.get(number, 0.0) for number in inside)
