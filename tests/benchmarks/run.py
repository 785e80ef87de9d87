"""`python tests/benchmarks/run.py NAME [options]`: one benchmark, one JSON line at the end."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

NAMES = {"step": "step", "memory": "step", "data": "data", "epochs": "epochs", "val": "val", "map": "map", "nms": "nms",
         "workers": "workers", "ray": "workers", "start": "start", "first_hour": "first_hour",
         "stall": "stall", "scan": "scan", "demo": "demo", "exchange": "exchange", "search": "search",
         "seeds": "seeds", "comparisons": "comparisons", "fidelity": "fidelity", "small_labels": "small_labels",
         "same_as_peer": "same_as_peer", "quick": "quick", "chaos": "chaos", "sweep": "sweep",
         "coordinator": "coordinator", "density": "density", "ends": "ends", "fine_tune": "fine_tune",
         "balance": "balance", "partners": "partners", "machines": "machines", "launches": "launches",
         "looks": "looks"}


def main(argv: list[str]) -> int:
    """Run the named benchmark with the rest of the arguments."""
    if not argv or argv[0] not in NAMES:
        print(f"usage: run.py {{{','.join(NAMES)}}} [options]", file=sys.stderr)
        return 2
    sys.path.insert(0, str(Path(__file__).parents[2]))
    importlib.import_module(f"tests.benchmarks.{NAMES[argv[0]]}").main(argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
