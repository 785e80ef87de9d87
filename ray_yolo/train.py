"""`python -m ray_yolo.train`: trains one model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ray_yolo.cli import parse_train, run
from ray_yolo.config.sources import describe


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; with --dry-run check it, and print settings and what Ray would be asked for."""
    config, origins, dry_run = parse_train(argv)
    from ray_yolo.runlog import narrator
    from ray_yolo.runtime import cluster, trainer  # here, so that --help and bad flags answer without torch

    if not dry_run:
        trainer.fit(config)
        return 0
    recipe = trainer.foresee(config)
    print(describe(config, origins, config.model_copy(update={"recipe": recipe})))
    print(f"# {narrator.settings_line(recipe)}\n# {cluster.scaling_config(config.placement)}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
