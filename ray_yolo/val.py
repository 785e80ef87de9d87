"""`python -m ray_yolo.val`: validates trained weights."""

from ray_yolo.cli import run
from ray_yolo.cli import val as main

if __name__ == "__main__":
    raise SystemExit(run(main))
