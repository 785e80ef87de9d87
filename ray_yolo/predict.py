"""`python -m ray_yolo.predict`: detects in images and videos."""

from ray_yolo.entry import start

if __name__ == "__main__":
    start("predict")
