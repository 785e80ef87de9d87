"""`python -m ray_yolo.replay`: trains one step of a run again, and shows what happened in it."""

from ray_yolo.entry import start

if __name__ == "__main__":
    start("replay")
