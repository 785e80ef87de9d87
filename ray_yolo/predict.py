"""`python -m ray_yolo.predict`: detects in pictures and videos."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ray_yolo.cli import parse_predict, run
from ray_yolo.config.sources import describe


def main(argv: Sequence[str] | None = None) -> int:
    """Predict as the command line says; with --dry-run check it, and print the settings."""
    config, origins, dry_run = parse_predict(argv)
    from ray_yolo.runtime.predictor import check, predict  # here, so that --help and bad flags answer without torch

    if dry_run:
        print(describe(config, origins, check(config)[0]))
    else:
        predict(config)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
