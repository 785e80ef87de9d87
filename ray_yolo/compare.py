"""`python -m ray_yolo.compare`: trains two sides on pairs of fresh seeds, and says which one is better."""

from ray_yolo.cli import compare as main
from ray_yolo.cli import run

if __name__ == "__main__":
    raise SystemExit(run(main))
