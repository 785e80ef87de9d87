"""Flags: names, meaning and precedence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_yolo.cli import (
    COMPARE,
    EXPORT,
    PREDICT,
    REPLAY,
    TRAIN,
    VAL,
    parse_compare,
    parse_export,
    parse_predict,
    parse_replay,
    parse_train,
    parse_val,
)
from ray_yolo.config.commands import ExportConfig, PredictConfig, ValConfig
from ray_yolo.config.flags import ALIASES, OPTIONS, SEVERAL, Command, build_parser, has_recipe
from ray_yolo.config.settings import config_fields
from ray_yolo.core.errors import InputError
from tests.support.messages.config import FLAGS

TRAIN_FLAGS = frozenset([
    "--data", "--model", "--cfg", "--weights", "--epochs", "--batch-size", "--batch", "--microbatch", "--imgsz",
    "--img", "--img-size", "--seed", "--precision", "--no-tf32", "--sync-bn", "--exact", "--threads", "--patience",
    "--norm-kernels", "--freeze", "--changes",
    "--single-cls", "--classes", "--fraction", "--multi-scale", "--rect", "--quad", "--image-weights",
    "--noautoanchor", "--noval", "--notest",
    "--strict", "--allow-empty", "--allow-names", "--match-classes", "--from", "--labels-with-confidence",
    "--keep-difficult", "--keep-repeats",
    "--optimizer", "--cos-lr", "--label-smoothing", "--num-workers", "--gpus-per-worker",
    "--cpus-per-worker", "--placement-strategy", "--accelerator-type", "--address", "--workers", "--cache",
    "--cache-images", "--project", "--name", "--exist-ok", "--storage-path", "--resume", "--mlflow-uri",
    "--priority", "--max-failures", "--wait-for-resources", "--save-period", "--save-steps", "--save-seconds",
    "--keep-checkpoints", "--nosave", "--noplots", "--timeout-seconds",
    "--stall-seconds", "--cuda-graphs", "--colour-kernel", "--stop-after", "--max-hours", "--hours", "--register",
    "--registered-name", "--trackers", "--callbacks", "--bucket", "--evolve",
    "--resume_evolve", "--evolve_population", "--local_rank", "--entity",
    "--upload_dataset", "--bbox_interval", "--artifact_alias", "--config", "--hyp", "--recipe", "--set",
    "--dry-run", "--device",
    "--version", "--help",
    "--json",
])

VAL_FLAGS = frozenset([
    "--weights", "--data", "--split", "--task", "--imgsz", "--img", "--img-size", "--precision", "--single-cls",
    "--allow-empty", "--allow-names", "--labels-with-confidence", "--keep-difficult",
    "--coco", "--batch-size", "--batch", "--conf", "--conf-thres", "--iou-thres", "--iou", "--max-det",
    "--classes", "--augment", "--save-hybrid", "--verbose", "--dnn",
    "--save-txt", "--save-conf", "--save-json", "--worst", "--num-workers",
    "--gpus-per-worker", "--cpus-per-worker",
    "--address", "--workers", "--project", "--name", "--exist-ok", "--storage-path", "--noplots", "--half", "--config",
    "--mlflow-uri", "--hyp", "--set", "--dry-run", "--device", "--version", "--help",
    "--json",
])

PREDICT_FLAGS = frozenset([
    "--weights", "--source", "--imgsz", "--img", "--img-size", "--confidence", "--conf", "--conf-thres", "--iou",
    "--iou-thres",
    "--max-detections", "--max-det", "--agnostic-nms", "--classes", "--precision", "--save-txt", "--save-conf",
    "--save-json", "--save-csv", "--save-crop", "--square", "--batch-size", "--batch", "--vid-stride", "--hide-labels",
    "--hide-conf", "--line-thickness", "--nosave", "--num-workers", "--gpus-per-worker", "--cpus-per-worker",
    "--address", "--project", "--name", "--exist-ok", "--storage-path", "--half", "--data", "--view-img", "--augment",
    "--visualize", "--update", "--dnn", "--config", "--hyp", "--set", "--dry-run", "--device", "--version", "--help",
    "--json",
])

EXPORT_FLAGS = frozenset([
    "--weights", "--project", "--format", "--include", "--imgsz", "--img", "--img-size", "--batch-size", "--batch",
    "--dynamic", "--nms", "--opset", "--confidence", "--conf", "--conf-thres", "--iou", "--iou-thres",
    "--max-detections", "--max-det",
    "--agnostic-nms", "--data", "--half", "--int8", "--simplify", "--config", "--hyp", "--set", "--dry-run", "--device",
    "--version", "--help",
])

REPLAY_FLAGS = frozenset([
    "--step", "--around", "--data", "--gpus-per-worker", "--workers", "--project", "--name", "--exist-ok",
    "--storage-path", "--noplots", "--config", "--hyp", "--set", "--dry-run", "--device", "--version", "--help",
])

COMPARE_FLAGS = TRAIN_FLAGS - frozenset([  # all that may be given for both sides
    "--resume", "--stop-after", "--max-hours", "--register", "--registered-name", "--from", "--bucket", "--evolve",
    "--resume_evolve", "--evolve_population", "--local_rank", "--entity", "--upload_dataset", "--bbox_interval",
    "--artifact_alias",
]) | frozenset(["--set-a", "--set-b", "--pairs", "--hours", "--workers-per-training"])

COMMANDS: list[Command[Any]] = [TRAIN, VAL, PREDICT, EXPORT, REPLAY, COMPARE]


def origins_of(argv: list[str]) -> dict[str, str]:
    return {path: origin for path, origin in parse_train(argv).origins.items() if origin != "default"}


def test_the_flags_are_these() -> None:
    assert set(TRAIN.flags) == TRAIN_FLAGS
    assert set(VAL.flags) == VAL_FLAGS
    assert set(PREDICT.flags) == PREDICT_FLAGS
    assert set(EXPORT.flags) == EXPORT_FLAGS
    assert set(REPLAY.flags) == REPLAY_FLAGS
    assert set(COMPARE.flags) == COMPARE_FLAGS


def test_an_argument_is_the_word_without_a_flag() -> None:
    for words in (["runs/exp", "--step", "3"], ["--step", "3", "runs/exp"]):
        parsed = parse_replay(words)
        assert (parsed.config.run, parsed.config.step) == ("runs/exp", 3)
        assert parsed.origins["run"] == "RUN"


def test_two_arguments_may_stand_anywhere_among_the_flags() -> None:
    for words in (["base", "lr0=0.1", "--pairs", "4"], ["base", "--pairs", "4", "lr0=0.1"],
                  ["--pairs", "4", "base", "lr0=0.1"]):
        pairs = parse_compare(words).config.comparison
        assert (pairs.a, pairs.b, pairs.pairs, pairs.set_a) == ("base", "lr0=0.1", 4, ())
    assert parse_compare(["base", "base", "--set-b", "lr0=0.1", "box=0.1"]).config.comparison.set_b == (
        "lr0=0.1", "box=0.1")
    assert parse_compare(["base", "base", "--set-b", "lr0=0.1"]).config.comparison.set_b == ("lr0=0.1",)


def test_every_flag_names_a_field_and_the_parser_knows_no_other() -> None:
    for command in COMMANDS:
        fields = config_fields(command.model)
        parser_knows = set(build_parser(command)._option_string_actions) - {"-h"}
        assert parser_knows == set(command.flags), command.prog
        others = {path for path in command.flags.values() if path not in fields}
        named = {"--recipe"} if has_recipe(command.model) else set()
        named |= {"--from"} if command.inherit else set()
        named |= {"--json"} if command.has_json else set()
        assert others == {*OPTIONS, *command.unsupported, *named}, command.prog


def test_help_explains_every_field_that_can_be_given() -> None:
    for command in COMMANDS:
        text = " ".join(build_parser(command).format_help().split())
        for path, field in config_fields(command.model).items():
            if "." in path or path in command.paths:
                assert " ".join((field.info.description or "").split()) in text, (command.prog, path)


def test_every_alias_is_of_a_field_that_some_command_has() -> None:
    assert set(ALIASES) <= {path for command in COMMANDS for path in command.paths}
    assert set(SEVERAL) <= {*TRAIN.paths, *PREDICT.paths, *COMPARE.paths}


@pytest.mark.parametrize(("yolov5", "ours"), [
    ("--img 320", "--imgsz 320"), ("--img-size 320 320", "--imgsz 320"), ("--imgsz 320 320", "--imgsz 320"),
    ("--batch 8", "--batch-size 8"), ("--cfg yolov5n", "--model yolov5n"), ("--notest", "--noval"),
    ("--cache-images", "--cache ram"), ("--cache", "--cache ram"), ("--cache-images disk", "--cache disk"),
    ("--resume", "--resume auto"), ("--noautoanchor", "--set autoanchor=false"), ("--cos-lr", "--set cos_lr=yes"),
    ("--optimizer AdamW", "--set optimizer.name=AdamW"), ("--sync-bn", "--set sync_bn=true"),
    ("--label-smoothing 0.1", "--set loss.label_smoothing=0.1"), ("--device cpu", "--gpus-per-worker 0"),
    ("--device 0", "--num-workers 0 --gpus-per-worker 1"),
    ("--device=", ""), ("--freeze 10", "--freeze 0 1 2 3 4 5 6 7 8 9"), ("--freeze 2", "--set freeze=2"),
    ("--exist-ok --nosave --rect", "--set exist_ok=1 --set nosave=on --set rect=true"),
    ("--batch-size 8", "--set batch_size=8"), ("--set lr0=0.02", "--set optimizer.lr0=0.02"),
    ("--set batch_size=null", ""), ("--multi-scale --single-cls", "--set multi_scale=t --set single_cls=True"),
])
def test_yolov5s_spelling_means_ours(yolov5: str, ours: str) -> None:
    ours = ours.replace("cos_lr", "schedule.cos_lr")
    assert parse_train(yolov5.split()).config == parse_train(ours.split()).config


@pytest.mark.parametrize(("yolov5", "changes"), [
    ("--conf-thres 0.1", {"evaluate": {"confidence": 0.1}}), ("--iou-thres 0.5", {"evaluate": {"iou": 0.5}}),
    ("--max-det 9", {"evaluate": {"max_detections": 9}}), ("--batch 4", {"evaluate": {"batch_size": 4}}),
    ("--task test", {"split": "test"}), ("--half", {"precision": "fp16"}), ("--img 320", {"imgsz": 320}),
    ("--device cpu --name x", {"placement": {"gpus_per_worker": 0, "name": "x"}}),
])
def test_validation_has_yolov5s_spellings(yolov5: str, changes: dict[str, Any]) -> None:
    config = parse_val(["--weights", "w.pt", *yolov5.split()]).config
    assert config == ValConfig.model_validate({"weights": "w.pt", **changes})


@pytest.mark.parametrize(("yolov5", "changes"), [
    ("--conf-thres 0.1 --iou-thres 0.5", {"confidence": 0.1, "iou": 0.5}), ("--max-det 9", {"max_detections": 9}),
    ("--classes 0", {"classes": (0,)}), ("--classes 0 2", {"classes": (0, 2)}), ("--half", {"precision": "fp16"}),
    ("--img 320 --save-txt --save-conf", {"imgsz": 320, "save_txt": True, "save_conf": True}),
    ("--agnostic-nms --nosave", {"agnostic_nms": True, "placement": {"nosave": True}}),
    ("--device cpu", {"placement": {"gpus_per_worker": 0}}),
])
def test_prediction_has_yolov5s_spellings(yolov5: str, changes: dict[str, Any]) -> None:
    config = parse_predict(["--weights", "w.pt", "--source", "s", *yolov5.split()]).config
    assert config == PredictConfig.model_validate({"weights": "w.pt", "source": "s", **changes})


@pytest.mark.parametrize(("yolov5", "changes"), [
    ("--include torchscript", {"format": "torchscript"}), ("--batch 4 --dynamic", {"batch_size": 4, "dynamic": True}),
    ("--nms --iou-thres 0.5", {"nms": True, "iou": 0.5}), ("--device cpu", {}),
])
def test_export_has_yolov5s_spellings(yolov5: str, changes: dict[str, Any]) -> None:
    config = parse_export(["--weights", "w.pt", *yolov5.split()]).config
    assert config == ExportConfig.model_validate({"weights": "w.pt", **changes})


def test_validation_runs_in_this_process_unless_asked_otherwise() -> None:
    placement = parse_val(["--weights", "w.pt", "--name", "x"]).config.placement
    assert (placement.num_workers, placement.project) == (0, "runs/val")


def test_later_sources_win_and_each_value_knows_its_own(tmp_path: Path) -> None:
    config, hyp = tmp_path / "c.yaml", tmp_path / "h.yaml"
    config.write_text("epochs: 1\nseed: 1\nlr0: 0.1\nimgsz: 64\nproject: c\npatience: 1\n")
    hyp.write_text("seed: 2\nlr0: 0.2\nimgsz: 96\npatience: 2\n")
    argv = ["--set", "imgsz=160", "--img", "128", "--set", "lr0=0.3", "--hyp", str(hyp), "--config", str(config),
            "--seed", "3"]
    parsed = parse_train(argv)
    recipe = parsed.config.recipe
    assert (recipe.epochs, recipe.seed, recipe.optimizer.lr0, recipe.imgsz, recipe.patience) == (1, 3, 0.3, 160, 2)
    assert origins_of(argv) == {"epochs": f"{config}:1", "seed": "--seed", "optimizer.lr0": "--set lr0",
                                "imgsz": "--set imgsz", "project": f"{config}:5", "patience": f"{hyp}:4"}


@pytest.mark.parametrize(("argv", "origin"), [
    ("--img 64", {"imgsz": "--img"}), ("--cache", {"cache": "--cache"}), ("--device cpu",
     {"gpus_per_worker": "--device cpu"}), ("--noautoanchor", {"autoanchor": "--noautoanchor"}), ("", {}),
    ("--epochs 3 --epochs=4", {"epochs": "--epochs"}),
])
def test_an_origin_is_the_flag_as_it_was_spelled(argv: str, origin: dict[str, str]) -> None:
    assert origins_of(argv.split()) == origin


def test_a_dry_run_is_asked_for_by_flag() -> None:
    assert parse_train(["--dry-run"]).dry_run
    assert not parse_train([]).dry_run


def test_a_flag_that_is_given_again_overrides_the_first_one() -> None:
    """As where a script appends its own arguments to others; equal values contradict nothing."""
    assert parse_train(["--epochs", "3", "--epochs", "5"]).config.recipe.epochs == 5
    assert parse_train(["--batch", "4", "--batch-size", "4"]).config.recipe.batch_size == 4


def test_a_list_that_is_given_again_becomes_longer() -> None:
    parsed = parse_train(["--classes", "0", "--classes", "1", "2", "--changes", "1: lr0=0.005", "--changes",
                          "2: mosaic=0.5"]).config.recipe
    assert parsed.classes == (0, 1, 2)
    assert [change.epoch for change in parsed.changes] == [1, 2]
    parsed_pairs = parse_compare(["base", "base", "--set-a", "lr0=0.1", "--set-b", "lr0=0.1", "--set-b", "box=0.1"])
    assert parsed_pairs.config.comparison.set_a == ("lr0=0.1",)
    assert parsed_pairs.config.comparison.set_b == ("lr0=0.1", "box=0.1")
    assert parse_train(["--freeze", "10", "--freeze", "2"]).config.recipe.freeze == (0, 1)


def test_the_same_file_or_setting_may_be_given_again(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("epochs: 3\n")
    config = ["--config", str(tmp_path / "c.yaml")]
    assert parse_train([*config, *config]).config.recipe.epochs == 3
    assert parse_train(["--set", "lr0=0.1", "--set", "lr0=0.2"]).config.recipe.optimizer.lr0 == 0.2


def test_every_refused_flag_is_in_the_table() -> None:
    assert set(TRAIN.unsupported) <= {argv.replace("=", " ").split()[0] for argv in FLAGS}


@pytest.mark.parametrize(("words", "model", "origin"), [
    (["--weights", "yolov5m.pt"], "yolov5m", "--weights"),
    (["--weights", "/nets/yolo11s.safetensors"], "yolo11s", "--weights"),
    (["--weights", "s3://nets/yolov8n.pt"], "yolov8n", "--weights"),
    (["--weights", "yolov5m.pt", "--model", "yolov5l"], "yolov5l", "--model"),
    (["--weights", "best.pt"], "yolov5s", "default"),
    (["--weights", "yolov5m-mine.pt"], "yolov5s", "default"),
    (["--weights", ""], "yolov5s", "default"),
])
def test_a_file_of_weights_that_has_the_name_of_a_model_chooses_it(words: list[str], model: str, origin: str) -> None:
    parsed = parse_train(["--data", "d.yaml", *words])
    assert parsed.config.recipe.model == model
    assert parsed.origins["model"] == origin


def test_the_named_recipe_is_that_of_the_chosen_model() -> None:
    named, given = (parse_train(["--data", "d.yaml", "--recipe", "scratch-low", *words]).config.recipe
                    for words in (["--weights", "yolov8n.pt"], ["--weights", "yolov8n.pt", "--model", "yolov8n"]))
    assert named == given


def test_a_model_in_a_file_of_settings_is_given(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text("model: yolov5l\nweights: yolov5m.pt\n")
    assert parse_train(["--config", str(tmp_path / "all.yaml")]).config.recipe.model == "yolov5l"


@pytest.mark.parametrize(("model", "gain", "default"), [
    ("yolov8n", 0.05, 7.5), ("yolov5n", 7.5, 0.05), ("yolov8n", 3.0, None), ("yolov5n", 0.02, None)])
def test_a_box_gain_of_another_loss_is_a_warning(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, model: str, gain: float, default: float | None) -> None:
    """YOLOv5's hyp files have that of models with anchors."""
    (tmp_path / "hyp.yaml").write_text(f"lr0: 0.01\nbox: {gain}\n")
    recipe = parse_train(["--data", "d.yaml", "--model", model, "--hyp", str(tmp_path / "hyp.yaml")]).config.recipe
    assert recipe.loss.box == gain
    expected = [f"hyp.yaml:2: loss.box {gain:g} is a gain for the loss of other models; the default of {model} is "
                f"{default}. Leave the loss gains out of the file, or take --recipe"] if default else []
    assert [message.rpartition("/")[2] for message in caplog.messages] == expected


@pytest.mark.parametrize(("text", "layers", "is_warned_of"), [
    ("freeze: [10]", (10,), True), ("freeze: [0]", (0,), True), ("freeze: 10", tuple(range(10)), False),
    ("freeze: [0, 1]", (0, 1), False), ("freeze: []", (), False)])
def test_a_list_of_one_frozen_layer_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str,
                                                 layers: tuple[int, ...], is_warned_of: bool) -> None:
    """YOLOv5's opt.yaml has [10] for the first ten layers, and [0] for none."""
    (tmp_path / "opt.yaml").write_text(text)
    recipe = parse_train(["--data", "d.yaml", "--config", str(tmp_path / "opt.yaml")]).config.recipe
    assert recipe.freeze == layers
    assert [f"opt.yaml:1: {text} freezes layer" in message for message in caplog.messages] == [True] * is_warned_of


def test_no_file_runs_code(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text("epochs: 3\nproject: elsewhere\n")
    assert parse_train(["--config", str(tmp_path / "all.yaml")]).config.placement.project == "elsewhere"
    (tmp_path / "all.yaml").write_text("epochs: 3\ncallbacks: evil.py\n")
    with pytest.raises(InputError):
        parse_train(["--config", str(tmp_path / "all.yaml")])
    assert parse_train(["--callbacks", "mine.py"]).config.placement.callbacks == "mine.py"
