"""Non-maximum suppression inside an exported file: the same detections as `ops.nms.select`, in two other languages.

Both give (m, 7) float32 rows [image, x1, y1, x2, y2, score, class], by image and falling score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torchvision.ops import batched_nms

from ray_yolo.config.commands import NmsConfig

if TYPE_CHECKING:
    from onnx import ModelProto

_ONNX_TEXT = """
<ir_version: {ir}, opset_import: ["" : {opset}]>
suppress (float[images, boxes, numbers] predictions) => (float[found, 7] detections)
<int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] four = {{4}}, int64[1] end = {{65536}},
 int64[1] axis = {{2}}, int64[2] place = {{0, 2}}, float none = {{0}}, int64[1] limit = {{{limit}}}, float all = {{1}},
 float overlap = {{{iou}}}, float score = {{{confidence}}}>
{{
    corners = Slice (predictions, zero, four, axis)
    scores = Slice (predictions, four, end, axis)
    best, label = TopK <axis = 2> (scores, one)
    other = Less (scores, best)
    own = Where (other, none, scores)
    by_class = Transpose <perm = [0, 2, 1]> ({competing})
    kept = NonMaxSuppression (corners, by_class, limit, overlap, score)
    kept_place = Gather <axis = 1> (kept, place)
    kept_score = GatherND (best, kept_place)
    shape = Shape (best)
    nothing = ConstantOfShape <value = float[1] {{0}}> (shape)
    left = ScatterND (nothing, kept_place, kept_score)
    ranked = Transpose <perm = [0, 2, 1]> (left)
    chosen = NonMaxSuppression (corners, ranked, limit, all, score)
    chosen_place = Gather <axis = 1> (chosen, place)
    chosen_image = Gather <axis = 1> (chosen, zero)
    image = Cast <to = 1> (chosen_image)
    box = GatherND (corners, chosen_place)
    chance = GatherND (best, chosen_place)
    chosen_label = GatherND (label, chosen_place)
    class = Cast <to = 1> (chosen_label)
    detections = Concat <axis = 1> (image, box, chance, class)
}}
"""


def onnx_suppression(settings: NmsConfig, ir_version: int, opset: int) -> ModelProto:
    """A graph from `predictions` (B, N, 4 + classes) to `detections`.

    ONNX limits what it keeps by class. The second suppression, among what the first has left and with an overlap that
    no two boxes exceed, suppresses nothing: it puts the best `max_detections` of each image in order.
    """
    from onnx import parser

    return parser.parse_model(_ONNX_TEXT.format(
        ir=ir_version, opset=opset, limit=settings.max_detections, iou=settings.iou, confidence=settings.confidence,
        competing="best" if settings.agnostic_nms else "own"))


class Suppression(nn.Module):
    """The same for TorchScript; the file needs torchvision where it is loaded."""

    def __init__(self, settings: NmsConfig) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, predictions: Tensor) -> Tensor:
        """Detections of `predictions` (B, N, 4 + classes)."""
        settings = self.settings
        rows: Tensor = _suppress(predictions, settings.confidence, settings.iou, settings.max_detections,
                                 settings.agnostic_nms)
        return rows


@torch.jit.script_if_tracing
def _suppress(predictions: Tensor, confidence: float, iou: float, limit: int, agnostic: bool) -> Tensor:
    found = [torch.zeros((0, 7), device=predictions.device)]
    for image in range(predictions.shape[0]):
        scores, classes = predictions[image, :, 4:].max(dim=1)
        chosen = torch.nonzero(scores > confidence)[:, 0]
        boxes, scores, classes = predictions[image, chosen, :4], scores[chosen], classes[chosen]
        rivals = torch.zeros_like(classes) if agnostic else classes
        kept = batched_nms(boxes, scores, rivals, iou)[:limit]
        number = torch.full((kept.shape[0], 1), float(image), device=predictions.device)
        found.append(torch.cat([number, boxes[kept], scores[kept, None], classes[kept, None].float()], 1))
    return torch.cat(found)
