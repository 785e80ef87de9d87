"""YOLOv5's named recipes: hyper-parameters by YOLOv5's names, for `--recipe NAME`.

The values are those that YOLOv5 7.0 publishes with its models. `scratch-low` trained the released n and s models,
`scratch-high` m, l and x. `fine-tune` was evolved on Pascal VOC, and `Objects365` on the data set of that name.
"""

from __future__ import annotations

from collections.abc import Mapping

from ray_yolo.config.settings import GENES, SourcedValue
from ray_yolo.config.synonyms import did_you_mean
from ray_yolo.core.errors import InputError

_TABLE = """
                scratch-low scratch-med scratch-high fine-tune Objects365
lr0             0.01        0.01        0.01         0.00334   0.00258
lrf             0.01        0.1         0.1          0.15135   0.17
momentum        0.937       0.937       0.937        0.74832   0.779
weight_decay    0.0005      0.0005      0.0005       0.00025   0.00058
warmup_epochs   3.0         3.0         3.0          3.3835    1.33
warmup_momentum 0.8         0.8         0.8          0.59462   0.86
warmup_bias_lr  0.1         0.1         0.1          0.18657   0.0711
box             0.05        0.05        0.05         0.02      0.0539
cls             0.5         0.3         0.3          0.21638   0.299
cls_pw          1.0         1.0         1.0          0.5       0.825
obj             1.0         0.7         0.7          0.51728   0.632
obj_pw          1.0         1.0         1.0          0.67198   1.0
anchor_t        4.0         4.0         4.0          3.3744    3.44
fl_gamma        0.0         0.0         0.0          0.0       0.0
hsv_h           0.015       0.015       0.015        0.01041   0.0188
hsv_s           0.7         0.7         0.7          0.54703   0.704
hsv_v           0.4         0.4         0.4          0.27739   0.36
degrees         0.0         0.0         0.0          0.0       0.0
translate       0.1         0.1         0.1          0.04591   0.0902
scale           0.5         0.9         0.9          0.75544   0.491
shear           0.0         0.0         0.0          0.0       0.0
perspective     0.0         0.0         0.0          0.0       0.0
flipud          0.0         0.0         0.0          0.0       0.0
fliplr          0.5         0.5         0.5          0.5       0.5
mosaic          1.0         1.0         1.0          0.85834   1.0
mixup           0.0         0.1         0.1          0.04266   0.0
copy_paste      0.0         0.0         0.1          0.0       0.0
"""


def _columns(table: str) -> dict[str, dict[str, str]]:
    header, *rows = [line.split() for line in table.strip().splitlines()]
    return {name: {row[0]: row[column] for row in rows} for column, name in enumerate(header, 1)}


RECIPES: Mapping[str, Mapping[str, str]] = _columns(_TABLE)
"""Name -> value of each gene, as text."""

YOLOV5_FILES = {"hyp.VOC.yaml": "fine-tune"} | {f"hyp.{name}.yaml": name for name in RECIPES if name != "fine-tune"}
"""Name of a file that YOLOv5 contains -> the named recipe with its values."""


def named_recipe(name: str, *, has_anchors: bool) -> dict[str, SourcedValue]:
    """The settings of a named recipe by config path.

    Args:
        has_anchors: whether the model is anchor-based. The loss terms of other models are of another scale, so the
            recipe's loss settings are left out for them.

    Raises:
        InputError: for an unknown name.
    """
    if name not in RECIPES:
        near = did_you_mean(name, {known: known for known in RECIPES})
        raise InputError(f"--recipe {name}: is unknown{near or ';'} Known: {', '.join(RECIPES)}")
    values = {GENES[gene]: SourcedValue(value, f"--recipe {name}") for gene, value in RECIPES[name].items()}
    return {path: value for path, value in values.items() if has_anchors or not path.startswith("loss.")}
