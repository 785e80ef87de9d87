"""`python -m ray_yolo.val`: validates trained weights."""

from ray_yolo.entry import start

if __name__ == "__main__":
    start("val")
