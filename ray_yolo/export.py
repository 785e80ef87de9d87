"""`python -m ray_yolo.export`: writes trained weights for other programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ray_yolo.cli import parse_export, run
from ray_yolo.config_sources import describe


def main(argv: Sequence[str] | None = None) -> int:
    """Export as the command line says; with --dry-run only print the settings."""
    config, origins, dry_run = parse_export(argv)
    if dry_run:
        print(describe(config, origins))
        return 0
    from ray_yolo.engine.export import export  # here, so that --help and bad flags answer without torch

    print(export(config))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
