"""What the benchmarks share: contestants that take turns, and one JSON line about them.

Contestants alternate in one run (ours first in every other round), so that what else the machine does meets both.
The figure is CPU seconds, which others disturb least; seconds by the clock stand beside it. A ratio is how many times
as good we are: the median over rounds of peer / ours.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEER_PYTHON = HERE.parents[1] / ".bench" / "bin" / "python"  # made by `make bench-env`

Turn = Callable[[], Mapping[str, Any]]  # does it once; gives `cpu` and `wall` seconds
Turns = dict[str, list[Mapping[str, Any]]]


@contextmanager
def contestant(*command: object, threads: int = 1, peer: bool = False) -> Iterator[Callable[[Any], dict[str, Any]]]:
    """A process that `contestant.serve`s: a call sends it a value, waits, and gives its answer.

    Args:
        command: a script of this folder and its arguments; of a peer, run by the peers' Python.

    Raises:
        SystemExit: if the peers are not installed, or the process ends without an answer.
    """
    if peer and not PEER_PYTHON.exists():
        raise SystemExit(f"{PEER_PYTHON} is missing: run `make bench-env`")
    python = str(PEER_PYTHON) if peer else sys.executable
    script, *arguments = map(str, command)
    reading, writing = os.pipe()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": "", "ANSWERS": str(writing)}
    with tempfile.TemporaryFile("w+") as said, os.fdopen(reading) as answers:
        process = subprocess.Popen([python, str(HERE / script), *arguments], stdin=subprocess.PIPE, text=True,
                                   stdout=said, stderr=said, env=environment, pass_fds=[writing])
        os.close(writing)

        def ask(value: Any = None) -> dict[str, Any]:
            print(json.dumps(value), file=process.stdin, flush=True)
            if answer := answers.readline():
                return json.loads(answer)
            said.seek(0)
            raise SystemExit(f"{script} has ended: {said.read()}")

        try:
            yield ask
        finally:
            process.communicate()


def take_turns(contestants: Mapping[str, Turn], rounds: int, warm_up: int = 1) -> Turns:
    """What each contestant's turns took, but for the first ones, by name."""
    turns: Turns = {name: [] for name in contestants}
    for number in range(-warm_up, rounds):
        for name in list(contestants)[:: 1 if number % 2 else -1]:
            taken = contestants[name]()
            if number >= 0:
                turns[name].append(taken)
    return turns


def ratios(turns: Turns, key: str = "cpu") -> list[float]:
    """Of each round, how many times as good `ours` was as the best of the others."""
    others = [name for name in turns if name != "ours"]
    return [min(turns[name][n][key] for name in others) / ours[key] for n, ours in enumerate(turns["ours"])]


def report(subject: str, turns: Turns, key: str = "cpu", scale: float = 1.0, **more: Any) -> dict[str, Any]:
    """Print the JSON line of a benchmark: medians, ratio, its lowest and highest round, command and machine."""
    def medians(of: str) -> dict[str, float]:
        return {name: round(scale * statistics.median(turn[of] for turn in each), 5) for name, each in turns.items()}

    found = medians(key)
    each = ratios(turns, key)
    line = {"id": subject, "ours": found.pop("ours"), "peer": found, "ratio": round(statistics.median(each), 3),
            "spread": [round(min(each), 3), round(max(each), 3)]}
    if key == "cpu":
        line["wall"] = {**medians("wall"), "ratio": round(statistics.median(ratios(turns, "wall")), 3)}
    line |= {**more, "command": shlex.join(["python", "tests/benchmarks/run.py", *sys.argv[1:]]), "machine": machine()}
    print(json.dumps(line), flush=True)
    return line


def machine() -> dict[str, Any]:
    """What ratios depend on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(map(str.strip, line.split(":", 1)) for line in info.splitlines() if ":" in line)
    flags = fields.get("flags", "").split()
    return {"cpu": fields.get("model name", platform.processor()), "cores": len(os.sched_getaffinity(0)),
            "vectors": [name for name in ("avx2", "avx512f", "avx512_bf16") if name in flags],
            "load": round(os.getloadavg()[0], 1)}
