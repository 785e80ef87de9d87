"""From written values to one configuration: what wins, where each value came from, and what is refused."""

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
from ray_yolo.core.errors import ConfigError

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


REFUSED = {
    "lr0: abc": "1: optimizer.lr0: got 'abc'; expected a number >= 1e-06 and <= 1.0",
    "lr0: .nan": "1: optimizer.lr0: got '.nan'; expected a number >= 1e-06 and <= 1.0",
    "lr0: nan": "1: optimizer.lr0: got 'nan'; expected a number >= 1e-06 and <= 1.0",
    "lr0: 1e999": "1: optimizer.lr0: got '1e999'; expected a number >= 1e-06 and <= 1.0",
    "lr0: [0.1, 0.2]": "1: optimizer.lr0: got ['0.1', '0.2']; expected a number >= 1e-06 and <= 1.0",
    "lr0:": "1: optimizer.lr0: got nothing; expected a number >= 1e-06 and <= 1.0",
    "\nepochs: 0": "2: epochs: got '0'; expected a whole number >= 1",
    "epochs: 1.5": "1: epochs: got '1.5'; expected a whole number >= 1",
    "epochs: yes": "1: epochs: got 'yes'; expected a whole number >= 1",
    f"epochs: {'9' * 5000}": "1: epochs: got '999999999999...9999999999999'; expected a whole number >= 1",
    "imgsz: 100": "1: imgsz: got '100': must be a multiple of 32, at least 64; nearest: 96 or 128",
    "rect: maybe": "1: rect: got 'maybe'; expected true or false",
    "cache: no": "1: cache: got 'no'; expected one of auto, none, ram, disk",
    "gpus_per_worker: some": "1: gpus_per_worker: got 'some'; expected a number >= 0 or auto",
    "gpus_per_worker: -1": "1: gpus_per_worker: got '-1'; expected a number >= 0 or auto",
    "num_workers: 8-2": "1: num_workers: got '8-2': must be 0 (no Ray), a number up to 4096, a range such as 2-8, "
                        "or auto",
    "num_workers: many": "1: num_workers: got 'many'; expected Ray workers: a number, a range 'low-high' (elastic), "
                         "0 to train in this process without Ray, or auto: one per GPU of the requested cluster, or "
                         "per node without GPUs; without a cluster one per local GPU, 0 for at most one",
    "name:": "1: name: got nothing; expected text",
    "name: a/b": "1: name: got 'a/b': a name is up to 63 letters, digits, '.', '_' or '-', starting with a letter "
                 "or digit; folders go into --project",
    "batch_size: 10\nexact: no\nmicrobatch: 4":
        "1, {path}:3: microbatch 4 does not divide batch_size 10; legal: 1, 2, 5, 10",
    "{batch_size: 10, microbatch: 4}": "1: microbatch 4 does not divide batch_size 10; legal: 1, 2, 5, 10",
    "batch_size: -2": "1: batch_size: got '-2'; expected a whole number >= -1 and <= 131072",
    "batch_size: 0": "1: batch_size: got '0': must be 1 or more, or -1 for as many as fit into the workers' memory",
    "brilliance: 0.05": "1: unknown setting 'brilliance'",
    "optimizer:\n  lr: 0.1": "2: unknown setting 'optimizer.lr'; did you mean optimizer.lr0?",
    "optimizer: SGD": "1: 'optimizer' is a section; give one of its fields: optimizer.name, optimizer.lr0, "
                      "optimizer.momentum, optimizer.weight_decay, optimizer.nominal_batch, optimizer.backbone_lr, "
                      "optimizer.clip_norm",
    "lr0: 1\noptimizer: {lr0: 2}": "2: optimizer.lr0 is given twice, first at {path}:1",
}


@pytest.mark.parametrize("content", REFUSED)
def test_a_bad_value_is_one_line_with_its_place_and_what_was_expected(tmp_path: Path, content: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        resolve_config(RunConfig, read_config_file(path))
    assert str(caught.value) == f"{path}:" + REFUSED[content].replace("{path}", path)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, "epoch: 3\nimgsz: 100\nlr0: 7\n")
    with pytest.raises(ConfigError) as caught:
        resolve_config(RunConfig, read_config_file(path) | {"seed": SourcedValue("x", "--seed")})
    assert str(caught.value).splitlines() == [
        f"{path}:1: unknown setting 'epoch'; did you mean epochs?",
        f"{path}:2: imgsz: got '100': must be a multiple of 32, at least 64; nearest: 96 or 128",
        "--seed: got 'x'; expected a whole number >= 0 and < 4294967296",
        f"{path}:3: optimizer.lr0: got '7'; expected a number >= 1e-06 and <= 1.0",
    ]


def test_keywords_of_a_python_call_are_read_as_a_files_keys() -> None:
    given = sourced_by_keyword({"epochs": 3, "lr0": 0.02, "loss": {"box": 0.1}, "augment": {}})
    assert given == {"epochs": SourcedValue(3, "epochs=", alone=True),
                     "optimizer.lr0": SourcedValue(0.02, "lr0=", alone=True),
                     "loss.box": SourcedValue(0.1, "loss.box=", alone=True)}
    with pytest.raises(ConfigError) as caught:
        resolve_config(RunConfig, sourced_by_keyword({"epochs": 0, "lr0": "x"}))
    assert str(caught.value).splitlines() == [
        "epochs=: got 0; expected a whole number >= 1",
        "lr0=: optimizer.lr0: got 'x'; expected a number >= 1e-06 and <= 1.0",
    ]


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
