"""Settings without effect: which are reported, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_yolo.cli import EXPORT, PREDICT, TRAIN, VAL
from ray_yolo.config.effects import (
    UNKNOWN,
    Surroundings,
    command_without_effect,
    describe_unused,
    given_settings,
    placement_without_effect,
    refuse_unread_loss,
    without_effect,
)
from ray_yolo.config.flags import Command, parse
from ray_yolo.config.model_facts import MODELS
from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.models.families import FAMILY_OF, build_model


def reported(words: str, around: Surroundings = UNKNOWN) -> list[str]:
    recipe = parse(TRAIN, words.split()).config.recipe
    return describe_unused(given_settings(recipe), without_effect(recipe, around))


@pytest.mark.parametrize(("words", "lines"), [
    ("--model yolov8n", []),
    ("--model yolov5n --label-smoothing 0.1", []),
    ("--model yolov8n --label-smoothing 0", []),
    ("--model yolov8n --label-smoothing 0.1", ["loss.label_smoothing (the loss of yolov8n does not read it)"]),
    ("--model yolov8n --noautoanchor", ["autoanchor (yolov8n has no anchors)"]),
    ("--model yolo26n --set evaluate.iou=0.7", ["evaluate.iou (detections of yolo26n need no suppression)"]),
    ("--set mosaic=0 --set mixup=0.1 --set copy_paste=0.1",
     ["augment.copy_paste, augment.mixup (no sample is a mosaic, because augment.mosaic is 0)"]),
    ("--set mosaic=0 --set mixup=0", []),
    ("--model yolov8n --rect", []),
    ("--noval --patience 5", ["patience (under noval, there is no validation before the last epoch)"]),
    ("--set mosaic=0 --set mixup=0.1 --changes 5:mosaic=1", []),
    ("--set augment.render=device", []),
    ("--set augment.render=device --quad --batch-size 8",
     ["augment.render (the loaders render, because quad needs pixels there)"]),
    ("--set augment.render=device --set mixup=0.1",
     ["augment.render (the loaders render, because augment.mixup needs pixels there)"]),
    ("--set augment.render=device --set copy_paste=0.1",
     ["augment.render (the loaders render, because augment.copy_paste needs pixels there)"]),
    ("--set augment.render=device --set perspective=0.001",
     ["augment.render (the loaders render, because augment.perspective needs pixels there)"]),
    ("--set augment.render=device --set mixup=0.1 --changes 5:mixup=0", []),
    ("--rect --changes 5:mixup=0.5", ["augment.mixup (rectangular batches have no mosaics)"]),
])
def test_given_settings_without_effect_are_reported(words: str, lines: list[str]) -> None:
    assert reported(words) == [f"no effect: {line}" for line in lines]


def test_without_a_gpu_the_host_renders() -> None:
    words = "--set augment.render=device --norm-kernels"
    assert reported(words, Surroundings(gpus=0)) == ["no effect: augment.render, norm_kernels (there is no GPU)"]
    assert reported(words, Surroundings(gpus=1)) == []


def test_the_kernel_that_renders_changes_colours_itself() -> None:
    found = [set(placement_without_effect(Placement(num_workers=1, name="mine"), Recipe.model_validate(
        {"augment": {"render": "device", "mixup": mixup}}), 1.0)) for mixup in (0.0, 0.1)]
    assert found[0] - found[1] == {"colour_kernel"}


@pytest.mark.parametrize(("recipe", "around", "path", "has_effect"), [
    ("scratch-high", Surroundings(has_outlines=False), "augment.copy_paste", False),
    ("scratch-high", Surroundings(has_outlines=True), "augment.copy_paste", True),
    ("scratch-high", Surroundings(num_classes=1), "loss.cls", False),
    ("scratch-high", Surroundings(num_classes=2), "loss.cls", True),
])
def test_the_data_set_decides_about_a_named_recipe(
        recipe: str, around: Surroundings, path: str, has_effect: bool) -> None:
    assert any(path in line for line in reported(f"--recipe {recipe}", around)) != has_effect


def test_one_class_keeps_the_class_loss_without_anchors() -> None:
    assert "loss.cls" in without_effect(Recipe(model="yolov5n"), Surroundings(num_classes=1))
    assert "loss.cls" not in without_effect(Recipe(model="yolov8n"), Surroundings(num_classes=1))


@pytest.mark.parametrize(("placement", "gpus", "paths"), [
    ({"num_workers": 0}, 0.0, {"placement_strategy", "priority", "max_failures", "cuda_graphs", "colour_kernel",
                                "exist_ok"}),
    ({"num_workers": 2, "name": "mine"}, 1.0, {"priority"}),
    ({"num_workers": 2, "name": "mine", "cuda_graphs": "on"}, 1.0, {"priority"}),
    ({"num_workers": 1, "name": "mine", "cuda_graphs": "off"}, 1.0, {"priority"}),
    ({"num_workers": (2, 4), "name": "mine", "cuda_graphs": "off"}, None, {"cuda_graphs"}),
    ({"num_workers": (1, 4), "name": "mine", "cuda_graphs": "off"}, None, set()),
    ({"num_workers": 1, "name": "mine", "nosave": True}, 1.0,
     {"priority", "save_period", "save_steps", "save_seconds", "keep_checkpoints"}),
    ({"num_workers": "auto", "name": "mine", "stop_after": 100}, None, {"stop_after"}),
])
def test_settings_of_a_placement_without_effect(
        placement: dict[str, object], gpus: float | None, paths: set[str]) -> None:
    unused = placement_without_effect(Placement.model_validate(placement), Recipe(), gpus)
    assert paths <= set(unused)
    assert placement["num_workers"] == 0 or set(unused) == paths


def test_loss_settings_of_files_are_never_refused(tmp_path: Path) -> None:
    (tmp_path / "hyp.yaml").write_text("obj: 1.0\nlabel_smoothing: 0.1\n")
    parsed = parse(TRAIN, ["--model", "yolov8n", "--hyp", str(tmp_path / "hyp.yaml")])
    refuse_unread_loss(parsed.given, parsed.config.recipe)
    assert reported(f"--model yolov8n --hyp {tmp_path}/hyp.yaml") == [
        "no effect: loss.label_smoothing, loss.obj (the loss of yolov8n does not read it)"]


def test_every_model_states_what_its_family_reads() -> None:
    """The built-in families: those whose heads suppress nothing do not read evaluate.iou, and so on."""
    assert set(MODELS) == set(FAMILY_OF)
    for name in ("yolov3-tiny", "yolov5n", "yolov8n", "yolo11n", "yolo12n", "yolo26n"):
        reads = MODELS[name].reads
        assert reads is not None
        assert ("evaluate.iou" in reads) == FAMILY_OF[name].suppress
        assert ("autoanchor" in reads) == hasattr(build_model(name, 1).head, "anchors")


@pytest.mark.parametrize(("patience", "epochs", "has_effect"), [(1, 3, True), (1, 2, False), (99, 100, False)])
def test_patience_needs_epochs_that_it_could_save(patience: int, epochs: int, has_effect: bool) -> None:
    """With 1 of 3 epochs: the second one is no better than the first, and the third is not trained."""
    assert ("patience" not in without_effect(Recipe(epochs=epochs, patience=patience))) == has_effect


@pytest.mark.parametrize(("command", "words", "expected"), [
    (EXPORT, "--conf 0.5 --agnostic-nms", {"confidence", "agnostic_nms"}), (EXPORT, "--conf 0.5 --nms", set()),
    (EXPORT, "--format torchscript --opset 18 --dynamic", {"opset", "dynamic"}),
    (EXPORT, "--format openvino --opset 18 --dynamic", set()),
    (VAL, "--save-conf", {"save_conf"}), (VAL, "--save-conf --save-txt", set()),
    (VAL, "--address h:1 --exist-ok", {"address", "exist_ok"}),
    (VAL, "--address h:1 --num-workers 2 --exist-ok --name n", set()),
    (VAL, "--set resume=x --set trackers=wandb", {"resume", "trackers"}), (VAL, "--noplots", set()),
    (PREDICT, "--source x --nosave --hide-labels --line-thickness 3", {"hide_labels", "line_thickness"}),
    (PREDICT, "--source x --hide-labels --save-conf --set mlflow_uri=http://h", {"save_conf", "mlflow_uri"})])
def test_settings_of_other_commands_that_change_nothing(command: Command[Any], words: str, expected: set[str]) -> None:
    config = parse(command, ["--weights", "w.pt", *words.split()]).config
    assert given_settings(config) & set(command_without_effect(config)) == expected
