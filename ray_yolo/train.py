"""`python -m ray_yolo.train`: trains one model."""

from ray_yolo.entry import start

if __name__ == "__main__":
    start("train")
