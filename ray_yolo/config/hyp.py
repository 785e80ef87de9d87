"""YOLOv5's flat names for hyper-parameters: where each one lives in the recipe. Data only.

The names are those of YOLOv5's `hyp.*.yaml` files, in their order.
"""

GENES: dict[str, str] = {
    "lr0": "optimizer.lr0",
    "lrf": "schedule.lrf",
    "momentum": "optimizer.momentum",
    "weight_decay": "optimizer.weight_decay",
    "warmup_epochs": "schedule.warmup_epochs",
    "warmup_momentum": "schedule.warmup_momentum",
    "warmup_bias_lr": "schedule.warmup_bias_lr",
    "box": "loss.box",
    "cls": "loss.cls",
    "cls_pw": "loss.cls_pw",
    "obj": "loss.obj",
    "obj_pw": "loss.obj_pw",
    "anchor_t": "loss.anchor_t",
    "fl_gamma": "loss.fl_gamma",
    "label_smoothing": "loss.label_smoothing",
    "hsv_h": "augment.hsv_h",
    "hsv_s": "augment.hsv_s",
    "hsv_v": "augment.hsv_v",
    "degrees": "augment.degrees",
    "translate": "augment.translate",
    "scale": "augment.scale",
    "shear": "augment.shear",
    "perspective": "augment.perspective",
    "flipud": "augment.flipud",
    "fliplr": "augment.fliplr",
    "mosaic": "augment.mosaic",
    "mixup": "augment.mixup",
    "copy_paste": "augment.copy_paste",
}
"""Gene -> path in the recipe."""

LEGACY_GENES: dict[str, str] = {
    "iou_t": "YOLOv5's loss does not read it either",
    "anchors": "anchors come from the model file and from autoanchor",
}
"""Keys of YOLOv5's files that are accepted and ignored -> why; whoever reads such a file says so."""
