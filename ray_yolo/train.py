"""`python -m ray_yolo.train`: trains one model."""

import sys

from ray_yolo.cli import train as main
from ray_yolo.exits import run

if __name__ == "__main__":
    sys.exit(run(main))
