"""`python -m ray_yolo.train`: trains one model."""

from ray_yolo.cli import run
from ray_yolo.cli import train as main

if __name__ == "__main__":
    raise SystemExit(run(main))
