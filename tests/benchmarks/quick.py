"""The benchmarks that take no more than five minutes in all, their ratios beside those that are committed.

    python tests/benchmarks/run.py quick [--renew]

Fails where a ratio is under three quarters of the committed one (`ratios.json`; --renew writes it anew).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from tests.benchmarks.harness import HERE

RATIOS, LEAST = HERE / "ratios.json", 0.75
QUICK = ("step --rounds 4 --steps 1", "memory --rounds 1 --steps 1", "data --images 64 --rounds 2",
         "val --images 32 --rounds 1", "nms --images 4 --rounds 2", "map --images 60 --rounds 1",
         "scan --images 500 --rounds 2")  # the others depend on disks and on what else runs


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.py quick")
    parser.add_argument("--renew", action="store_true")
    given = parser.parse_args(argv)
    committed = json.loads(RATIOS.read_text()) if RATIOS.exists() else {}
    found, slower = {}, []
    for command in QUICK:
        name, *flags = command.split()
        ended = subprocess.run([sys.executable, str(HERE / "run.py"), name, *flags], capture_output=True, text=True,
                               check=False)
        if ended.returncode:
            raise SystemExit(f"{command}\n{ended.stdout}{ended.stderr}")
        line = json.loads(ended.stdout.splitlines()[-1])
        found[command] = line["ratio"]
        print(f"{command:30} {line['ratio']:7.2f} times as good (committed: {committed.get(command, '-')}), "
              f"{line['spread'][0]:.2f} to {line['spread'][1]:.2f}", flush=True)
        if line["ratio"] < LEAST * committed.get(command, 0):
            slower.append(name)
    if given.renew:
        RATIOS.write_text(json.dumps(found, indent=1) + "\n")
    elif slower:
        raise SystemExit(f"worse than committed: {', '.join(slower)}")
