"""Reads a peer's training samples through the peer's own public data set class and prints CPU ms a sample as JSON.

Run by `tests/benchmarks/data.py` with the Python of an environment in which the peer is installed; the product never
imports a peer, and this file imports nothing of the product.

    python peer_data.py {ultralytics,yolov5} DATA.yaml IMAGES IMGSZ SAMPLES
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from typing import Any

AUGMENT = {"hsv_h": 0.015, "hsv_s": 0.7, "hsv_v": 0.4, "degrees": 0.0, "translate": 0.1, "scale": 0.5, "shear": 0.0,
           "perspective": 0.0, "flipud": 0.0, "fliplr": 0.5, "mosaic": 1.0, "mixup": 0.0, "copy_paste": 0.0}
BATCH = 16


def ultralytics_samples(data: str, images: str, imgsz: int, cache: str | bool) -> Any:
    from ultralytics.cfg import get_cfg
    from ultralytics.data import build_yolo_dataset
    from ultralytics.data.utils import check_det_dataset

    settings = get_cfg(overrides={**AUGMENT, "imgsz": imgsz, "cache": cache})
    return build_yolo_dataset(settings, images, BATCH, check_det_dataset(data, autodownload=False), mode="train")


def yolov5_samples(_: str, images: str, imgsz: int, cache: str | bool) -> Any:
    from yolov5.utils.dataloaders import LoadImagesAndLabels

    return LoadImagesAndLabels(images, imgsz, BATCH, augment=True, hyp=AUGMENT, cache_images=cache)


def milliseconds(samples: Any, count: int) -> float:
    """CPU time of one sample, batches put together, in a random order."""
    order = [random.Random(0).sample(range(len(samples)), len(samples))[n % len(samples)] for n in range(count)]
    began = time.process_time()
    for first in range(0, count, BATCH):
        samples.collate_fn([samples[number] for number in order[first:first + BATCH]])
    return (time.process_time() - began) * 1e3 / count


if __name__ == "__main__":
    import cv2
    import torch

    peer, data, images, *numbers = sys.argv[1:]
    imgsz, count = map(int, numbers)
    sys.argv = sys.argv[:1]
    torch.set_num_threads(1)
    make = {"ultralytics": ultralytics_samples, "yolov5": yolov5_samples}[peer]
    found = {}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        for name, cache in (("jpeg", False), ("ram", "ram")):
            samples = make(data, images, imgsz, cache)
            cv2.setNumThreads(0)
            milliseconds(samples, 4 * BATCH)
            found[name] = milliseconds(samples, count)
    print(json.dumps(found))
