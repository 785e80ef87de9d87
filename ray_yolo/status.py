"""`python -m ray_yolo.status`: what a run or sweep is doing, or whether a cluster's nodes can train."""

from ray_yolo.cli import run
from ray_yolo.cli import status as main

if __name__ == "__main__":
    raise SystemExit(run(main))
