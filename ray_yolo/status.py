"""`python -m ray_yolo.status`: what a run or sweep is doing, or whether a cluster's nodes can train."""

from ray_yolo.entry import start

if __name__ == "__main__":
    start("status")
