"""`python -m ray_yolo.sync`: delivers a run folder to an MLflow server, whole; what is there already is left alone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ray_yolo.cli import run
from ray_yolo.redact import redact


def main(argv: Sequence[str] | None = None) -> int:
    """Deliver as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m ray_yolo.sync", description=__doc__)
    parser.add_argument("run_dir", help="folder of a run, such as runs/train/exp")
    parser.add_argument("--mlflow-uri", default="", help="tracking server; '': MLFLOW_TRACKING_URI, else the run's own")
    options = parser.parse_args(argv)
    from ray_yolo.runlog.mlflow import synchronise
    from ray_yolo.runlog.mlflow_client import tracking_uri
    from ray_yolo.runlog.owed import own_uri  # here, so that --help answers without torch and MLflow

    asked = options.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or own_uri(Path(options.run_dir))
    uri = tracking_uri(asked, Path.cwd(), os.environ)
    if uri is None:
        parser.error("--mlflow-uri off: there is nothing to deliver to")
    print(f"run {synchronise(options.run_dir, uri)} at {redact(uri)}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
