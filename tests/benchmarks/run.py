"""`python tests/benchmarks/run.py NAME [options]`: one benchmark, one JSON line at the end."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

BENCHMARKS = {"workers": "tests.benchmarks.workers", "evolve": "tests.benchmarks.evolve_simulation",
              "peers": "tests.benchmarks.peers", "exchange": "tests.benchmarks.exchange",
              "same_as_peer": "tests.benchmarks.same_as_peer", "data": "tests.benchmarks.data",
              "chaos": "tests.benchmarks.chaos"}


def main(argv: list[str]) -> int:
    """Run the named benchmark with the rest of the arguments."""
    if not argv or argv[0] not in BENCHMARKS:
        print(f"usage: run.py {{{','.join(BENCHMARKS)}}} [options]", file=sys.stderr)
        return 2
    sys.path.insert(0, str(Path(__file__).parents[2]))
    importlib.import_module(BENCHMARKS[argv[0]]).main(argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
