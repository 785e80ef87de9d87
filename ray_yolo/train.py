"""`python -m ray_yolo.train`: trains one model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ray_yolo.cli import parse_train, run
from ray_yolo.config_sources import describe


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; with --dry-run print the settings and what Ray would be asked for."""
    config, origins, dry_run = parse_train(argv)
    if dry_run:
        print(describe(config, origins))
    from ray_yolo.runtime import cluster, trainer  # here, so that --help and bad flags answer without torch and Ray

    if dry_run:
        print(f"# {cluster.scaling_config(config.placement)}")
    else:
        trainer.fit(config)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
