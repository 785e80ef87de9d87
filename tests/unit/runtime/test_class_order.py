"""Weights and data sets that name their classes in another order, otherwise, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_yolo.checkpoints.foreign import read_weights
from ray_yolo.config.commands import ValConfig
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import CheckpointError, DatasetError, InputError
from ray_yolo.core.events import RunEvent
from ray_yolo.engine.learner import build_network
from ray_yolo.models.families import build_model
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.run_dir import find_run
from ray_yolo.runs.run_record import RunRecord, read_record
from ray_yolo.runtime.preflight import compare_initial_weights, first_record, read_dataset
from ray_yolo.runtime.trainer import dry_run, fit
from ray_yolo.runtime.validator import ValResult, check, validate
from tests.support.jobs import NAMES, make_config, make_dataset
from tests.support.weights import make_weights


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "user-cache"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the classes dark and bright."""
    return make_weights(tmp_path_factory.mktemp("weights"))


def dataset(folder: Path, names: str, numbers: dict[str, str] | None = None) -> Path:
    """The data set of the tests with other names, and other numbers of the classes in its labels."""
    yaml = make_dataset(folder, 12)
    yaml.write_text(f"train: images/train\nval: images/val\n{names}\n")
    for file in folder.glob("labels/*/*.txt"):
        rows = [line.split(" ", 1) for line in file.read_text().splitlines()]
        file.write_text("\n".join(f"{(numbers or {}).get(kind, kind)} {box}" for kind, box in rows))
    return yaml


def validated(weights: Path, data: Path, **changes: Any) -> ValResult:
    return validate(ValConfig.model_validate({
        "weights": str(weights), "data": str(data), **changes,
        "placement": {"storage_path": str(data.parent), "gpus_per_worker": 0, "noplots": True}}), quiet=True)


def by_name(result: ValResult) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result.per_class}


SWAPPED = {"0": "1", "1": "0"}


def test_another_order_of_the_same_names_has_the_same_results(weights: Path, tmp_path: Path) -> None:
    assert NAMES == ("dark", "bright")
    usual = validated(weights, dataset(tmp_path / "usual", "names: [dark, bright]"))
    other = validated(weights, dataset(tmp_path / "other", "names: [bright, dark]", SWAPPED))
    assert by_name(usual)["dark"]["mAP50"] != pytest.approx(by_name(usual)["bright"]["mAP50"], abs=0.01)
    for name, row in by_name(usual).items():
        assert by_name(other)[name] == pytest.approx(row, abs=1e-6)
    assert other.losses == pytest.approx(usual.losses, rel=1e-5)


def test_the_data_set_may_have_fewer_classes(weights: Path, tmp_path: Path) -> None:
    every = {"evaluate": {"max_detections": 10_000}}  # the limit counts the detections of all classes
    usual = by_name(validated(weights, dataset(tmp_path / "usual", "names: [dark, bright]"), **every))
    yaml = dataset(tmp_path / "other", "names: [Bright]")
    for file in yaml.parent.glob("labels/*/*.txt"):
        rows = [line for line in file.read_text().splitlines() if line.startswith("1 ")]
        file.write_text("\n".join(f"0{line[1:]}" for line in rows))
    [row] = validated(weights, yaml, **every).per_class
    assert row["name"] == "Bright"
    for metric in ("labels", "mAP50", "mAP50-95"):
        assert row[metric] == pytest.approx(usual["bright"][metric], abs=1e-6)


def test_other_names_are_refused_before_anything_is_written(weights: Path, tmp_path: Path) -> None:
    yaml = dataset(tmp_path / "data", "names: [cat, dog]")
    with pytest.raises(DatasetError):
        validated(weights, yaml)
    assert not (yaml.parent / "runs").exists()
    assert set(by_name(validated(weights, yaml, allow_names=True))) == {"cat", "dog"}
    assert [row["name"] for row in validated(weights, yaml, single_cls=True).per_class] == ["item"]


def test_weights_are_validated_on_the_classes_they_were_trained_on(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By name: in the second data set the class has another number."""
    weights = make_weights(tmp_path / "weights", classes=(0,))
    data = dataset(tmp_path / "data", "names: [dark, bright]")
    swapped = dataset(tmp_path / "swapped", "names: [bright, dark]", SWAPPED)
    for yaml, number in ((data, 0), (swapped, 1)):
        asked = validated(weights, yaml, classes=(number,))
        assert validated(weights, yaml).metrics == asked.metrics
        assert [row["name"] for row in asked.per_class] == ["dark"]
        assert len(validated(weights, yaml, classes=(0, 1)).per_class) == 2
    validate(ValConfig.model_validate({"weights": str(weights), "data": str(data), "placement": {
        "storage_path": str(tmp_path), "gpus_per_worker": 0, "noplots": True}}))
    assert "\nas the weights were trained: --classes 0 (flags here override it)\n" in capsys.readouterr().out


def test_weights_are_validated_with_the_settings_of_their_training(tmp_path: Path) -> None:
    data = dataset(tmp_path / "data", "names: [dark, bright]")
    weights = make_weights(tmp_path / "weights", evaluate={"iou": 0.3, "max_detections": 2})
    config = ValConfig.model_validate({"weights": str(weights), "data": str(data), "evaluate": {"iou": 0.7}})
    evaluate = check(config).config.evaluate
    assert (evaluate.iou, evaluate.max_detections) == (0.7, 2)


def test_settings_of_the_training_hold_unless_they_are_given(tmp_path: Path) -> None:
    data = dataset(tmp_path / "data", "names: [dark, bright]")
    names = ("single_cls", "labels_with_confidence", "keep_difficult")
    weights = make_weights(tmp_path / "weights", **dict.fromkeys(names, True))
    for given in ((), ("single_cls",), ("keep_difficult", "labels_with_confidence"), names):
        settings = {"weights": str(weights), "data": str(data), **dict.fromkeys(given, False)}
        checked = check(ValConfig.model_validate(settings))
        assert [getattr(checked.config, name) for name in names] == [name not in given for name in names]
        taken = [f"--{name.replace('_', '-')}" for name in names if name not in given]
        assert [word for word in checked.note.split() if word.startswith("--")] == taken


def test_classes_trained_as_one_are_validated_as_one(tmp_path: Path) -> None:
    data = dataset(tmp_path / "data", "names: [dark, bright]")
    (tmp_path / "run").mkdir()
    config = make_config(tmp_path / "run", 0, data=str(data), classes=(1,), single_cls=True, epochs=1)
    best = fit(config, quiet=True).best
    [row] = validated(best, data).per_class
    assert row["name"] == "item"
    assert row["labels"] == (check(ValConfig(weights=str(best))).labels.classes == 0).sum() > 0
    other = dataset(tmp_path / "other", "names: [dark, bright]")
    with pytest.raises(InputError):
        validated(best, other)
    assert validated(best, other, classes=(1,)).per_class == validated(best, data).per_class


def test_a_note_says_how_classes_were_matched(
        weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = dataset(tmp_path / "data", "names: [bright, dark]", SWAPPED)
    config = ValConfig.model_validate({"weights": str(weights), "data": str(data), "placement": {
        "storage_path": str(tmp_path), "gpus_per_worker": 0, "noplots": True}})
    validate(config)
    assert "by name (bright 0 = 1, dark 1 = 0)" in capsys.readouterr().out


def training(folder: Path, weights: Path, data: Path, **recipe: Any) -> RunConfig:
    config = make_config(folder, 0, epochs=1, weights=str(weights), **recipe)
    return config.model_copy(update={"recipe": config.recipe.model_copy(update={"data": str(data)})})


def test_a_training_maps_the_rows_of_the_head(weights: Path, tmp_path: Path) -> None:
    config = training(tmp_path, weights, dataset(tmp_path / "other", "names: [bright, dark]", SWAPPED))
    run_dir = fit(config, quiet=True).run_dir
    record = read_record(run_dir)
    assert isinstance(record, RunRecord)
    assert record.transfer is not None
    assert record.transfer.classes == (1, 0)
    assert (record.transfer.matched, record.transfer.left_out) == (record.transfer.total, ())
    [event] = [event for event in read_events(run_dir / EVENTS_FILE) if isinstance(event, RunEvent)]
    assert any("matched with those of" in note for note in event.notes)
    assert any(note.startswith(f"weights: {record.transfer.total} of {record.transfer.total}") for note in event.notes)


def test_the_rows_of_the_head_are_those_of_the_names(weights: Path, tmp_path: Path) -> None:
    from ray_yolo.engine.spec import TrainSpec

    config = training(tmp_path, weights, dataset(tmp_path / "other", "names: [bright, dark]", SWAPPED))
    _, train, val = read_dataset(config.recipe)
    record = first_record(config, train, 0.0, (), compare_initial_weights(config.recipe, train.names))
    assert record.transfer is not None
    spec = TrainSpec(record.recipe, record.digest, record.names, record.architecture, None, train, val, tmp_path,
                     record.transfer.classes)
    head = build_network(spec).head
    given = read_weights(weights).tensors
    for name, layer in head.class_layers().items():
        source = next(value for key, value in given.items() if key.endswith(f".{name}.weight"))
        shaped = layer.weight.view(head.num_anchors, 7, -1)
        assert torch.equal(shaped[:, 5], source.view(head.num_anchors, 7, -1)[:, 6])
        assert torch.equal(shaped[:, :5], source.view(head.num_anchors, 7, -1)[:, :5])


def test_a_training_on_other_names_is_refused(weights: Path, tmp_path: Path) -> None:
    data = dataset(tmp_path / "other", "names: [cat, dog]")
    config = training(tmp_path, weights, data)
    for start in (lambda: fit(config, quiet=True), lambda: dry_run(config)):
        with pytest.raises(DatasetError):
            start()
    assert find_run(config.recipe, config.placement) is None
    assert compare_initial_weights(training(tmp_path, weights, data, allow_names=True).recipe, ("cat", "dog"))
    assert compare_initial_weights(training(tmp_path, weights, data, single_cls=True).recipe, ("item",))


def test_weights_need_the_name_of_their_model(tmp_path: Path) -> None:
    """The default is no statement of the user's. A part of a file is taken if the model is named."""
    file = tmp_path / "plain.pt"
    torch.save(build_model("yolov5n", 2).state_dict(), file)
    with pytest.raises(CheckpointError):
        compare_initial_weights(Recipe(data="d.yaml", weights=str(file)), ("dark", "bright"))
    named = Recipe(data="d.yaml", weights=str(file), model="yolov5s")
    transfer = compare_initial_weights(named, ("dark", "bright"))
    assert transfer is not None
    assert transfer.is_sparse


def test_a_new_class_layer_has_no_old_names(weights: Path, tmp_path: Path) -> None:
    recipe = training(tmp_path, weights, dataset(tmp_path / "other", "names: [cat, dog]")).recipe
    transfer = compare_initial_weights(recipe, ("cat", "dog", "bird"))
    assert transfer is not None
    assert (transfer.classes, transfer.note) == (None, "")
    assert {name.rpartition(".")[2] for name in transfer.left_out} == {"weight", "bias"}


def test_a_dry_run_names_the_tensors_that_start_new(weights: Path, tmp_path: Path) -> None:
    data = dataset(tmp_path / "other", "names: [cat, dog, bird]")
    planned = dry_run(training(tmp_path, weights, data))
    assert [note for note in planned.notes if note.startswith("new values: model.")]


def test_weights_of_another_model_are_a_warning(tmp_path: Path) -> None:
    weights = make_weights(tmp_path / "weights")
    state = dict(read_weights(weights).tensors)
    few = {name: state[name] for name in list(state)[: len(state) // 3]}
    torch.save(few, tmp_path / "few.pt")
    data = dataset(tmp_path / "data", "names: [dark, bright]")
    run_dir = fit(training(tmp_path, tmp_path / "few.pt", data), quiet=True).run_dir
    warnings = [event.message for event in read_events(run_dir / EVENTS_FILE) if event.type == "warning"]
    assert any(f"weights: {len(few)} of {len(state)} tensors" in message and "another model" in message
               for message in warnings), warnings
    shutil.rmtree(run_dir)
