"""`python -m ray_yolo.tune`: searches the recipe; every trial is itself a distributed training."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ray_yolo.cli import parse_tune, run
from ray_yolo.config_sources import describe


def main(argv: Sequence[str] | None = None) -> int:
    """Search as the command line says; with --dry-run only print the settings."""
    config, origins, dry_run = parse_tune(argv)
    if dry_run:
        print(describe(config, origins))
        return 0
    from ray_yolo.runtime.tuner import search  # here, so that --help and bad flags answer without torch and Ray

    search(config)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
