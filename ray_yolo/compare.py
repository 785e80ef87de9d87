"""`python -m ray_yolo.compare`: trains two sides on pairs of fresh seeds, and says which one is better."""

from ray_yolo.entry import start

if __name__ == "__main__":
    start("compare")
