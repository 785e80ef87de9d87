"""The code of the family: a small table of rows with the anchor-free head and its loss."""

from ray_yolo.models import rows
from ray_yolo.models.detector import Architecture
from ray_yolo.models.families import Family, fit_nothing
from ray_yolo.models.heads import decode_distances
from ray_yolo.models.loss_anchor_free import AnchorFreeLoss

TOY = Architecture(
    (
        rows.ConvRow(8, kernel=3, stride=2),
        rows.ConvRow(16, kernel=3, stride=2),
        rows.C2fRow(16, repeats=1),
        rows.ConvRow(16, kernel=3, stride=2),
        rows.ConvRow(24, kernel=3, stride=2),
        rows.AnchorFreeRow(source=(3, 4)),
    ),
    None,
)

FAMILY = Family({"toy": TOY}, fit_nothing, lambda head, gains, *_: AnchorFreeLoss(head, gains), decode_distances)
