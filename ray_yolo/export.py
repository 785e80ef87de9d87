"""`python -m ray_yolo.export`: writes trained weights for other programs."""

from ray_yolo.cli import export as main
from ray_yolo.cli import run

if __name__ == "__main__":
    raise SystemExit(run(main))
