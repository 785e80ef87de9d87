"""Every flag of training does what it says, seen in trainings and not in settings."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train.torch import TorchTrainer

from ray_yolo.cli import TRAIN, TUNE, parse_train
from ray_yolo.cli import train as main
from ray_yolo.config.flags import ALIASES, build_parser
from ray_yolo.core.errors import DatasetError, InputError, ResourcesError
from ray_yolo.runtime import cluster
from ray_yolo.runtime.workers import torch_trainer
from ray_yolo.runtime.workers.failures import FailurePolicy
from tests.support.flag_effects import EFFECTS
from tests.support.flag_files import make_files
from tests.support.servers import answering
from tests.support.watched import train

ASKED: dict[str, Callable[[TorchTrainer], tuple[object, object]]] = {
    "--num-workers 2-4": lambda trainer: (trainer.scaling_config.num_workers, (2, 4)),
    "--gpus-per-worker 2": lambda trainer: (trainer.scaling_config.resources_per_worker["GPU"], 2),
    "--cpus-per-worker 3": lambda trainer: (trainer.scaling_config.resources_per_worker["CPU"], 3),
    "--placement-strategy SPREAD": lambda trainer: (trainer.scaling_config.placement_strategy, "SPREAD"),
    "--accelerator-type A100": lambda trainer: (trainer.scaling_config.accelerator_type, "A100"),
    "--max-failures 5": lambda trainer: (trainer.run_config.callbacks[0].policy.max_failures, 5),
    "--timeout-seconds 60": lambda trainer: (trainer.backend_config.timeout_s, 60),
}
"""Words of a flag and how it shows in what Ray is asked for."""

ANSWERS = {
    "--device 0,1": ("--num-workers 2",),
    "--bucket gs://mine": ("--storage-path",),
    "--evolve 300": ("ray_yolo.tune",),
    "--resume_evolve old": ("ray_yolo.tune",),
    "--evolve_population old": ("ray_yolo.tune", "--warm-start"),
    "--local_rank 0": ("--num-workers",),
    "--entity mine": ("--mlflow-uri",),
    "--upload_dataset": ("--mlflow-uri",),
    "--bbox_interval 3": ("--mlflow-uri",),
    "--artifact_alias latest": ("--mlflow-uri",),
}
"""Words of YOLOv5 that are refused, and what the refusal names instead."""

ELSEWHERE = {
    "--no-tf32": "engine/test_learner.py::test_convolutions_of_fp32_round_to_tf32_unless_no_tf32_is_given",
    "--norm-kernels": "engine/test_team.py::test_norm_kernels_are_those_of_gpus",
    "--colour-kernel": "test_flag_effects.py::test_settings_of_gpus_reach_the_worker",
    "--cuda-graphs": "test_flag_effects.py::test_settings_of_gpus_reach_the_worker",
    "--priority": "runtime/workers/test_pool.py::"
                  "test_a_group_that_has_lost_all_its_nodes_is_replaced_by_one_for_each_bundle",
    "--trackers": "sinks/test_trackers.py::test_example_of_the_page_holds_each_number_once",
    "--resume": "test_flag_effects.py::test_resume_goes_on_where_the_run_was_stopped",
    "--exist-ok": "test_flag_effects.py::test_a_finished_name_is_started_over_only_with_exist_ok",
    "--strict": "test_flag_effects.py::test_a_label_that_has_to_be_left_out_is_refused_only_with_strict",
    "--allow-empty": "test_flag_effects.py::test_a_split_without_a_box_is_refused_unless_that_is_meant",
    "--labels-with-confidence": "labels/test_label_options.py::test_rows_with_a_confidence_are_labels_if_asked_for",
    "--keep-difficult": "labels/test_label_options.py::test_difficult_objects_are_labels_if_asked_for",
    "--keep-repeats": "labels/test_label_options.py::test_repeated_lines_of_a_training_list_are_kept",
    "--allow-names":
        "runtime/test_class_order.py::test_a_training_on_other_names_is_refused",
    "--match-classes":
        "runs/test_fork.py::test_a_fork_on_grown_data_matches_classes_and_leaves_the_old_run_as_it_was",
    "--from": "runs/test_fork.py::test_a_fork_has_the_recipe_with_the_given_changes",
    "--recipe": "config/test_named_recipes.py::test_values_are_those_of_the_publication",
    "--dry-run": "test_flag_effects.py::test_a_dry_run_trains_nothing",
    "--json": "test_answers.py::test_a_training_answers_with_its_result",
    "--address": "test_flag_effects.py::test_the_address_is_where_ray_is_looked_for",
    "--wait-for-resources":  # starts Ray
        "runtime/test_trainer.py::test_a_request_larger_than_the_cluster_is_announced_then_refused_with_advice",
    "--stall-seconds":  # freezes a worker
        "cluster/test_faults.py::test_a_process_that_is_killed_crashes_or_is_frozen",
    "--version":  # ends the command
        "test_cli.py::test_the_programs_help_has_six_lines_that_work_and_its_version_is_the_packages",
    "--help":  # needs a process of its own
        "test_cli.py::test_help_is_fast_and_loads_no_library",
}
"""Flags that fit none of the tables, and the tests that they have of their own."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_YOLO_CACHE", str(folder / "cache"))
        yield folder


def asked_for(words: str, folder: Path) -> TorchTrainer:
    placement = parse_train(["--num-workers", "1", *words.split()]).config.placement
    gpus = 0.0 if placement.gpus_per_worker == "auto" else placement.gpus_per_worker
    coordinator: Any = None  # nothing fails
    callback = torch_trainer.FailureCallback(FailurePolicy(folder, placement.max_failures, print), 1, coordinator)
    return torch_trainer.build_trainer(lambda config: {}, {}, placement, gpus, folder, callback)


@pytest.mark.parametrize("words", ASKED)
def test_ray_is_asked_for_what_the_flag_says(words: str, tmp_path: Path) -> None:
    seen, expected = ASKED[words](asked_for(words, tmp_path))
    assert seen == expected
    seen, expected = ASKED[words](asked_for("--gpus-per-worker 1" * words.startswith("--gpus"), tmp_path))
    assert seen != expected


@pytest.mark.parametrize("words", ANSWERS)
def test_a_flag_that_has_no_place_here_is_answered_with_what_replaces_it(words: str) -> None:
    with pytest.raises(InputError) as refusal:
        parse_train(words.split())
    flag, _, answer = str(refusal.value).partition(": ")
    assert flag.split()[0] == words.split()[0]
    assert all(name in answer for name in ANSWERS[words])
    named = set(re.findall(r"--[a-z][a-z-]+", answer))
    assert named <= {*TRAIN.flags, *TUNE.flags} - {*TRAIN.unsupported}


def test_a_label_that_has_to_be_left_out_is_refused_only_with_strict(files: Path, tmp_path: Path) -> None:
    words = "--data {files}/broken/data.yaml"
    assert "left 1 out" in train(words, files, tmp_path).all("warning", "message")[0]
    with pytest.raises(DatasetError):
        train(f"{words} --strict", files, tmp_path)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_without_a_box_is_refused_unless_that_is_meant(files: Path, tmp_path: Path, split: str) -> None:
    data = tmp_path / "data"
    shutil.copytree(files / "data", data)
    shutil.rmtree(data / "labels" / split)
    with pytest.raises(DatasetError):
        train(f"--data {data}/data.yaml", files, tmp_path)
    assert not (tmp_path / "runs").exists()
    run = train(f"--data {data}/data.yaml --allow-empty --epochs 1", files, tmp_path)
    (splits,) = run.all("dataset", "splits")
    assert splits[split].boxes == splits[split].empty_file == 0
    assert splits[split].no_file == splits[split].images > 0


def test_every_start_tells_what_the_data_set_holds(files: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train("", files, tmp_path, stop_after=5)
    first, second = train("--resume", files, tmp_path).all("dataset", "splits")
    assert first == second
    assert (first["train"].images, first["val"].images) == (37, 11)
    assert first["train"].boxes == sum(first["train"].per_class)
    assert first["train"].looked_for[0] == str(files / "data" / "labels" / "train" / "*.txt")


def test_a_dry_run_trains_nothing(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(files / "base.yaml"), "--storage-path", str(tmp_path), "--dry-run"]) == 0
    assert "imgsz: 64" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_address_is_where_ray_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(options))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "DRIVER_ENVIRONMENT", {})
    with answering() as address:
        cluster.connect(parse_train(["--address", address, "--gpus-per-worker", "0"]).config.placement)
    assert [call["address"] for call in calls] == [address]
    with pytest.raises(ResourcesError):
        cluster.connect(parse_train(["--address", address, "--gpus-per-worker", "0"]).config.placement)


def test_every_flag_that_help_offers_is_in_a_table_or_has_its_own_test() -> None:
    entries = re.findall(r"^  (-.*?)(?:  |$)", build_parser(TRAIN).format_help(), re.MULTILINE)
    offered = set(re.findall(r"--[a-z][\w-]*", " ".join(entries)))
    assert offered == set(TRAIN.flags)
    shown = {words.split()[0] for words in (*EFFECTS, *ASKED, *ANSWERS)} | set(ELSEWHERE)
    other_spellings = {alias for path in TRAIN.paths for alias in ALIASES.get(path, ())}
    assert offered - other_spellings == shown - other_spellings


@pytest.mark.parametrize("place", ELSEWHERE.values())
def test_what_is_tested_elsewhere_is_tested_there(place: str) -> None:
    file, _, name = place.partition("::")
    paths = [Path(__file__).parents[1] / folder / file for folder in ("unit", "process", "")]
    assert any(f"\ndef {name}(" in path.read_text() for path in paths if path.exists())


@pytest.mark.parametrize(("alias", "path"), [(alias, path) for path in TRAIN.paths for alias in ALIASES.get(path, ())])
def test_every_other_spelling_reaches_the_same_setting(alias: str, path: str) -> None:
    spellings = {flag for flag, reached in TRAIN.flags.items() if reached == path}
    words = next(words for words in EFFECTS if words.split()[0] in spellings)
    values = words.split()[1:]
    assert parse_train([alias, *values]).origins[path] == alias
    configs = [parse_train([flag, *values]).config for flag in spellings]
    assert configs == [configs[0]] * len(spellings)
    assert configs[0] != parse_train([]).config
