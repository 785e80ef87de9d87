"""`python -m ray_yolo.tune`: searches the recipe; every trial is itself a distributed training."""

from ray_yolo.entry import start

if __name__ == "__main__":
    start("tune")
