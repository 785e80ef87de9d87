"""`python -m ray_yolo.list`: the runs and sweeps of a project, with their state and best result."""

from ray_yolo.entry import start

if __name__ == "__main__":
    start("list")
