"""`python -m ray_yolo.list`: the runs and sweeps of a project, with their state and best result."""

from ray_yolo.cli import list_runs as main
from ray_yolo.cli import run

if __name__ == "__main__":
    raise SystemExit(run(main))
