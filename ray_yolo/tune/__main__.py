"""`python -m ray_yolo.tune`: searches the recipe; every trial is itself a distributed training."""

import sys

from ray_yolo.cli import run
from ray_yolo.cli import tune as main

if __name__ == "__main__":
    sys.exit(run(main))
