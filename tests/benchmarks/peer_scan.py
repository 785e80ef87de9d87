"""A peer's public data set class meets a data set that it does not know; run by `scan.py` with the peers' Python.

    python peer_scan.py {yolov5,ultralytics} DATA.yaml

It answers whatever it is asked with the numbers of images and boxes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from contestant import serve
from peer_data import ultralytics_samples, yolov5_samples


def main(peer: str, data: str) -> None:
    folder = Path(data).parent
    make = {"ultralytics": ultralytics_samples, "yolov5": yolov5_samples}[peer]

    def scan(_: object) -> list[int]:
        for cache in folder.rglob("*.cache*"):
            cache.unlink()
        samples = make(data, str(folder / "images" / "train"), 320, False)
        return [len(samples), sum(len(each["cls"] if isinstance(each, dict) else each) for each in samples.labels)]

    serve(scan)


if __name__ == "__main__":
    main(*sys.argv[1:])
