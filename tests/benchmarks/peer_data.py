"""A peer's training samples through its own public data set class; run by `data.py` with the peers' Python, a
`contestant`. The product never imports a peer, and this file imports nothing of the product.

    python peer_data.py {ultralytics,yolov5} DATA.yaml IMAGES IMGSZ {jpeg,ram}

It answers a number by reading so many samples.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import cv2
import torch
from contestant import serve

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


def main(peer: str, data: str, images: str, imgsz: str, source: str) -> None:
    torch.set_num_threads(1)
    make = {"ultralytics": ultralytics_samples, "yolov5": yolov5_samples}[peer]
    samples = make(data, images, int(imgsz), "ram" if source == "ram" else False)
    cv2.setNumThreads(0)

    def read(count: int) -> None:
        """Samples in a random order, put together in batches."""
        order = (random.sample(range(len(samples)), len(samples)) * (count // len(samples) + 1))[:count]
        for first in range(0, count, BATCH):
            samples.collate_fn([samples[number] for number in order[first:first + BATCH]])

    serve(read)


if __name__ == "__main__":
    given, sys.argv = sys.argv[1:], sys.argv[:1]
    main(*given)
