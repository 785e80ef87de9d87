"""`python -m ray_yolo.export`: writes trained weights for other programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ray_yolo.cli import parse_export, run
from ray_yolo.config.sources import describe


def main(argv: Sequence[str] | None = None) -> int:
    """Export as the command line says; with --dry-run check it, and print the settings."""
    config, origins, dry_run = parse_export(argv)
    from ray_yolo.engine.export import check, export  # here, so that --help and bad flags answer without torch

    print(describe(config, origins, check(config)[0]) if dry_run else export(config))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
