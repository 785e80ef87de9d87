"""From the command to the first step, and to the prompt: in-process, on Ray workers, and YOLOv5's own command.

    python tests/benchmarks/run.py start [--workers 1 2 1-2] [--rounds 1] [--no-peer]

Bare commands on shapes at 64 px, one epoch. CPU seconds of all processes, seconds by the clock beside them; `ours` is
in-process training.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from ray_yolo.config.yaml import to_yaml
from ray_yolo.data.dataset_yaml import read_description
from tests.benchmarks.commands import train_ours, train_peer
from tests.benchmarks.harness import machine, report, take_turns

IMGSZ, BATCH = 64, 16


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py start")
    parser.add_argument("--workers", nargs="*", default=["1", "2", "1-2"], help="of trainings on Ray")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true")
    given = parser.parse_args(argv)
    sides = {"ours": lambda: ours("0")} | ({} if given.no_peer else {"yolov5": peer})
    turns = take_turns(sides, given.rounds, warm_up=0)
    on_ray = {f"{count} workers": ours(count) for count in given.workers}
    more = {"prompt": turns["ours"][-1]["prompt"], **on_ray}
    if given.no_peer:
        print(json.dumps({"id": "start", "ours": rounded(turns["ours"][-1]), **rounded(on_ray), "machine": machine()}))
        return
    report("start", turns, **{name: rounded(each) for name, each in more.items()})


def ours(workers: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--imgsz", str(IMGSZ), "--epochs", "1", "--num-workers", workers)
        first, *_, end = train_ours("shapes", Path(folder), *flags)("step")
    return {**first, "prompt": end}


def peer() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        first, *_, end = train_peer("yolov5", own_data("shapes", Path(folder)), Path(folder), IMGSZ, BATCH, 1)("step")
    return {**first, "prompt": end}


def own_data(data: str, folder: Path) -> str:
    """The description of a data set as a file for others, who look for what it names from their own folder."""
    description = read_description(data)
    file = folder / "data.yaml"
    file.write_text(to_yaml({"path": str(description.root), "names": list(description.names),
                             **{split: list(description.split(split)) for split in ("train", "val")}}))
    return str(file)


def rounded(tree: Any) -> Any:
    return {name: rounded(value) for name, value in tree.items()} if isinstance(tree, dict) else round(tree, 2)
