"""From written values to one configuration: what wins, and where each value came from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import (
    SourcedValue,
    config_fields,
    describe,
    read_config_file,
    resolve_config,
    sourced_by_keyword,
)

SCRATCH_LOW = """\
lr0: 0.01
lrf: 0.01
momentum: 0.937
weight_decay: 0.0005
warmup_epochs: 3.0
warmup_momentum: 0.8
warmup_bias_lr: 0.1
box: 0.05
cls: 0.5
cls_pw: 1.0
obj: 1.0
obj_pw: 1.0
iou_t: 0.20
anchor_t: 4.0
fl_gamma: 0.0
hsv_h: 0.015
hsv_s: 0.7
hsv_v: 0.4
degrees: 0.0
translate: 0.1
scale: 0.5
shear: 0.0
perspective: 0.0
flipud: 0.0
fliplr: 0.5
mosaic: 1.0
mixup: 0.0
copy_paste: 0.0
"""


def written(tmp_path: Path, content: str) -> str:
    path = tmp_path / "f.yaml"
    tmp_path.mkdir(exist_ok=True)
    path.write_text(content)
    return str(path)


def read(tmp_path: Path, content: str) -> RunConfig:
    return resolve_config(RunConfig, read_config_file(written(tmp_path, content)))[0]


def resolved(**values: Any) -> RunConfig:
    return resolve_config(RunConfig, {path: SourcedValue(value, "here") for path, value in values.items()})[0]


def test_nothing_written_is_the_defaults() -> None:
    config, origins = resolve_config(RunConfig, {})
    assert config == RunConfig()
    assert set(origins.values()) == {"default"}
    assert list(origins) == list(config_fields(RunConfig))


def test_a_field_can_be_written_nested_dotted_or_as_a_gene(tmp_path: Path) -> None:
    for number, content in enumerate((
        "optimizer: {lr0: 0.02}", "optimizer.lr0: 0.02", "lr0: 0.02", "recipe: {optimizer: {lr0: 0.02}}",
        "recipe.optimizer.lr0: 2e-2", "lr0: '0.02'", "optimizer:\n  lr0: .02\nloss:\n",
    )):
        recipe = read(tmp_path / str(number), content).recipe
        assert recipe == Recipe.model_validate({"optimizer": {"lr0": 0.02}}), content


def test_any_word_for_true_and_false_serves_a_switch(tmp_path: Path) -> None:
    words = {"yes": True, "no": False, "on": True, "off": False, "true": True, "False": False, "1": True}
    for word, value in words.items():
        assert read(tmp_path / word, f"rect: {word}").recipe.rect is value, word


def test_text_fields_keep_what_was_written(tmp_path: Path) -> None:
    for name in ("7", "007", "1e3", "no", "true", "12.50"):
        assert read(tmp_path / name, f"name: {name}").placement.name == name, name


def test_freeze_takes_a_number_or_a_list(tmp_path: Path) -> None:
    for asked, layers in {"3": (0, 1, 2), "'3'": (0, 1, 2), "[0, 2]": (0, 2), "[3]": (3,), "[]": ()}.items():
        assert read(tmp_path / asked, f"freeze: {asked}").recipe.freeze == layers, asked


def test_workers_are_a_number_or_a_range(tmp_path: Path) -> None:
    for asked, workers in {"4": 4, "2-8": (2, 8), "[2, 8]": (2, 8), "0": 0}.items():
        assert read(tmp_path / asked, f"num_workers: {asked}").placement.num_workers == workers, asked


def test_null_leaves_open_what_may_be_left_open(tmp_path: Path) -> None:
    assert read(tmp_path, "batch_size: null\nmicrobatch:\n").recipe == Recipe()


def test_yolov5s_own_file_of_defaults_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, SCRATCH_LOW).recipe == Recipe()
    path = tmp_path / "f.yaml"
    assert caplog.messages == [f"{path}:13: iou_t is ignored: YOLOv5's loss does not read it either"]


def test_each_value_knows_where_it_came_from(tmp_path: Path) -> None:
    path = written(tmp_path, "lr0: 0.02\nloss:\n  box: 0.1\n  cls: 0.4\n")
    given = read_config_file(path) | {
        "loss.cls": SourcedValue("0.3", "--set loss.cls"),
        "epochs": SourcedValue("5", "--epochs"),
    }
    config, origins = resolve_config(RunConfig, given)
    assert {path: origin for path, origin in origins.items() if origin != "default"} == {
        "optimizer.lr0": f"{path}:1", "loss.box": f"{path}:3", "loss.cls": "--set loss.cls", "epochs": "--epochs"}
    assert (config.recipe.loss.cls, config.recipe.loss.box, config.recipe.epochs) == (0.3, 0.1, 5)


def test_keywords_of_a_python_call_are_read_as_a_files_keys() -> None:
    given = sourced_by_keyword({"epochs": 3, "lr0": 0.02, "loss": {"box": 0.1}, "augment": {}})
    assert given == {"epochs": SourcedValue(3, "epochs=", alone=True),
                     "optimizer.lr0": SourcedValue(0.02, "lr0=", alone=True),
                     "loss.box": SourcedValue(0.1, "loss.box=", alone=True)}


def test_values_of_python_callers_are_read_the_same_way() -> None:
    assert resolved(epochs=3, freeze=2, num_workers=(1, 2)) == resolved(epochs="3", freeze="2", num_workers="1-2")


def test_a_description_shows_origins_and_hides_passwords() -> None:
    lines = describe(
        *resolve_config(
            RunConfig,
            {
                "epochs": SourcedValue("5", "--epochs"),
                "mlflow_uri": SourcedValue("http://me:canary@host", "hyp.yaml:3"),
            },
        )
    ).splitlines()
    assert "epochs: 5                                 # --epochs" in lines
    assert "mlflow_uri: http://***@host               # hyp.yaml:3" in lines
    assert "optimizer.lr0: 0.01                       # default" in lines
    assert len(lines) == len(config_fields(RunConfig))


def test_a_description_with_masks_is_yaml(tmp_path: Path) -> None:
    """A mask at the beginning of a value would be an alias in YAML."""
    token = "hf_abcdefghijklmnopqrstuvwxyz0123456789"
    given = {"mlflow_uri": SourcedValue(token, "--mlflow-uri"), "data": SourcedValue("d.yaml", "--data")}
    file = tmp_path / "all.yaml"
    file.write_text(describe(*resolve_config(RunConfig, given)))
    assert token not in file.read_text()
    assert read_config_file(file)["mlflow_uri"].value == "***"
