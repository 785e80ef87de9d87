"""`python -m ray_yolo.val`: validates trained weights."""

import sys

from ray_yolo.cli import val as main
from ray_yolo.exits import run

if __name__ == "__main__":
    sys.exit(run(main))
