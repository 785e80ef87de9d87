"""`python -m ray_yolo.serve`: detection behind HTTP. `serve run`, `serve deploy` and cluster/serve.yaml import
`ray_yolo.serve:app`; see `runtime/serving.py`.
"""

from ray_yolo.cli import run
from ray_yolo.cli import serve as main
from ray_yolo.runtime.serving import app

__all__ = ["app"]

if __name__ == "__main__":
    raise SystemExit(run(main))
