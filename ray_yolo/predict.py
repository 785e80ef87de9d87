"""`python -m ray_yolo.predict`: detects in images and videos."""

from ray_yolo.cli import predict as main
from ray_yolo.cli import run

if __name__ == "__main__":
    raise SystemExit(run(main))
