"""`python -m ray_yolo.replay`: trains one step of a run again, and shows what happened in it."""

from ray_yolo.cli import replay as main
from ray_yolo.cli import run

if __name__ == "__main__":
    raise SystemExit(run(main))
