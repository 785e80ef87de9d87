"""`ray_yolo.serve:app`: what `serve run`, `serve deploy` and cluster/serve.yaml import; see `runtime/serving.py`."""

from ray_yolo.runtime.serving import app

__all__ = ["app"]
