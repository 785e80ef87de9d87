"""What a new user waits for: commands at a terminal, by the clock and in seconds of the processor.

    python tests/benchmarks/run.py first_hour words               # --version, --help, mistakes
    python tests/benchmarks/run.py first_hour bare workers        # first step, last epoch, prompt
    python tests/benchmarks/run.py first_hour bare nomlflow --rounds 6  # the first epoch with and without MLflow
    python tests/benchmarks/run.py first_hour joining job         # the same on a Ray that `ray start` has started
    python tests/benchmarks/run.py first_hour joining:2-2 [--head NAME=VALUE]  # other workers, environment of that Ray
    python tests/benchmarks/run.py first_hour bccd yolov5 --data .../bccd/data.yaml  # three epochs, to the prompt
    python tests/benchmarks/run.py first_hour bccd bccd-fp32 bccd-workers:2 --data .../bccd/data.yaml
    python tests/benchmarks/run.py first_hour pictures noplots --data .../bccd/data.yaml --rounds 2

Commands of one call take turns. Each has a terminal, an empty folder and the environment of a shell. Seconds of the
processor are those of the command, of what it started, and of the Ray that it joined.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ray_yolo.core.events import EndEvent, EpochEvent, StepEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from tests.benchmarks.commands import environment, train_peer, tree_seconds
from tests.benchmarks.harness import machine
from tests.benchmarks.start import own_data

Taken = dict[str, tuple[float, float]]  # seconds by the clock and of the processor until a mark
TRAIN = ("-m", "ray_yolo.train", "--model", "yolov5n")
SHORT = (*TRAIN, "--data", "shapes", "--imgsz", "64", "--epochs", "1")
OFF = ("--mlflow-uri", "off")
PROGRAMS = Path(sys.executable).parent
HEAD_SECONDS = 60.0  # until `ray start` takes jobs; a refusal lasts, as by a token that is missing
REFUSED = {"wrong flag": (*SHORT, "--bathc-size", "16"), "wrong data": (*SHORT, "--data", "nowhere.yaml")}
MARKS = {"first step": StepEvent, "last epoch": EpochEvent, "end": EndEvent}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py first_hour")
    parser.add_argument("commands", nargs="+", help="words, or commands that take turns")
    parser.add_argument("--data", default="shapes1k", help="of the commands that train three epochs")
    parser.add_argument("--imgsz", default="320")
    parser.add_argument("--epochs", default="3")
    parser.add_argument("--head", nargs="*", default=[], metavar="NAME=VALUE", help="environment of `ray start`")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args(argv)
    names = ["--version", "--help", *REFUSED] if given.commands == ["words"] else given.commands
    kinds = {name.partition(":")[0] for name in names}
    long = (*TRAIN, "--data", os.path.abspath(given.data) if os.path.exists(given.data) else given.data,
            "--imgsz", given.imgsz, "--batch-size", "16", "--epochs", given.epochs)
    with ray_head(needed=not {"joining", "job"}.isdisjoint(kinds), settings=given.head) as (address, dashboard, pids):
        submit = (f"{PROGRAMS}/ray", "job", "submit", "--address", dashboard, "--", sys.executable)
        commands: Mapping[str, Callable[[str], Taken]] = {
            **{name: partial(refused, (sys.executable, *words)) for name, words in REFUSED.items()},
            "--version": lambda _: at_terminal((f"{PROGRAMS}/ray_yolo", "--version")),
            "--help": lambda _: at_terminal((f"{PROGRAMS}/ray_yolo", "train", "--help")),
            "bare": lambda _: at_terminal((sys.executable, *SHORT)),
            "nomlflow": lambda _: at_terminal((sys.executable, *SHORT, *OFF)),
            "workers": lambda count: at_terminal((sys.executable, *SHORT, "--num-workers", count)),
            "joining": lambda count: at_terminal(
                (sys.executable, *SHORT, "--num-workers", count, "--address", address), pids),
            "job": lambda count: at_terminal((*submit, *SHORT, "--num-workers", count, "--storage-path"), pids,
                                             stored=True),
            "bccd": lambda _: at_terminal((sys.executable, *long)),
            "bccd-nomlflow": lambda _: at_terminal((sys.executable, *long, *OFF)),
            "bccd-fp32": lambda _: at_terminal((sys.executable, *long, "--precision", "fp32")),
            "bccd-workers": lambda count: at_terminal((sys.executable, *long, "--num-workers", count)),
            "pictures": lambda _: at_terminal((sys.executable, *long)),
            "noplots": lambda _: at_terminal((sys.executable, *long, "--noplots")),
            "yolov5": lambda _: peer(given.data, int(given.imgsz), int(given.epochs))}
        turns: dict[str, list[Taken]] = {name: [] for name in names}
        for number in range(given.rounds):
            for name in names[:: -1 if number % 2 else 1]:
                kind, _, workers = name.partition(":")
                turns[name].append(commands[kind](workers or "2"))
                print(name, {mark: [round(each, 2) for each in both] for mark, both in turns[name][-1].items()},
                      file=sys.stderr)
    print(json.dumps({"id": "first_hour", **{name: {mark: [round(statistics.median(turn[mark][n] for turn in each), 2)
                                                          for n in (0, 1)] for mark in each[0]}
                                            for name, each in turns.items()}, "machine": machine()}))


def at_terminal(command: Sequence[str], pids: Sequence[int] = (), *, fails: bool = False, stored: bool = False
                ) -> Taken:
    """What a command in an empty folder takes until each mark of its training, and until the prompt.

    Args:
        pids: other processes that work for it.
        fails: the command is refused.
        stored: append the folder to the command.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ours, theirs = pty.openpty()
        before, began = sum(map(tree_seconds, pids)), time.time()
        process = subprocess.Popen([*command, *([folder] if stored else [])], cwd=folder, stdin=theirs, stdout=theirs,
                                   stderr=theirs, env=dict(environment()), start_new_session=True)
        os.close(theirs)
        said: list[bytes] = []
        threading.Thread(target=lambda: said.extend(iter(lambda: read(ours), b"")), daemon=True).start()
        samples = [(0.0, 0.0)]
        while process.poll() is None:
            samples.append((time.time() - began, tree_seconds(process.pid) + sum(map(tree_seconds, pids)) - before))
            time.sleep(0.05)
        end = time.time() - began
        if bool(process.returncode) != fails:
            raise SystemExit(f"{command}: {process.returncode}\n{b''.join(said)[-3000:].decode()}")
        logs = list(Path(folder).glob(f"**/{EVENTS_FILE}"))
        events = read_events(logs[0]) if logs else []
        taken: Taken = {}
        for mark, kind in MARKS.items():
            if times := [event.time - began for event in events if isinstance(event, kind)]:
                at = times[0] if mark == "first step" else times[-1]
                taken[mark] = at, max(cpu for when, cpu in samples if when <= at)
        if "first step" in taken:
            taken["training"] = tuple(taken["last epoch"][n] - taken["first step"][n] for n in (0, 1))
            taken["to the prompt"] = tuple((end, samples[-2][1])[n] - taken["last epoch"][n] for n in (0, 1))
        wait_for_plots(folder)
        return {**taken, "prompt": (end, max(cpu for _, cpu in samples))}


def refused(command: Sequence[str], _: str) -> Taken:
    return at_terminal(command, fails=True)


def wait_for_plots(folder: str) -> None:
    """Until no process works in the folder: the next command shall have the machine alone."""
    def works(path: Path) -> bool:
        try:
            return os.readlink(path / "cwd") == folder
        except OSError:
            return False

    while any(works(path) for path in Path("/proc").glob("[0-9]*")):
        time.sleep(0.2)


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # its last user has ended
        return b""


def peer(data: str, imgsz: int, epochs: int) -> Taken:
    """The same of YOLOv5's command."""
    with tempfile.TemporaryDirectory() as folder:
        *epochs_at, end = train_peer("yolov5", own_data(data, Path(folder)), Path(folder), imgsz, 16, epochs)("epoch")
    return {"last epoch": (epochs_at[-1]["wall"], epochs_at[-1]["cpu"]), "prompt": (end["wall"], end["cpu"])}


@contextmanager
def ray_head(*, needed: bool, settings: Sequence[str] = ()) -> Iterator[tuple[str, str, list[int]]]:
    """`ray start --head`: its address, its dashboard's address, and its processes. Nothing unless it is needed."""
    if not needed:
        yield "", "", []
        return
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder, open(
            f"{folder}/said", "w") as said:
        process = subprocess.Popen(
            [f"{PROGRAMS}/ray", "start", "--head", "--block", f"--port={ports[0]}",
             f"--temp-dir={folder}", f"--dashboard-port={ports[1]}", f"--ray-client-server-port={ports[2]}",
             "--dashboard-agent-listen-port=0"], stdout=said, stderr=said,
            env={**environment(), **dict(setting.split("=", 1) for setting in settings)})
        try:
            while "Ray runtime started" not in Path(said.name).read_text():
                assert process.poll() is None, Path(said.name).read_text()
                time.sleep(0.1)
            dashboard = f"http://127.0.0.1:{ports[1]}"
            deadline = time.monotonic() + HEAD_SECONDS
            while (job := subprocess.run([f"{PROGRAMS}/ray", "job", "submit", "--address", dashboard, "--", "true"],
                                         capture_output=True, text=True)).returncode:
                assert time.monotonic() < deadline, job.stderr
                time.sleep(1)
            yield f"127.0.0.1:{ports[0]}", dashboard, [process.pid]
        finally:
            process.terminate()
            process.wait(60)
