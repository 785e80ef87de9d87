"""`python -m ray_yolo.tune`: searches the recipe; every trial is itself a distributed training."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ray_yolo.cli import parse_tune, run
from ray_yolo.config.sources import describe


def main(argv: Sequence[str] | None = None) -> int:
    """Search as the command line says; with --dry-run check it, and print the settings."""
    config, origins, dry_run = parse_tune(argv)
    from ray_yolo.runlog import narrator  # here, so that --help and bad flags answer without torch and Ray
    from ray_yolo.tune import tuner

    if not dry_run:
        tuner.search(config)
        return 0
    decided = tuner.foresee(config)
    print(f"{describe(config, origins, decided)}\n# {narrator.settings_line(decided.recipe)}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
