"""`python -m ray_yolo.sync`: delivers a run folder to an MLflow server."""

from ray_yolo.entry import start

if __name__ == "__main__":
    start("sync")
