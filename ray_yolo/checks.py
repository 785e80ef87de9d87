"""`python -m ray_yolo.checks`: versions, devices, cluster and storage on one page, or a data set."""

from ray_yolo.entry import start

if __name__ == "__main__":
    start("checks")
