"""`python -m ray_yolo.predict`: detects in pictures and videos."""

import sys

from ray_yolo.cli import predict as main
from ray_yolo.cli import run

if __name__ == "__main__":
    sys.exit(run(main))
