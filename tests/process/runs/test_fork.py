"""A run that starts from another run: its recipe, its weights, its classes, and what is recorded of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from ray_yolo.checkpoints.foreign import read_weights
from ray_yolo.cli import parse_train
from ray_yolo.config.fine_tuning import fine_tuned
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.sections import OptimizerConfig, ScheduleConfig
from ray_yolo.core.errors import CheckpointError, InputError
from ray_yolo.core.events import CheckpointEvent, ForkOrigin, RunEvent
from ray_yolo.engine.learner import build_network
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.fork import check_lineage, lineage_of
from ray_yolo.runs.run_dir import find_run
from ray_yolo.runs.run_record import RunRecord, read_record, write_record
from ray_yolo.runtime.preflight import read_dataset, spec_of_run
from ray_yolo.runtime.trainer import fit
from ray_yolo.sinks.mlflow_plan import plan_run
from tests.support.jobs import make_config, make_dataset


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_YOLO_CACHE", str(tmp_path_factory.mktemp("user-cache")))
        yield


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three epochs that has kept the second one (number 1) too."""
    folder = tmp_path_factory.mktemp("parent")
    config = make_config(folder, 0, {"save_period": 2}, epochs=3, optimizer={"lr0": 0.002})
    return fit(config, quiet=True).run_dir


def files_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def record_of(folder: Path) -> RunRecord:
    record = read_record(folder)
    assert isinstance(record, RunRecord)
    return record


def forked(source: str | Path, *words: str) -> Recipe:
    return parse_train(["--from", str(source), *words]).config.recipe


def test_a_fork_has_the_recipe_with_the_given_changes(parent: Path) -> None:
    before = record_of(parent).recipe
    recipe = forked(parent, "--set", "optimizer.lr0=0.03", "--epochs", "7")
    expected = before.model_copy(update={
        "epochs": 7, "weights": str(parent / "weights" / "best.pt"), "match_classes": True,
        "optimizer": before.optimizer.model_copy(update={"lr0": 0.03})})
    assert recipe == expected
    parsed = parse_train(["--from", str(parent), "--epochs", "7"])
    assert parsed.origins["optimizer.lr0"] == f"--from {parent}"
    assert parsed.origins["epochs"] == "--epochs"


def test_classes_by_number_are_not_inherited_for_another_data_set(tmp_path: Path) -> None:
    run = fit(make_config(tmp_path, 0, epochs=1, classes=(1,)), quiet=True).run_dir
    other = make_dataset(tmp_path / "other")
    with pytest.raises(InputError, match=r"trained on the classes \[1\] of its data set, and --data names another one"):
        forked(run, "--data", str(other))
    assert forked(run, "--data", str(other), "--classes", "0").classes == (0,)
    assert forked(run).classes == (1,)


def test_a_fork_keeps_the_optimiser_of_its_run(tmp_path: Path) -> None:
    """Also where it is the default of a training from scratch, which one from weights does not have."""
    config = make_config(tmp_path, 0, epochs=1)
    settings = config.recipe.model_dump(exclude={"optimizer", "schedule"})
    scratch = config.model_copy(update={"recipe": Recipe.model_validate(settings)})
    fork = forked(fit(scratch, quiet=True).run_dir, "--epochs", "2")
    assert fork.weights
    decided = fine_tuned(fork, 37, 2)
    assert (decided.optimizer, decided.schedule) == (OptimizerConfig(), ScheduleConfig())


def test_decisions_that_depend_on_a_changed_setting_are_taken_anew(parent: Path, tmp_path: Path) -> None:
    folder = tmp_path / "exp"
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "best.pt").touch()
    record = record_of(parent)
    asked = record.asked.model_copy(update={"batch_size": None, "microbatch": None})
    write_record(folder, record.model_copy(update={"asked": asked}))
    assert forked(folder).microbatch == record.recipe.microbatch
    assert forked(folder).batch_size == record.recipe.batch_size
    assert forked(folder, "--batch-size", "7").microbatch is None


def test_another_model_has_its_own_defaults(tmp_path: Path) -> None:
    folder = tmp_path / "exp"
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "best.pt").touch()
    recipe = Recipe(model="yolov8n")
    record = RunRecord(digest="", asked=recipe, recipe=recipe, architecture=None, anchors=None, num_parameters=1,
                       names=("a",), labels="", command="", provenance={})
    write_record(folder, record)
    assert forked(folder, "--model", "yolov5n").loss == Recipe(model="yolov5n").loss
    assert forked(folder).loss == recipe.loss != Recipe(model="yolov5n").loss


def test_a_kept_epoch_is_taken_and_a_missing_one_lists_the_others(parent: Path) -> None:
    assert forked(f"{parent}@1").weights == str(parent / "weights" / "epoch1.pt")
    assert forked(f"{parent}@2").weights.startswith(str(parent))
    with pytest.raises(InputError, match=r"no checkpoint of epoch 7; epochs with one: .*1, 2 \(counted from 0"):
        forked(f"{parent}@7")


@pytest.mark.parametrize(("words", "message"), [
    (("--from", "nowhere"), "nowhere is not the folder of a run; write --from RUN"),
    (("--from", "s3://bucket/runs/exp"), "a run in a bucket cannot be forked"),
    (("--from", "nowhere", "--weights", "a.pt"), "--weights names others; drop one of them"),
    (("--from", "nowhere", "--resume", "auto"), "--resume names others; drop one of them"),
])
def test_what_cannot_be_forked_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_train(words)


def test_a_run_that_still_trains_lends_permanent_checkpoints_only(
        parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_yolo.runs.fork.is_active", lambda folder: True)
    with pytest.raises(InputError, match="is being trained"):
        forked(parent)
    assert forked(f"{parent}@1").weights.endswith("epoch1.pt")


def fork_on(parent: Path, folder: Path, names: str, *words: str) -> RunConfig:
    data = make_dataset(folder / "grown", 12)
    data.write_text(f"train: images/train\nval: images/val\nnames: {names}\n")
    config = parse_train(["--from", f"{parent}@1", "--data", str(data), "--epochs", "1", "--num-workers", "0",
                          "--gpus-per-worker", "0", "--mlflow-uri", "off", "--noplots", "--storage-path", str(folder),
                          *words]).config
    return config


def test_a_fork_on_grown_data_matches_classes_and_leaves_the_old_run_as_it_was(parent: Path, tmp_path: Path) -> None:
    before = files_of(parent)
    config = fork_on(parent, tmp_path, "[bright, bird, dark]")
    folder = fit(config, quiet=True).run_dir
    assert files_of(parent) == before
    record = record_of(folder)
    assert record.transfer is not None
    assert record.transfer.classes == (1, None, 0)
    assert record.transfer.left_out == ()
    events = read_events(folder / EVENTS_FILE)
    [run] = [event for event in events if isinstance(event, RunEvent)]
    [line] = [note for note in run.notes if note.startswith("classes of ")]
    assert line.endswith("by name: kept bright, dark; new bird")
    [saved] = [event for event in read_events(parent / EVENTS_FILE)
               if isinstance(event, CheckpointEvent) and "epoch1" in event.kinds]
    [past] = [event for event in read_events(parent / EVENTS_FILE) if isinstance(event, RunEvent)]
    lineage = ForkOrigin(run=str(parent), run_id=past.run_id, epoch=1, step=saved.step, weights=saved.digest)
    assert record.forked_from == run.forked_from == lineage
    plan = plan_run(events)
    assert plan is not None
    assert plan.tags["ray_yolo.forked_from"] == past.run_id
    assert plan.tags["ray_yolo.forked_from.epoch"] == "2"
    assert plan.tags["ray_yolo.forked_from.step"] == str(saved.step)
    assert plan.tags["ray_yolo.forked_from.weights"] == saved.digest

    _, train, val = read_dataset(record.recipe)
    (folder / "finished").unlink()
    started = find_run(config.recipe, config.placement)
    assert started is not None
    spec = spec_of_run(started, 1, train, val)
    started.release()
    network, given = build_network(spec), read_weights(parent / "weights" / "epoch1.pt").tensors
    fresh = build_network(spec.__class__(**{**vars(spec), "recipe": spec.recipe.model_copy(update={"weights": ""})}))
    for name, layer in network.head.class_layers().items():
        old = next(value for key, value in given.items() if key.endswith(f".{name}.weight")).view(3, 7, -1)
        new = layer.weight.detach().view(3, 8, -1)
        drawn = fresh.head.class_layers()[name].weight.detach().view(3, 8, -1)
        assert torch.equal(new[:, :5], old[:, :5])  # box and objectness
        assert torch.equal(new[:, 5], old[:, 6])  # bright
        assert torch.equal(new[:, 7], old[:, 5])  # dark
        assert torch.equal(new[:, 6], drawn[:, 6])  # bird is as a seed draws it


def test_classes_that_are_gone_are_left_out(parent: Path, tmp_path: Path) -> None:
    folder = fit(fork_on(parent, tmp_path, "[bright, cat]"), quiet=True).run_dir
    transfer = record_of(folder).transfer
    assert transfer is not None
    assert transfer.classes == (1, None)
    assert transfer.note.endswith("by name: kept bright; new cat; left out dark")


def test_initial_weights_that_have_changed_are_refused(parent: Path, tmp_path: Path) -> None:
    origin = lineage_of(str(parent / "weights" / "epoch1.pt"))
    assert origin is not None
    check_lineage(origin, str(parent / "weights" / "epoch1.pt"))
    with pytest.raises(CheckpointError, match=f"but this run was started from step {origin.step}"):
        check_lineage(origin, str(parent / "weights" / "last.pt"))
    assert lineage_of(str(tmp_path / "a.pt")) is None


def test_the_record_of_a_run_without_a_parent_reads_as_before(parent: Path) -> None:
    tree = json.loads((parent / "run.json").read_text())
    assert tree.pop("forked_from") is None
    assert RunRecord.model_validate(tree).forked_from is None
