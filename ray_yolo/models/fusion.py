"""What a detector costs to run, and its cheaper twin for evaluation: every BatchNorm folded into its convolution."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.flop_counter import FlopCounterMode

from ray_yolo.models.blocks import Conv
from ray_yolo.models.detector import Detector


def fuse(detector: Detector) -> Detector:
    """A copy in evaluation mode with the same outputs up to rounding; the original stays as it is."""
    fused = copy.deepcopy(detector).eval()
    for block in fused.modules():
        if isinstance(block, Conv) and isinstance(block.bn, nn.BatchNorm2d):
            block.conv, block.bn = fuse_conv_bn_eval(block.conv, block.bn), nn.Identity()
    return fused


def count_parameters(detector: nn.Module) -> int:
    """Trainable numbers: weights and biases, norms' included, running statistics not."""
    return sum(parameter.numel() for parameter in detector.parameters())


def gflops(detector: Detector, imgsz: int = 640) -> float:
    """Billions of operations for one square image: 2 x multiply-adds of the convolutions of the fused model.

    Counted on the meta device: nothing is computed.
    """
    image = torch.empty(1, 3, imgsz, imgsz, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        fuse(detector).to("meta")(image)
    return float(counter.get_total_flops()) / 1e9
