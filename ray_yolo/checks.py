"""`python -m ray_yolo.checks`: versions, devices, cluster and storage on one page, or a data set."""

from ray_yolo.cli import checks as main
from ray_yolo.cli import run

if __name__ == "__main__":
    raise SystemExit(run(main))
