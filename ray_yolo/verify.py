"""`python -m ray_yolo.verify`: checks the files of a run, and whether two runs trained the same weights."""

from ray_yolo.entry import start

if __name__ == "__main__":
    start("verify")
