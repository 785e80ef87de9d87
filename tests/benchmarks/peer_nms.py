"""A peer's public non-maximum suppression; run by `nms.py` with the peers' Python, a `contestant`.

    python peer_nms.py {yolov5,ultralytics} CASE.pt

It answers a number with the scores of what is detected in so many images.
"""

from __future__ import annotations

import sys

import torch
from contestant import serve


def main(peer: str, file: str) -> None:
    torch.set_num_threads(1)
    case = torch.load(file, weights_only=True)
    boxes, scores = case["boxes"], case["scores"]
    boxes = torch.cat(((boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]), 2)
    settings = {"conf_thres": 0.001, "iou_thres": 0.6, "multi_label": True, "max_det": case["limit"]}
    if peer == "yolov5":
        from yolov5.utils.general import non_max_suppression
        given = torch.cat((boxes, torch.ones_like(boxes[..., :1]), scores), 2)
    else:
        from ultralytics.utils.nms import non_max_suppression
        given = torch.cat((boxes, scores), 2).transpose(1, 2)
    serve(lambda images: [each[:, 4].tolist() for each in non_max_suppression(given[:images].clone(), **settings)])


if __name__ == "__main__":
    main(*sys.argv[1:])
