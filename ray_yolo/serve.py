"""`python -m ray_yolo.serve`: detection behind HTTP. `serve run`, `serve deploy` and cluster/serve.yaml import
`ray_yolo.serve:app`; see `runtime/serving.py`.
"""

from ray_yolo.entry import start

if __name__ == "__main__":
    start("serve")
else:
    from ray_yolo.runtime.serving import app

    __all__ = ["app"]
