"""`python -m ray_yolo.export`: writes trained weights for other programs."""

from ray_yolo.entry import start

if __name__ == "__main__":
    start("export")
