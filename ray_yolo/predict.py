"""`python -m ray_yolo.predict`: detects in pictures and videos."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ray_yolo.cli import parse_predict, run
from ray_yolo.config_sources import describe


def main(argv: Sequence[str] | None = None) -> int:
    """Predict as the command line says; with --dry-run only print the settings."""
    config, origins, dry_run = parse_predict(argv)
    if dry_run:
        print(describe(config, origins))
        return 0
    from ray_yolo.runtime.predictor import predict  # here, so that --help and bad flags answer without torch

    predict(config)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
