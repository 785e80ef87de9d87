"""The configuration as flat paths: every leaf once, in the words that users are told."""

from __future__ import annotations

import functools

import pytest

from ray_yolo.config.commands import ValConfig
from ray_yolo.config.fields import canonical, config_fields, explain_unknown
from ray_yolo.config.hyp import GENES
from ray_yolo.config.placement import RunConfig

FIELDS = config_fields(RunConfig)


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


@pytest.mark.parametrize(("path", "words"), [
    ("epochs", "a whole number >= 1"),
    ("batch_size", "a whole number >= -1 and <= 131072"),
    ("optimizer.lr0", "a number >= 1e-06 and <= 1.0"),
    ("optimizer.name", "one of SGD, Adam, AdamW"),
    ("seed", "a whole number >= 0 and < 4294967296"),
    ("sync_bn", "true or false"),
    ("project", "text"),
    ("gpus_per_worker", "a number or auto"),
    ("num_workers", "Ray workers: a number, a range 'low-high' (elastic), or 0 to train in this process without Ray"),
])
def test_what_is_expected_is_said_in_words(path: str, words: str) -> None:
    assert FIELDS[path].expected == words


def test_a_step_is_part_of_what_is_expected() -> None:
    assert config_fields(ValConfig)["imgsz"].expected == "a whole number >= 64 and multiple of 32"


def test_every_gene_names_a_field() -> None:
    assert {gene: path for gene, path in GENES.items() if path not in FIELDS} == {}
    assert not set(GENES) & set(FIELDS)


@pytest.mark.parametrize(("key", "path"), [
    ("lr0", "optimizer.lr0"), ("optimizer.lr0", "optimizer.lr0"), ("recipe.epochs", "epochs"),
    ("placement.num_workers", "num_workers"), ("anything", "anything"),
])
def test_users_keys_stand_for_paths(key: str, path: str) -> None:
    assert canonical(key) == path


@pytest.mark.parametrize(("key", "message"), [
    ("epoch", "unknown setting 'epoch'; did you mean epochs?"),
    ("optimiser.lr0", "unknown setting 'optimiser.lr0'; did you mean optimizer.lr0?"),
    ("confidence", "unknown setting 'confidence'; did you mean evaluate.confidence?"),
    ("loss.lr0", "unknown setting 'loss.lr0'; did you mean optimizer.lr0?"),
    ("epochs.x", "unknown setting 'epochs.x'; did you mean epochs?"),
    ("zzzzzz", "unknown setting 'zzzzzz'"),
    ("", "unknown setting ''"),
    ("evaluate", "'evaluate' is a section; give one of its fields: evaluate.confidence, evaluate.iou, "
                 "evaluate.max_detections, evaluate.batch_size"),
])
def test_an_unknown_key_is_answered_with_the_nearest(key: str, message: str) -> None:
    assert explain_unknown(key, FIELDS) == message
