"""One side of a benchmark, a process of its own. Standard library only: the peers' Python runs it as well."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(do: Callable[[Any], Any]) -> None:
    """Answer each line of standard input, a JSON value, by what `do` makes of it and what that took; until its end.

    `cpu` and `wall` are seconds, `cpu` those of this process and of all that it has waited for; `peak_mb` is the most
    memory that it ever held.
    """
    answers = os.fdopen(int(os.environ["ANSWERS"]), "w")  # not standard output, where libraries print
    for line in sys.stdin:
        answer = timed(do, json.loads(line))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({**answer, "peak_mb": peak}), file=answers, flush=True)


def cpu_seconds() -> float:
    """Of this process with its threads, and of those that it started and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def timed(do: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """What a call gives, and the seconds it took, as an answer of `serve` has them."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    result = do(*arguments)
    return {"result": result, "cpu": cpu_seconds() - cpu, "wall": time.perf_counter() - wall}
