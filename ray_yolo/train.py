"""`python -m ray_yolo.train`: trains one model."""

import sys

from ray_yolo.cli import run
from ray_yolo.cli import train as main

if __name__ == "__main__":
    sys.exit(run(main))
