"""A step of a run, trained again: the same losses, its pictures, and the module where NaN appears."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_yolo.checkpoints.local import newest_first
from ray_yolo.cli import replay as command
from ray_yolo.config.commands import ReplayConfig
from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import DatasetError, InputError, ResourcesError, TrainingError
from ray_yolo.core.events import StepEvent
from ray_yolo.engine import session
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.evaluate import Evaluation, evaluate
from ray_yolo.engine.membership import Rendezvous
from ray_yolo.engine.session import Session, run_session
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.instruments import replay as replay_module
from ray_yolo.instruments.replay import ReplayResult
from ray_yolo.models.detector import Detector
from ray_yolo.runs.event_log import EVENTS_FILE, EventLog, read_events
from ray_yolo.runs.run_record import RECORD_FILE, RunRecord, SweepRecord, read_record, write_record
from ray_yolo.runs.steps import logged_steps
from ray_yolo.runtime.preflight import read_dataset, spec_of
from ray_yolo.runtime.trainer import fit
from tests.support.jobs import make_config
from tests.support.run_log import only
from tests.support.workers import run_workers, wrap_model

EPOCHS = 3  # of three steps each: 16, 16 and 5 images


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in this process whose checkpoints are those after steps 6 and 9; nothing is drawn."""
    folder = tmp_path_factory.mktemp("run")
    return fit(make_config(folder, 0, epochs=EPOCHS), quiet=True).run_dir


def replayed(run: Path | str, storage: Path | str, **fields: Any) -> ReplayResult:
    placement = {"storage_path": str(storage), "noplots": True, **fields.pop("placement", {})}
    config = ReplayConfig.model_validate({"run": str(run), "placement": placement, **fields})
    return replay_module.replay(config, quiet=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("step", "before"), [(2, 0), (7, 6), (9, 6)])
def test_a_replayed_step_has_the_losses_of_the_log(run: Path, tmp_path: Path, step: int, before: int) -> None:
    result = replayed(run, tmp_path, step=step)
    assert (result.before, result.agreement.compared, result.agreement.equal) == (before, step - before, step - before)
    logged = logged_steps(read_events(run / EVENTS_FILE))[step]
    assert tuple(result.result.losses.tolist()) == logged.loss
    assert result.result.gradient_norm == logged.gradient_norm  # the observation changes no bit
    assert result.not_finite == ()


def test_the_parts_of_the_images_add_up_to_the_loss_of_the_step(run: Path, tmp_path: Path) -> None:
    """Also in the short step at the end of an epoch, whose microbatches have four images and one."""
    for step, count in ((8, 16), (9, 5)):
        result = replayed(run, tmp_path, step=step)
        assert len(result.images) == count
        parts = torch.tensor([image.losses for image in result.images])
        torch.testing.assert_close(parts.sum(0), result.result.losses, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("recipe", "pictures"), [
    ({"quad": True, "microbatch": 8}, 4),  # each of four samples
    ({"multi_scale": True}, 16),
    ({"changes": ["1: optimizer.lr0=0.003 loss.box=0.1"]}, 16),
])
def test_steps_of_every_kind_are_replayed_over_an_end_of_an_epoch(
    tmp_path: Path, recipe: dict[str, Any], pictures: int
) -> None:
    config = make_config(tmp_path, 0, {"keep_checkpoints": 1, "nosave": True}, **{"epochs": 2, **recipe})
    result = replayed(fit(config, quiet=True).run_dir, tmp_path, step=5)
    assert (result.before, result.agreement.compared, result.agreement.equal) == (0, 5, 5)
    assert len(result.images) == pictures
    assert sum(len(image.samples) for image in result.images) == 16
    parts = torch.tensor([image.losses for image in result.images])
    torch.testing.assert_close(parts.sum(0), result.result.losses, rtol=1e-5, atol=1e-7)


@pytest.fixture
def validations(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The AP of the first class in each validation so far. It rises; that of the second class is 0."""
    values: list[float] = []

    def rising(*given: Any) -> Evaluation:
        evaluation = evaluate(*given)
        values.append((len(values) + 1) / 10)
        ap = np.zeros_like(evaluation.metrics.ap)
        ap[0] = values[-1]
        return replace(evaluation, metrics=replace(evaluation.metrics, ap=ap))

    monkeypatch.setattr(session, "evaluate", rising)
    return values


def test_validations_are_repeated_if_draws_depend_on_them(tmp_path: Path, validations: list[float]) -> None:
    config = make_config(tmp_path, 0, {"nosave": True}, epochs=2, image_weights=True, noval=False)
    run_dir = fit(config, quiet=True).run_dir
    validations.clear()
    result = replayed(run_dir, tmp_path, step=5)
    assert (result.before, result.agreement.compared, result.agreement.equal) == (0, 5, 5)
    assert validations == [0.1]


def test_a_replay_without_validations_does_not_stop_early(tmp_path: Path, validations: list[float]) -> None:
    config = make_config(tmp_path, 0, {"keep_checkpoints": 99}, epochs=3, patience=1, noval=False)
    run_dir = fit(config, quiet=True).run_dir
    for folder in list(newest_first(run_dir))[:2]:
        shutil.rmtree(folder)
    validations.clear()
    result = replayed(run_dir, tmp_path, step=8)
    assert (result.before, result.agreement.compared, result.agreement.equal) == (3, 5, 5)
    assert validations == []


def test_the_gradients_of_the_layers_are_those_that_are_clipped(run: Path, tmp_path: Path) -> None:
    result = replayed(run, tmp_path, step=8)
    whole = sum(layer.gradient**2 for layer in result.layers) ** 0.5
    assert whole == pytest.approx(result.result.gradient_norm, rel=1e-5)
    assert result.layers[0].layer == "model.0.conv"


def test_the_run_is_not_touched_and_the_files_are_in_a_folder_of_their_own(run: Path, tmp_path: Path) -> None:
    before = contents(run)
    for _ in range(2):
        result = replayed(run, tmp_path, step=8, placement={"noplots": False})
    assert contents(run) == before
    assert result.folder == tmp_path / "runs" / "replay" / "exp2"
    assert {path.name for path in result.folder.iterdir()} == {
        "replay.json", *(f"microbatch{number}.jpg" for number in range(4))}
    tree = json.loads((result.folder / "replay.json").read_text())
    assert tree["loss"] == dict(zip(("box", "obj", "cls"), result.result.losses.tolist(), strict=True))
    assert [len(image["boxes"]) for image in tree["images"]] == [len(image.boxes) for image in result.images]
    assert all(Path(image["files"][0]).exists() for image in tree["images"])


def test_pruned_checkpoints_mean_more_steps(run: Path, tmp_path: Path) -> None:
    """Without the checkpoint of step 6, the nearest one is a whole file of weights/, and then the start."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    newest, older = newest_first(copy)
    shutil.move(older / "state.pt", copy / "weights" / "epoch1.pt")
    shutil.move(older / "MANIFEST.json", copy / "weights" / "epoch1.json")
    older.rmdir()
    assert replayed(copy, tmp_path, step=8).before == 6
    (copy / "weights" / "epoch1.pt").unlink()
    result = replayed(copy, tmp_path, step=8)
    assert (result.before, result.agreement.equal) == (0, 8)
    assert newest.name == "step-9"


def test_a_damaged_checkpoint_is_reported_and_not_used(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "checkpoints" / "step-6" / "state.pt").write_bytes(b"torn")
    assert command([str(copy), "--step", "7", "--storage-path", str(tmp_path), "--noplots"]) == 0
    output = capsys.readouterr().out
    assert "WARNING: not used: checkpoints/step-6/state.pt: 4 bytes instead of" in output
    assert "trains 7 steps again, from the start, as no earlier checkpoint exists" in output
    assert (copy / "checkpoints" / "step-6" / "state.pt").read_bytes() == b"torn"


def train_on_two(collectives: Collectives, spec: TrainSpec) -> int:
    """A training of `spec` on this worker; the first one writes the log."""
    log = EventLog(spec.run_dir / EVENTS_FILE) if collectives.rank == 0 else None
    context = WorkerContext(prepare_model=lambda model: wrap_model(model, collectives))
    summary = run_session(spec, context, Placement(nosave=False), log.append if log else lambda event: None,
                          Rendezvous(collectives))
    assert summary is not None
    return summary.step


@pytest.mark.timeout(300)
def test_a_step_of_a_run_on_two_workers_is_replayed_on_one(run: Path, tmp_path: Path) -> None:
    record = read_record(run)
    assert isinstance(record, RunRecord)
    _, train, val = read_dataset(record.recipe)
    folder = tmp_path / "two"
    folder.mkdir()
    shutil.copy(run / RECORD_FILE, folder)
    assert run_workers(2, train_on_two, spec_of(record, folder, 2, train, val)) == [9, 9]
    events = read_events(folder / EVENTS_FILE)
    assert {event.num_workers for event in events if event.type == "start"} == {2}
    result = replayed(folder, tmp_path, step=8)
    assert (result.before, result.agreement.compared, result.agreement.equal) == (6, 2, 2)


def test_a_run_in_a_bucket_is_replayed_by_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another machine, which has no working copy. The results go to a bucket, too, if the storage path is one."""
    bucket = f"file://{tmp_path}/bucket"
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "one"))
    fit(make_config(tmp_path, 0, {"storage_path": bucket}, epochs=EPOCHS), quiet=True)
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "two"))
    stored = contents(tmp_path / "bucket")
    result = replayed(f"{bucket}/runs/train/exp", bucket, step=8)
    assert (result.before, result.agreement.compared, result.agreement.equal) == (6, 2, 2)
    new = contents(tmp_path / "bucket")
    assert {name: new[name] for name in stored} == stored
    assert "runs/replay/exp/replay.json" in new.keys() - stored.keys()


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which one weight becomes NaN after step 4, and which ends after ten skipped steps."""
    folder = tmp_path_factory.mktemp("poisoned")
    after_step = Session.after_step

    def poison(worker: Session, *args: Any) -> None:
        if worker.learner.state.progress.step == 4:
            worker.learner.model.model[2].m[0].cv1.conv.weight.data[0, 0] = float("nan")
        after_step(worker, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "after_step", poison)
        with pytest.raises(TrainingError, match="not finite 10 times"):
            fit(make_config(folder, 0, {"save_steps": 1, "keep_checkpoints": 99}, epochs=9), quiet=True)
    return folder / "runs" / "train" / "exp"


def test_the_module_of_the_first_nan_is_named(
    poisoned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([str(poisoned), "--around", "nan", "--storage-path", str(tmp_path), "--noplots"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("step 5 of ")
    assert ": trains 1 step again, from its checkpoint at step 4\n" in output
    assert "first not finite: before the step: model.2.m.0.cv1.conv, weight\n" in output
    assert "then: in the forward pass of microbatch 0: model.2.m.0.cv1.conv, output\n" in output
    assert "then: in the loss of microbatch 0: loss, box\n" in output
    assert "skipped, no weight has changed" in output
    tree = json.loads((tmp_path / "runs" / "replay" / "exp" / "replay.json").read_text())
    assert tree["loss"]["box"] is None
    assert tree["log"]["equal"] == tree["log"]["compared"] == 1


def test_the_step_that_ended_a_run_can_be_replayed(poisoned: Path, tmp_path: Path) -> None:
    """Ten steps in a row were skipped, so that the training of the last one fails again."""
    events = read_events(poisoned / EVENTS_FILE)
    last = max(event.step for event in only(StepEvent, events))
    assert last == 14
    result = replayed(poisoned, tmp_path, step=last)
    assert result.result.skipped
    assert [found.phase for found in result.not_finite][:3] == ["weights", "forward", "loss"]


class Exploding(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(_: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * torch.inf


@pytest.fixture
def _exploding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks whose layer 3 has a finite output, and an infinite gradient towards the layers before it."""
    forward = Detector.forward

    def explode(detector: Detector, images: torch.Tensor) -> Any:
        hook = detector.model[3].register_forward_pre_hook(lambda _, inputs: Exploding.apply(*inputs))
        try:
            return forward(detector, images)
        finally:
            hook.remove()

    monkeypatch.setattr(Detector, "forward", explode)


@pytest.mark.usefixtures("_exploding")
def test_a_gradient_that_explodes_is_found_in_the_backward_pass(run: Path, tmp_path: Path) -> None:
    result = replayed(run, tmp_path, step=7)
    assert result.result.skipped
    first, *rest = result.not_finite
    assert first == ("backward", "model.2.cv3", "gradient of its output", 0)
    assert [found.phase for found in rest] == ["sum"]
    assert result.agreement.first is None  # the loss of that step was finite, as in the log


def test_reasons_for_other_losses_are_reported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    record = read_record(copy)
    assert isinstance(record, RunRecord)
    write_record(copy, record.model_copy(update={"provenance": {**record.provenance, "torch": "1.0"}}))
    log = copy / EVENTS_FILE
    log.write_text(log.read_text().replace('"threads": 1', '"threads": 3').replace('"threads":1', '"threads":3'))
    monkeypatch.setattr(replay_module, "device_name", lambda device: "another processor")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["type"] == "step" and line["step"] == 8:
            line["loss"][0] *= 1.001
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert command([str(copy), "--step", "9", "--storage-path", str(tmp_path), "--noplots"]) == 0
    output = capsys.readouterr().out
    assert "the losses of 2 of 3 logged steps are those of the log; the first difference is at step 8" in output
    assert "the largest is 0.001 of the logged value" in output
    assert "    torch: 1.0 then, " in output
    assert "    threads: 3 then, 1 now" in output  # the recipe fixes one
    assert ", another processor now" in output


@pytest.mark.parametrize(("words", "reason"), [
    ((), "give either --step N or --around"),
    (("--step", "3", "--around", "nan"), "give either --step N or --around"),
    (("--step", "0"), "expected a whole number >= 1"),
    (("--step", "10"), "--step 10: the last step in the log of .* is 9"),
    (("--around", "nan"), "loss and gradient of every step in the log are finite"),
    (("--step", "3", "--set", "placement.num_workers=2"), "a replay runs in this process"),
])
def test_a_step_that_is_none_is_refused(run: Path, tmp_path: Path, words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        command([str(run), *words, "--storage-path", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_what_is_no_run_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no events\.jsonl; give the folder of a run"):
        command([str(tmp_path / "none"), "--step", "1"])
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / EVENTS_FILE).touch()
    with pytest.raises(InputError, match=r"has no run\.json; give the folder of a run"):
        replayed(folder, tmp_path, step=1)
    shutil.copy(run / RECORD_FILE, folder)
    with pytest.raises(InputError, match="its log has no step yet"):
        replayed(folder, tmp_path, step=1)
    write_record(folder, SweepRecord(digest="", space="quick", trials=1))
    with pytest.raises(InputError, match="is a sweep; give the folder of one of its trials"):
        replayed(folder, tmp_path, step=1)
    with pytest.raises(ResourcesError):
        replayed(run, tmp_path, step=1, placement={"gpus_per_worker": 1})


def test_other_labels_are_refused_and_a_moved_data_set_is_given_anew(run: Path, tmp_path: Path) -> None:
    record = read_record(run)
    assert isinstance(record, RunRecord)
    data = Path(record.recipe.data).parent
    moved = tmp_path / "moved"
    shutil.copytree(data, moved)
    result = replayed(run, tmp_path, step=7, data=str(moved / "data.yaml"))
    assert (result.agreement.equal, result.reasons) == (1, ())
    os.utime(next((moved / "images" / "train").iterdir()), (0, 0))
    reason, = replayed(run, tmp_path, step=7, data=str(moved / "data.yaml")).reasons
    assert reason.startswith("pictures: their files have other sizes or times than at the run's last start")
    next((moved / "labels" / "train").glob("*.txt")).write_text("0 0.5 0.5 0.1 0.1\n")
    with pytest.raises(DatasetError, match=r"moved/data\.yaml: has other training labels than"):
        replayed(run, tmp_path, step=7, data=str(moved / "data.yaml"))
