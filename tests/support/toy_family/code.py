"""The code of the family: a small table of rows with the anchor-free head and its loss."""

from ray_yolo.models.blocks import C2f, Conv
from ray_yolo.models.detector import Architecture
from ray_yolo.models.families import Family, fit_nothing
from ray_yolo.models.heads import AnchorFree, decode_distances
from ray_yolo.models.loss_anchor_free import AnchorFreeLoss
from ray_yolo.models.rows import row

TOY = Architecture(
    (
        row(Conv, 8, kernel=3, stride=2),
        row(Conv, 16, kernel=3, stride=2),
        row(C2f, 16, repeats=1),
        row(Conv, 16, kernel=3, stride=2),
        row(Conv, 24, kernel=3, stride=2),
        row(AnchorFree, source=(3, 4)),
    ),
    None,
)

FAMILY = Family({"toy": TOY}, fit_nothing, lambda head, gains, *_: AnchorFreeLoss(head, gains), decode_distances)
