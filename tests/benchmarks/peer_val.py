"""Ultralytics' public validation; run by `val.py` with the peers' Python, a `contestant`.

    python peer_val.py WEIGHTS.pt DATA.yaml IMGSZ BATCH

It answers whatever it is asked with the number of detections in all images.
"""

from __future__ import annotations

import os
import sys

import torch
from contestant import serve
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionValidator

counted = 0


class Counting(DetectionValidator):
    def postprocess(self, predictions):
        global counted
        found = super().postprocess(predictions)
        counted += sum(len(each["bboxes"]) for each in found)
        return found


def main(weights: str, data: str, imgsz: str, batch: str) -> None:
    model = YOLO("yolov5n.yaml")
    model.model.load_state_dict(torch.load(weights, weights_only=True))

    def validate(_: object) -> int:
        global counted
        counted = 0
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # it takes one less than there are cores
        model.val(validator=Counting, data=data, imgsz=int(imgsz), batch=int(batch), workers=0, device="cpu",
                  conf=0.001, iou=0.6, plots=False, verbose=False)
        return counted

    serve(validate)


if __name__ == "__main__":
    main(*sys.argv[1:])
