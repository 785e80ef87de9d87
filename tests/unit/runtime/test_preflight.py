"""What is decided at a first start: the batch under AutoBatch, from what every worker says that it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe, resolve
from ray_yolo.core.errors import CheckpointError, ConfigError, DatasetError
from ray_yolo.core.system import is_bf16_faster
from ray_yolo.models.families import build_model
from ray_yolo.runs.run_dir import begin_run
from ray_yolo.runtime import map_on_workers, preflight
from ray_yolo.runtime.preflight import (
    check_early,
    check_model,
    first_record,
    planned_recipe,
    read_dataset,
    resolve_recipe,
    spec_of,
    with_workers,
)
from ray_yolo.runtime.trainer import fit
from ray_yolo.sinks.report import fine_tuning_line
from tests.support.jobs import TINY, make_config, make_dataset


@pytest.mark.parametrize(("shift", "names"), [
    (1, "[dark, bright, third]"),  # 1 and 2 of 3: 0 has no label
    (0, "[dark]"),  # 0 and 1 of 1: a name is missing, which the findings say
])
def test_labels_without_a_class_are_read(tmp_path: Path, shift: int, names: str) -> None:
    data = make_dataset(tmp_path, 8)
    for file in tmp_path.glob("labels/*/*.txt"):
        rows = [line.split(maxsplit=1) for line in file.read_text().splitlines()]
        file.write_text("\n".join(f"{int(kind) + shift} {box}" for kind, box in rows))
    data.write_text(f"train: images/train\nval: images/val\nnames: {names}\n")
    for single_cls in (False, True):
        read_dataset(Recipe(data=str(data), single_cls=single_cls))


def test_some_classes_can_be_trained_as_one(tmp_path: Path) -> None:
    data = make_dataset(tmp_path, 8)
    _, train, _ = read_dataset(Recipe(data=str(data), classes=(1,), single_cls=True))
    _, both, _ = read_dataset(Recipe(data=str(data)))
    assert train.names == ("item",)
    assert train.classes.tolist() == [0] * (both.classes == 1).sum()


def test_classes_without_a_box_are_named(tmp_path: Path) -> None:
    data = make_dataset(tmp_path, 8)
    for file in tmp_path.glob("labels/val/*.txt"):
        file.write_text("0 0.5 0.5 0.2 0.2\n")
    recipe = Recipe(data=str(data), classes=(1,), fraction=0.5)
    with pytest.raises(DatasetError, match=r"data\.yaml: val: has boxes, but none with classes 1; change this"):
        read_dataset(recipe)
    assert len(read_dataset(recipe.model_copy(update={"allow_empty": True}))[2].classes) == 0
    for file in tmp_path.glob("labels/val/*.txt"):
        file.unlink()
    with pytest.raises(DatasetError, match="correct the paths"):
        read_dataset(recipe)


def test_labels_that_are_not_those_of_the_run_name_the_data_set(tmp_path: Path) -> None:
    config = make_config(tmp_path, 0)
    record = first_record(config, read_dataset(config.recipe)[1], 0.0, ())
    other = str(make_dataset(tmp_path / "other", 8))
    _, train, val = read_dataset(Recipe(data=other))
    with pytest.raises(DatasetError, match=rf"^{other}: has other training labels than {config.recipe.data}, with"):
        spec_of(record, tmp_path, 1, train, val, other)
    with pytest.raises(DatasetError, match=f"^{config.recipe.data}: the training labels have changed since"):
        spec_of(record, tmp_path, 1, train, val, config.recipe.data)


def test_a_number_of_workers_that_a_step_limits_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config = make_config(tmp_path, 0, {"num_workers": "auto", "gpus_per_worker": 1}, batch_size=16, microbatch=4)
    chosen, why = with_workers(config, None)
    assert chosen.placement.num_workers == 4
    assert why == "--num-workers auto: 4, 8 GPUs here; a step of this recipe cannot be shared by more than 4"


@pytest.mark.parametrize(("processor", "faster"), [
    ("Cooper Lake: GenuineIntel avx512_bf16", False),
    ("Sapphire Rapids: GenuineIntel avx512_bf16 amx_bf16 amx_tile amx_int8", True),
    ("Sapphire Rapids, AMX masked: GenuineIntel avx512_bf16", False),
    ("Zen 4: AuthenticAMD avx512_bf16 avx512_vnni", True),
    ("Zen 5: AuthenticAMD avx_vnni avx512_bf16 avx512_vp2intersect", True),
    ("Zen 3: AuthenticAMD avx2", False),
    ("Cascade Lake: GenuineIntel avx512f avx512_vnni", False),
    ("Zen, a longer word: AuthenticAMD avx512_bf16x", False)])
def test_processors_that_are_faster_in_bf16(tmp_path: Path, processor: str, faster: bool) -> None:
    """By the lines of /proc/cpuinfo; the name of a model decides nothing."""
    name, _, recorded = processor.partition(": ")
    vendor, *flags = recorded.split()
    core = f"vendor_id\t: {vendor}\nmodel name\t: {name} avx512_bf16 amx_bf16\nflags\t\t: fpu {' '.join(flags)}\n"
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\n{core}\nprocessor\t: 1\n{core}\n")
    assert is_bf16_faster(path) is faster


def test_a_machine_without_processor_flags_keeps_fp32(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    assert not is_bf16_faster(path)
    path.write_text("")
    assert not is_bf16_faster(path)


@pytest.mark.parametrize(("here", "others", "gpus", "asked", "decided"), [
    (True, True, 0.0, "auto", "bf16"), (False, True, 0.0, "auto", "fp32"), (True, False, 0.0, "auto", "fp32"),
    (False, False, 1.0, "auto", "bf16"), (True, True, 0.0, "fp32", "fp32")])
def test_auto_is_bf16_where_it_is_faster_everywhere(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool, others: bool, gpus: float, asked: str,
        decided: str) -> None:
    monkeypatch.setattr(preflight, "is_bf16_faster", lambda: here)
    monkeypatch.setattr("ray_yolo.runtime.node_checks.bf16_is_faster_everywhere", lambda: others)
    config = make_config(tmp_path, 2, precision=asked)
    _, train, _ = read_dataset(config.recipe)
    assert first_record(config, train, gpus, ["train"]).recipe.precision == decided


def test_a_run_in_bf16_on_a_processor_without_it_is_a_warning(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(preflight, "is_bf16_faster", lambda: True)
    config = make_config(tmp_path, 0, precision="auto", epochs=1)
    _, train, _ = read_dataset(config.recipe)
    begin_run(config.placement, first_record(config, train, 0.0, ["train"])).release()
    monkeypatch.setattr(preflight, "is_bf16_faster", lambda: False)
    result = fit(config, quiet=True)
    assert yaml.safe_load((result.run_dir / "opt.yaml").read_text())["recipe"]["precision"] == "bf16"
    assert "trains in bf16, in which this processor is slower than in fp32" in capsys.readouterr().err


def test_autobatch_is_decided_by_the_smallest_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_on_workers, "map_on_workers", lambda *_, **__: enumerate([9, 5, 7]))
    recipe = make_config(tmp_path, 3, batch_size=-1, microbatch=None).recipe
    decided = resolve_recipe(recipe, Placement(num_workers=3), read_dataset(recipe)[1], gpus=1.0)
    assert (decided.batch_size, decided.microbatch) == (15, 5)


def test_the_decision_of_autobatch_is_kept_on_resume(tmp_path: Path) -> None:
    config = make_config(tmp_path, 0, {"name": "auto"}, batch_size=-1, microbatch=None, epochs=1)
    record = json.loads((fit(config, quiet=True).run_dir / "run.json").read_text())
    assert record["asked"]["batch_size"] == -1
    assert record["recipe"]["batch_size"] == record["recipe"]["microbatch"] == 16


def test_a_run_keeps_no_password_of_its_command(tmp_path: Path) -> None:
    config = make_config(tmp_path, 0, {"name": "quiet"}, epochs=1)
    folder = fit(config, quiet=True, command=["train", "--mlflow-uri", "https://ann:s3cr3t@host"]).run_dir
    assert "https://***@host" in json.loads((folder / "run.json").read_text())["command"]
    assert not [path for path in folder.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]


def test_anchors_of_the_weights_stay_where_they_fit_the_labels(tmp_path: Path) -> None:
    def fitted(weights: str) -> object:
        config = make_config(tmp_path, 0, weights=weights, model="yolov5n")
        return first_record(config, read_dataset(config.recipe)[1], 0.0, ()).anchors

    model = build_model("yolov5n", 80)
    for name, factor in (("good", 1.0), ("tiny", 0.005)):
        weights = {"model.24.anchors": model.head.anchors * factor}
        torch.save(weights, tmp_path / f"{name}.pt")
    assert fitted("") is None
    assert fitted(str(tmp_path / "good.pt")) is None
    assert fitted(str(tmp_path / "tiny.pt")) is not None


def test_all_layers_but_the_last_can_be_frozen() -> None:
    check_model(Recipe.model_validate({"model": "yolov5n", "freeze": 24}))
    with pytest.raises(ConfigError):
        check_model(Recipe.model_validate({"model": "yolov5n", "freeze": 25}))


@pytest.mark.parametrize("settings", [
    {"optimizer": {"backbone_lr": 0.1}}, {"epochs": 8, "changes": "4: optimizer.backbone_lr=0.1"}])
def test_a_backbone_without_an_end_has_no_rate(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = tmp_path / "tiny.yaml"
    model.write_text(yaml.safe_dump(TINY))
    check_model(Recipe.model_validate({"model": "yolov5n", **settings}))
    check_model(Recipe.model_validate({"model": str(model)}))
    with pytest.raises(ConfigError):
        check_model(Recipe.model_validate({"model": str(model), **settings}))


@pytest.mark.parametrize(("file", "table", "is_reported"), [
    ("mine.yaml", {"scales": {"m": [0.67, 0.75, 768], "n": [0.33, 0.25, 1024]}}, True),
    ("mine8z.yaml", {"scales": {"n": [0.33, 0.25, 1024], "m": [0.67, 0.75, 768]}}, True),
    ("mine8m.yaml", {"scales": {"n": [0.33, 0.25, 1024], "m": [0.67, 0.75, 768]}}, False),
    ("mine.yaml", {"scales": {"n": [0.33, 0.25, 1024], "m": [0.67, 0.75, 768]}, "scale": "m"}, False),
    ("mine.yaml", {"scales": {"n": [0.33, 0.25, 1024]}}, False),
    ("mine.yaml", {}, False),
])
def test_a_scale_that_nothing_chooses_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str,
                                                  table: dict[str, Any], is_reported: bool) -> None:
    model = tmp_path / file
    model.write_text(yaml.safe_dump(TINY | table, sort_keys=False))
    check_model(Recipe.model_validate({"model": str(model)}))
    assert bool(caplog.messages) == is_reported


def test_the_missing_file_of_one_scale_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture
                                                                  ) -> None:
    """Ultralytics reads yolov8.yaml at scale n for yolov8n.yaml."""
    missing = Recipe(model=str(tmp_path / "yolov8n.yaml"))
    check_model(missing)
    assert caplog.messages
    (tmp_path / "yolov8.yaml").write_text("nc: 2\n")
    with pytest.raises(ConfigError):
        check_model(missing)
    caplog.clear()
    check_model(Recipe(model="yolov8n.yaml"))
    assert not caplog.records


def test_the_driver_checks_weights_and_their_place(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = make_config(tmp_path, 1, weights="mine.pt").recipe
    with pytest.raises(CheckpointError):
        check_model(recipe)
    torch.save({"w": torch.zeros(1)}, "mine.pt")
    check_model(recipe)
    assert resolve_recipe(recipe, Placement(), read_dataset(recipe)[1], 0.0).weights == str(tmp_path / "mine.pt")


def test_a_start_and_its_dry_run_have_the_optimiser_of_short_trainings_from_weights(tmp_path: Path) -> None:
    recipe = Recipe(data=str(make_dataset(tmp_path)), weights="mine.pt", epochs=3)
    train, placement = read_dataset(recipe)[1], Placement(num_workers=0)
    for decided in (resolve_recipe(recipe, placement, train, 0.0), planned_recipe(recipe, placement, train, 0.0)):
        assert (decided.optimizer.name, decided.optimizer.lr0) == ("AdamW", 0.001667)  # two classes
        assert fine_tuning_line(recipe, decided) == (
            "few steps from trained weights: AdamW, learning rate 0.001667, no bias warm-up; for SGD with 0.01, add "
            "--recipe scratch-low")
    given = Recipe.model_validate({**recipe.model_dump(), "optimizer": {"lr0": 0.01}})
    assert resolve_recipe(given, placement, train, 0.0).optimizer.name == "SGD"
    assert fine_tuning_line(given, given) == ""


@pytest.mark.parametrize(("workers", "gpus", "strategy"), [
    (1, 0.5, "PACK"), (2, 1, "PACK"), (2, 0, "PACK"), (2, "auto", "PACK"), (2, 0.5, "STRICT_SPREAD"),
    ((2, 4), 0, "PACK"), (2, 0, "STRICT_PACK"), (0, 0, "STRICT_SPREAD")])
def test_other_placements_of_workers_are_allowed(
        tmp_path: Path, workers: object, gpus: object, strategy: str) -> None:
    """Than those that `tests/support/messages/starts.py` lists."""
    check_early(make_config(tmp_path, workers, {"gpus_per_worker": gpus, "placement_strategy": strategy}))


def test_quad_keeps_groups_of_four_together() -> None:
    assert resolve(Recipe(quad=True, batch_size=32), 9, gpu=False).microbatch == 4
