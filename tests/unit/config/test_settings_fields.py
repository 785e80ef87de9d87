"""The configuration as flat paths: every leaf once, in the words that users read."""

from __future__ import annotations

import functools

import pytest

from ray_yolo.config.commands import ValConfig
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import GENES, LEGACY_GENES, canonical, config_fields

FIELDS = config_fields(RunConfig)

# The genes of YOLOv5's hyp.*.yaml, from the specification.
YOLOV5 = {
    "lr0", "lrf", "momentum", "weight_decay", "warmup_epochs", "warmup_momentum", "warmup_bias_lr", "box", "cls",
    "cls_pw", "obj", "obj_pw", "iou_t", "anchor_t", "anchors", "fl_gamma", "hsv_h", "hsv_s", "hsv_v", "degrees",
    "translate", "scale", "shear", "perspective", "flipud", "fliplr", "mosaic", "mixup", "copy_paste",
}


def leaves(tree: dict[str, object]) -> int:
    return sum(leaves(value) if isinstance(value, dict) else 1 for value in tree.values())


@pytest.mark.parametrize("config", [RunConfig(), ValConfig(weights="w.pt")])
def test_every_leaf_of_the_tree_has_one_path(config: RunConfig | ValConfig) -> None:
    fields = config_fields(type(config))
    assert len(fields) == leaves(config.model_dump())
    for field in fields.values():
        functools.reduce(getattr, field.keys, config)


def test_every_leaf_says_what_it_is() -> None:
    for path, field in (FIELDS | config_fields(ValConfig)).items():
        assert field.info.description, path
        assert field.info.description.endswith("."), path


def test_paths_leave_out_recipe_and_placement() -> None:
    assert FIELDS["optimizer.lr0"].keys == ("recipe", "optimizer", "lr0")
    assert FIELDS["num_workers"].keys == ("placement", "num_workers")


def test_every_gene_names_a_field() -> None:
    assert {gene: path for gene, path in GENES.items() if path not in FIELDS} == {}
    assert not set(GENES) & set(FIELDS)


def test_users_keys_stand_for_paths() -> None:
    for key, path in [
        ("lr0", "optimizer.lr0"), ("optimizer.lr0", "optimizer.lr0"), ("recipe.epochs", "epochs"),
        ("placement.num_workers", "num_workers"), ("anything", "anything"),
    ]:
        assert canonical(key) == path, key


def test_every_gene_is_a_number_of_the_recipe() -> None:
    tree = Recipe().model_dump(mode="json")
    for path in GENES.values():
        section, name = path.split(".")
        assert isinstance(tree[section][name], (int, float)), path


def test_every_key_of_a_yolov5_file_is_known() -> None:
    assert GENES.keys() | LEGACY_GENES.keys() >= YOLOV5


def test_no_two_genes_share_a_place() -> None:
    assert len(set(GENES.values())) == len(GENES)


def test_defaults_are_yolov5_scratch_low() -> None:
    low = {"lr0": 0.01, "lrf": 0.01, "momentum": 0.937, "box": 0.05, "obj": 1.0, "cls": 0.5, "hsv_h": 0.015}
    tree = Recipe().model_dump(mode="json")
    values = {gene: tree[GENES[gene].split(".")[0]][GENES[gene].split(".")[1]] for gene in low}
    assert values == low
