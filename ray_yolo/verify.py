"""`python -m ray_yolo.verify`: checks the files of a run, and whether two runs trained the same weights."""

from ray_yolo.cli import run
from ray_yolo.cli import verify as main

if __name__ == "__main__":
    raise SystemExit(run(main))
