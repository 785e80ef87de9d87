from ray_yolo.config.hyp import GENES, LEGACY_GENES
from ray_yolo.config.recipe import Recipe

# The genes of YOLOv5's hyp.*.yaml, from the specification.
YOLOV5 = {
    "lr0", "lrf", "momentum", "weight_decay", "warmup_epochs", "warmup_momentum", "warmup_bias_lr", "box", "cls",
    "cls_pw", "obj", "obj_pw", "iou_t", "anchor_t", "anchors", "fl_gamma", "hsv_h", "hsv_s", "hsv_v", "degrees",
    "translate", "scale", "shear", "perspective", "flipud", "fliplr", "mosaic", "mixup", "copy_paste",
}


def test_every_gene_is_a_number_of_the_recipe():
    tree = Recipe().model_dump(mode="json")
    for path in GENES.values():
        section, name = path.split(".")
        assert isinstance(tree[section][name], (int, float)), path


def test_every_key_of_a_yolov5_file_is_known():
    assert GENES.keys() | LEGACY_GENES.keys() >= YOLOV5


def test_no_two_genes_share_a_place():
    assert len(set(GENES.values())) == len(GENES)


def test_defaults_are_yolov5_scratch_low():
    low = {"lr0": 0.01, "lrf": 0.01, "momentum": 0.937, "box": 0.05, "obj": 1.0, "cls": 0.5, "hsv_h": 0.015}
    tree = Recipe().model_dump(mode="json")
    values = {gene: tree[GENES[gene].split(".")[0]][GENES[gene].split(".")[1]] for gene in low}
    assert values == low
