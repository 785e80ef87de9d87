"""`python -m ray_yolo.sync`: delivers a run folder to an MLflow server."""

from ray_yolo.cli import run
from ray_yolo.cli import sync as main

if __name__ == "__main__":
    raise SystemExit(run(main))
