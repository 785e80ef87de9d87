"""Trainings through Ray: the same as without it, whatever dies on the way."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints import state_file
from ray_yolo.config.commands import ValConfig
from ray_yolo.config.placement import RunConfig
from ray_yolo.core.errors import CheckpointError, ConfigError, DatasetError, InputError, ResourcesError, TrainingError
from ray_yolo.core.events import (
    FORMAT,
    EndEvent,
    EpochEvent,
    FailureEvent,
    ResourcesEvent,
    RunEvent,
    ShardEvent,
    StartEvent,
    StepEvent,
    Summary,
    WarningEvent,
    WorkerEvent,
)
from ray_yolo.core.system import cores
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.index import read_index
from ray_yolo.engine.callbacks import IN_TRAINING
from ray_yolo.engine.evaluate import Evaluation
from ray_yolo.engine.session import Session
from ray_yolo.engine.spec import TrainSpec
from ray_yolo.engine.team import Team
from ray_yolo.runs.event_log import read_events
from ray_yolo.runs.run_dir import begin_run
from ray_yolo.runtime import cluster, map_on_workers, node_checks, trainer
from ray_yolo.runtime.preflight import first_record, read_dataset, spec_of_run, with_workers
from ray_yolo.runtime.resources import NodeResources
from ray_yolo.runtime.trainer import TrainResult, fit
from ray_yolo.runtime.validator import validate
from ray_yolo.runtime.workers import torch_trainer, worker
from ray_yolo.runtime.workers.worker import train_worker
from tests.support import run_log
from tests.support.checkpoints import newest
from tests.support.jobs import make_config, make_dataset, make_spec

EXACT = {"exact": True, "noval": False, "epochs": 3, "optimizer": {"nominal_batch": 32, "clip_norm": 0.3}}


def weights(result: TrainResult) -> dict[str, Any]:
    state = newest(result.run_dir)
    return {f"{part}.{name}": value for part in ("model", "ema") for name, value in state[part].items()}


def assert_same(one: TrainResult, other: TrainResult) -> None:
    first, second = weights(one), weights(other)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert one.metrics == other.metrics


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return fit(make_config(tmp_path_factory.mktemp("calm"), 0, **EXACT), quiet=True)


@pytest.mark.smoke
def test_without_ray_a_run_keeps_weights_and_records(uninterrupted: TrainResult) -> None:
    assert uninterrupted.best.exists()
    assert uninterrupted.last.exists()
    assert uninterrupted.epochs == 3
    assert set(uninterrupted.metrics) == {"precision", "recall", "mAP50", "mAP50-95"}
    rows = (uninterrupted.run_dir / "results.csv").read_text().splitlines()
    assert [row.split(",")[0].strip() for row in rows] == ["epoch", "0", "1", "2"]
    assert run_log.events_of(uninterrupted.run_dir, EndEvent)[-1].status == "done"
    assert [event.format for event in run_log.events_of(uninterrupted.run_dir, RunEvent)] == [FORMAT]
    for name in ("hyp.yaml", "opt.yaml", "run.json", "finished"):
        assert (uninterrupted.run_dir / name).exists()


def test_an_ended_training_leaves_slim_weights_that_validate_to_the_bit(uninterrupted: TrainResult) -> None:
    whole = newest(uninterrupted.run_dir)
    for path in (uninterrupted.last, uninterrupted.best):
        state = state_file.read_state(path)
        assert state.keys() == {"meta", "ema"}
        assert json.loads(state["meta"])["names"] == json.loads(whole["meta"])["names"]
        assert path == uninterrupted.best or all(
            torch.equal(value, whole["ema"][name]) for name, value in state["ema"].items()
        )
    found = validate(ValConfig.model_validate({"weights": str(uninterrupted.last), "placement": {
        "num_workers": 0, "project": str(uninterrupted.run_dir / "val")}}), quiet=True)
    assert found.metrics == uninterrupted.metrics


def test_weights_that_cannot_be_made_slim_are_a_warning_and_complete(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "slim_weights", refuse)
    result = fit(make_config(tmp_path, 0, epochs=1), quiet=True)
    assert state_file.read_state(result.last).keys() > {"model", "optimizer"}
    assert (result.run_dir / "finished").exists()
    assert run_log.messages(result.run_dir)[-1].startswith("weights/ still holds whole checkpoints: [Errno 28]")


def test_open_settings_use_the_machine_and_are_printed_and_recorded(tmp_path: Path) -> None:
    config = make_config(tmp_path, 0, {"cpus_per_worker": "auto", "workers": 0}, epochs=1, threads=0)
    threads = torch.get_num_threads()
    try:
        result = fit(config, quiet=True)
        assert torch.get_num_threads() == cores()
    finally:
        torch.set_num_threads(threads)
    (event,) = run_log.events_of(result.run_dir, ResourcesEvent)
    assert (event.cpus, event.threads, event.loader_processes, event.cache) == (cores(), cores(), 0, "ram")
    assert [reason.split()[1] for reason in event.reasons] == ["CPUs", "GB"]
    options = yaml.safe_load((result.run_dir / "opt.yaml").read_text())["placement"]
    assert (options["cpus_per_worker"], options["workers"], options["cache"]) == (cores(), 0, "ram")


def test_auto_workers_are_chosen_once_and_printed_with_the_reason(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = make_config(tmp_path, 0, {"num_workers": "auto"}, epochs=1)
    monkeypatch.setitem(sys.modules, "ray", None)  # nothing of it is imported
    result = fit(config, quiet=True)
    (event,) = run_log.events_of(result.run_dir, ResourcesEvent)
    assert event.reasons[0] == ("--num-workers auto: 0, in this process: no cluster was requested, and there is at "
                               "most one GPU")
    assert yaml.safe_load((result.run_dir / "opt.yaml").read_text())["placement"]["num_workers"] == 0
    assert json.loads((result.run_dir / "run.json").read_bytes())["num_workers"] == 0


@pytest.mark.parametrize(("asked", "trained"), [("auto", 2), (1, 1)])
def test_a_run_keeps_the_workers_of_its_first_start_unless_others_are_requested(
        tmp_path: Path, asked: Any, trained: int) -> None:
    begun = make_config(tmp_path, 2, epochs=1)
    _, train, _ = read_dataset(begun.recipe)
    run = begin_run(begun.placement, first_record(begun, train, 0.0, ["train"]))
    given = make_config(tmp_path, 0, {"num_workers": asked}, epochs=1)
    assert with_workers(given, run)[0].placement.num_workers == trained
    run.release()


def test_a_cluster_decides_but_no_step_has_fewer_parts_than_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                    ) -> None:
    monkeypatch.setattr("ray_yolo.runtime.cluster.connect", lambda placement: 1.0)
    monkeypatch.setattr("ray_yolo.runtime.cluster.free_nodes", lambda placement: [NodeResources(64, 6.0)])
    given = {"num_workers": "auto", "address": "10.0.0.1:6379"}
    for batch, workers, limit in ((None, 6, ""), (16, 4, "; a step of this recipe cannot be shared by more than 4")):
        config = make_config(tmp_path, 0, given, epochs=1, batch_size=batch, microbatch=None,
                             optimizer={"nominal_batch": 4})
        chosen, why = with_workers(config, None)
        assert (chosen.placement.num_workers, why) == (
            workers, f"--num-workers auto: {workers}, free GPUs: 6{limit}")


def test_a_picture_that_cannot_be_drawn_is_a_warning_and_the_training_has_ended_well(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no ink")

    monkeypatch.setattr("ray_yolo.sinks.pictures.plot_labels", refuse)
    result = fit(make_config(tmp_path, 0, {"noplots": False}, epochs=1), quiet=True)
    assert (result.run_dir / "finished").exists()
    assert run_log.messages(result.run_dir) == [
        "pictures: not drawn: labels.jpg (OSError: no ink)"]
    assert (result.run_dir / "results.png").exists()


def test_a_training_whose_sinks_and_records_all_fail_has_ended_well(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for place in ("results_csv.format_results", "tensorboard.TensorBoard.update", "pictures.Pictures.update",
                  "console.Console.update"):
        monkeypatch.setattr(f"ray_yolo.sinks.{place}", refuse)
    (tmp_path / "mine.py").write_text("def on_run_end(result):\n    raise OSError(28, 'No space left on device')\n")
    result = fit(make_config(tmp_path, 0, {"noplots": False, "callbacks": str(tmp_path / "mine.py")}, epochs=1))
    assert (result.run_dir / "finished").exists()
    messages = [message.partition(":")[0] for message in run_log.messages(result.run_dir)]
    assert sorted(messages) == ["TensorBoard", "console", "pictures", "results.csv"]


def test_weights_of_a_best_epoch_that_could_not_be_written_are_not_claimed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validate, save, refused = Session.validate, checkpoint.save_checkpoint, []

    def measured(self: Session, team: Team) -> Evaluation:
        found = validate(self, team)
        value = [0.1, 0.9, 0.5][self.learner.state.progress.epoch]
        return replace(found, metrics=replace(found.metrics, map50=value, map=value))

    def refuse_the_second_best(run_dir: Path, state: dict[str, Any], step: int, digest: str, kinds: list[str]) -> Path:
        if "best" in kinds and (run_dir / "weights" / "best.pt").exists():
            refused.append(step)
            raise OSError(28, "No space left on device")
        return save(run_dir, state, step, digest, kinds)

    monkeypatch.setattr(Session, "validate", measured)
    monkeypatch.setattr(checkpoint, "save_checkpoint", refuse_the_second_best)
    result = fit(make_config(tmp_path, 0, epochs=3, noval=False), quiet=True)
    assert len(refused) == 1
    messages = run_log.messages(result.run_dir)
    assert messages[1:] == ["weights/best.pt is of epoch 1: the best weights, of epoch 2, could not be written"]
    assert (result.best_epoch, result.best_fitness) == (1, pytest.approx(0.1))
    assert result.metrics["mAP50"] == 0.1  # of the weights that are there, not of the last epoch


def test_a_resumed_run_says_what_has_no_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(tmp_path, 0, epochs=1)
    run_dir = fit(config, quiet=True).run_dir
    (run_dir / "finished").unlink()
    resumed = config.placement.model_copy(update={"resume": str(run_dir), "priority": 2})
    fit(RunConfig(placement=resumed))
    assert "no effect: priority (the training is in this process, without Ray)\n" in capsys.readouterr().err


def test_the_first_start_says_what_repeats_its_weights(uninterrupted: TrainResult, tmp_path: Path) -> None:
    config = make_config(tmp_path, 0, {"name": "mine"}, batch_size=None, microbatch=None, epochs=1)
    (fit(config, quiet=True).run_dir / "finished").unlink()
    run_dir = fit(config, quiet=True).run_dir
    [event] = run_log.events_of(run_dir, RunEvent)
    assert event.notes == ("batch_size follows the workers; the same weights on another number of workers: add "
                           "--batch-size 16 --microbatch 16",
                           "no effect: noval (the last epoch is validated in any case, and there is one)",
                           "no effect: patience (under noval, there is no validation before the last epoch)")
    assert run_log.messages(run_dir) == run_log.messages(uninterrupted.run_dir) == []


def test_a_file_of_callbacks_is_executed_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from pathlib import Path\n"
                                      "with (Path(__file__).parent / 'executed').open('a') as file:\n"
                                      "    file.write('.')\ndef on_run_end(result):\n    pass\n")
    fit(make_config(tmp_path, 0, {"callbacks": str(tmp_path / "mine.py")}, epochs=1), quiet=True)
    assert (tmp_path / "executed").read_text() == "."


def test_functions_of_the_first_worker_see_each_microbatch_step_and_validation(
        uninterrupted: TrainResult, tmp_path: Path) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    functions = {name: partial(lambda name, event: calls.append((name, event)), name) for name in IN_TRAINING}
    result = fit(make_config(tmp_path, 0, **EXACT), quiet=True, functions=functions)
    assert_same(uninterrupted, result)  # they change no bit
    seen = {name: [event for called, event in calls if called == name] for name in IN_TRAINING}
    steps = [event["step"] for event in seen["on_step_end"]]
    assert steps == list(range(1, steps[-1] + 1))
    assert {event["step"] for event in seen["on_batch_end"]} == set(steps)
    for step in steps:
        parts = [event for event in seen["on_batch_end"] if event["step"] == step]
        images = sum(part["images"] for part in parts)
        whole = seen["on_step_end"][step - 1]
        assert images == whole["images"]
        assert [part["epoch"] for part in parts] == [whole["epoch"]] * len(parts)
        for term, loss in whole["loss"].items():
            assert loss == pytest.approx(sum(part["loss"][term] * part["images"] for part in parts) / images, rel=1e-5)
    rows = run_log.events_of(result.run_dir, EpochEvent)
    assert [event["metrics"] for event in seen["on_val_end"]] == [row.metrics for row in rows]
    assert {event["detections"].shape[1] for event in seen["on_val_end"]} == {8}
    assert [event["epoch"] for event in seen["on_val_end"]] == [0, 1, 2]


def stop_in_the_second_step(event: dict[str, Any]) -> str | None:
    return "stop" if event["step"] >= 2 else None


STOPS: dict[str, Callable[..., object]] = {
    "on_batch_end": stop_in_the_second_step, "on_step_end": stop_in_the_second_step, "on_val_end": lambda event: "stop",
    "on_epoch_end": lambda event: "stop"}


@pytest.mark.parametrize("name", STOPS)
@pytest.mark.parametrize("nosave", [False, True])
def test_stop_ends_a_training_as_its_last_epoch_would(name: str, nosave: bool, tmp_path: Path) -> None:
    config = make_config(tmp_path, 0, {"nosave": nosave}, **{**EXACT, "epochs": 50})
    result = fit(config, quiet=True, functions={name: STOPS[name]})
    end = run_log.events_of(result.run_dir, EndEvent)[-1]
    assert end.reason == f"{name} returned 'stop'"
    ends = not (nosave and name == "on_epoch_end")  # a function of the driver ends no worker that does not save
    assert (end.status, result.paused, (result.run_dir / "finished").exists()) == (
        ("done", False, True) if ends else ("stopped", True, False))
    assert end.step < 100
    if ends:
        assert state_file.read_state(result.last).keys() == {"meta", "ema"}
        assert len(run_log.events_of(result.run_dir, EndEvent)) == 1
    if name in ("on_batch_end", "on_step_end"):
        assert end.step in (2, 3)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("name", ["on_step_end", "on_epoch_end"])
@pytest.mark.parametrize("workers", [2, (1, 2)])
def test_stop_ends_a_training_on_workers(workers: int | tuple[int, int], name: str, tmp_path: Path) -> None:
    config = make_config(tmp_path, workers, **{**EXACT, "epochs": 50})
    result = fit(config, quiet=True, functions={name: STOPS[name]})
    [end] = run_log.events_of(result.run_dir, EndEvent)
    assert (end.status, end.reason, end.step < 100) == ("done", f"{name} returned 'stop'", True)
    assert (result.run_dir / "finished").exists()
    assert state_file.read_state(result.last).keys() == {"meta", "ema"}
    if name == "on_step_end":
        assert end.step in (2, 3)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_the_first_worker_loads_the_functions_of_a_file_and_warns_of_their_errors(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nfrom pathlib import Path\ndef on_val_end(event):\n"
                                      "    Path(__file__).with_name(str(os.getpid())).touch()\n    raise KeyError(3)\n")
    placement = {"callbacks": str(tmp_path / "mine.py")}
    result = fit(make_config(tmp_path, 2, placement, **{**EXACT, "epochs": 1}), quiet=True)
    [pid] = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    first = next(event for event in run_log.events_of(result.run_dir, WorkerEvent) if event.worker == 0)
    assert pid == first.pid
    assert run_log.messages(result.run_dir) == [
        "callbacks: on_val_end: KeyError: 3 (mine.py, line 5: raise KeyError(3))"]


@pytest.mark.smoke
@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_two_workers_share_the_work_and_one_that_is_killed_costs_no_bit_of_the_result(
        uninterrupted: TrainResult, tmp_path: Path) -> None:
    config = make_config(tmp_path, 2, {"save_steps": 1}, **EXACT)
    log = tmp_path / "runs" / "train" / "exp" / "events.jsonl"
    killer = threading.Thread(target=kill_a_worker_after_an_epoch, args=(log,))
    killer.start()
    result = fit(config, quiet=True)
    killer.join()
    assert_same(result, uninterrupted)
    starts = run_log.events_of(result.run_dir, StartEvent)
    assert [start.num_workers for start in starts[:2]] == [2, 1]  # whether the other one comes in time
    assert all(start.regrouped for start in starts[1:])
    messages = run_log.messages(result.run_dir)
    (warning,) = [text for text in messages if not text.startswith("training stalls: ")]  # said on a busy machine
    assert warning.startswith(f"worker 1 on {socket.gethostname()}: ")
    assert warning.endswith("; it is replaced while the others continue")
    assert starts[1].step >= 1
    shards = {event.worker: event.images for event in run_log.events_of(result.run_dir, ShardEvent) if event.epoch == 0}
    assert set(shards) == {0, 1}
    assert sum(shards.values()) == 37
    assert min(shards.values()) > 10
    rows = (result.run_dir / "results.csv").read_text().splitlines()
    assert [row.split(",")[0].strip() for row in rows] == ["epoch", "0", "1", "2"]


def slow_to_save(config: dict[str, Any]) -> Summary | None:
    """A worker that takes four seconds to write the last state; the first one that does is killed then."""
    fsync, killed = os.fsync, Path(config["spec"]["run_dir"]) / "killed"

    def slowly(file: int) -> None:
        fsync(file)
        if os.readlink(f"/proc/self/fd/{file}").endswith("-step-6/state.pt"):
            time.sleep(4)
            if not killed.exists():
                killed.touch()
                signal.raise_signal(signal.SIGKILL)

    state_file.os = SimpleNamespace(**{**vars(os), "fsync": slowly})
    return train_worker(config)


@pytest.mark.smoke
@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_range_of_workers_gives_the_weights_of_one_process(uninterrupted: TrainResult, tmp_path: Path) -> None:
    result = fit(make_config(tmp_path, 0, {"num_workers": "1-2", "gpus_per_worker": 0}, **EXACT), quiet=True)
    assert_same(result, uninterrupted)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_slow_last_checkpoint_is_written_although_its_worker_is_killed(
        uninterrupted: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_trainer, "_END_SECONDS", 1.0)
    monkeypatch.setattr(worker, "train_worker", slow_to_save)
    result = fit(make_config(tmp_path, 2, **EXACT), quiet=True)
    assert (result.run_dir / "killed").exists()
    assert_same(result, uninterrupted)
    assert json.loads(state_file.read_state(result.last)["meta"])["progress"] == [3, 0, 6]
    assert [event.status for event in run_log.events_of(result.run_dir, EndEvent)] == ["done"]
    starts = run_log.events_of(result.run_dir, StartEvent)
    assert [(start.step, start.regrouped) for start in starts] == [(0, False), (6, True)]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_what_would_fail_again_is_not_tried_again_and_names_worker_and_node(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "weights.pt"
    torch.save({"model.0.conv.weight": torch.zeros(8, 3, 3, 3)}, weights)
    monkeypatch.setattr("ray_yolo.runtime.trainer.spec_of_run",
                        lambda *given: (weights.unlink(), spec_of_run(*given))[1])
    with pytest.raises(CheckpointError, match=rf"worker 0 on {socket.gethostname()}: .*no such weights file"):
        fit(make_config(tmp_path, 1, weights=str(weights)), quiet=True)
    run_dir = tmp_path / "runs" / "train" / "exp"
    assert [event.worker for event in run_log.events_of(run_dir, WorkerEvent)] == [0]  # begun once
    assert [event.status for event in run_log.events_of(run_dir, EndEvent)] == ["failed"]
    assert any("CheckpointError" in event.traceback for event in run_log.events_of(run_dir, FailureEvent))


def kill_a_worker_after_an_epoch(log: Path) -> None:
    pids: list[int] = []
    while not pids:
        time.sleep(0.01)
        pids = [event.pid for event in run_log.events_of(log.parent, ShardEvent) if event.worker == 1]
    os.kill(pids[0], signal.SIGKILL)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_request_larger_than_the_cluster_is_announced_then_refused_with_advice(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An autoscaler gets the request for nodes, and its end."""
    began, asked = time.monotonic(), []
    monkeypatch.setattr(cluster, "request_resources", lambda bundles: asked.append(bundles))
    config = make_config(tmp_path, 4, {"cpus_per_worker": 2, "wait_for_resources": 1})
    with pytest.raises(ResourcesError, match=r"4 workers need 8 CPU, the cluster has 4; use --num-workers"):
        fit(config, quiet=True)
    assert time.monotonic() - began < 30
    assert asked == [[{"CPU": 2}] * 4, []]
    assert "waiting for nodes, at most 1 s (--wait-for-resources): 4 workers need 8 CPU" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_start_without_room_leaves_nothing_and_the_advised_one_trains_its_own_batch(tmp_path: Path) -> None:
    placement = {"wait_for_resources": 0, "mlflow_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    config = make_config(tmp_path, 64, {**placement, "cpus_per_worker": 2}, batch_size=None, microbatch=None, epochs=1)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ResourcesError, match="64 workers need 128 CPU, the cluster has 4; use --num-workers 2,"):
        fit(config, quiet=True)
    assert sorted(tmp_path.rglob("*")) == before
    advised = config.placement.model_copy(update={"num_workers": (2, 2), "mlflow_uri": "off"})  # as 2, in places
    result = fit(RunConfig(recipe=config.recipe, placement=advised), quiet=True)
    assert result.run_dir.name == "exp"
    decided = json.loads((result.run_dir / "run.json").read_text())["recipe"]
    assert (decided["batch_size"], decided["microbatch"]) == (32, 16)


@pytest.mark.parametrize("name", ["", "mine"])
@pytest.mark.parametrize("check", ["connect", "wait_for_room", "check_nodes", "map_on_workers"])
def test_a_start_that_the_cluster_refuses_leaves_nothing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str, name: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ResourcesError(check)

    for passed in ("connect", "wait_for_room"):
        monkeypatch.setattr(cluster, passed, lambda *_: 0.0)
    monkeypatch.setattr(node_checks, "check_nodes", lambda *_: [])
    owner = {"check_nodes": node_checks, "map_on_workers": map_on_workers}.get(check, cluster)
    monkeypatch.setattr(owner, check, refuse)
    config = make_config(tmp_path, 2, {"name": name, "mlflow_uri": ""}, batch_size=-1, microbatch=None)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ResourcesError, match=check):
        fit(config, quiet=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_storage_is_tried_with_a_file_that_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Path] = []

    def look(place: Path, *_: object) -> None:
        assert place.exists()
        tried.append(place)
        raise InputError("seen")

    monkeypatch.setattr(cluster, "connect", lambda _: 0.0)
    monkeypatch.setattr(cluster, "wait_for_room", lambda *_: None)
    monkeypatch.setattr(node_checks, "check_nodes", look)
    with pytest.raises(InputError, match="seen"):
        fit(make_config(tmp_path, 1), quiet=True)
    assert tried[0].parent == tmp_path
    assert not tried[0].exists()


@pytest.mark.parametrize("place", ["console.Console.finish", "run_logger.Sinks.finish"])
def test_a_driver_that_dies_before_all_sinks_finish_is_completed_by_the_same_command(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    config = make_config(tmp_path, 0, {"noplots": False}, epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr(f"ray_yolo.sinks.{place}", die)
        with pytest.raises(KeyboardInterrupt):
            fit(config, quiet=True)
    run_dir = tmp_path / "runs" / "train" / "exp"
    assert not (run_dir / "finished").exists()
    result = fit(config, quiet=True)
    assert result.run_dir == run_dir
    assert (result.epochs, result.best_epoch) == (1, 1)
    assert [path.name for path in run_dir.parent.iterdir()] == ["exp"]
    assert (run_dir / "finished").exists()
    assert (run_dir / "results.png").exists()
    steps = run_log.events_of(result.run_dir, StepEvent)
    assert len(steps) == len({event.step for event in steps})
    assert run_log.events_of(result.run_dir, EndEvent)[-1].status == "done"


@pytest.mark.parametrize(("recipe", "error", "message"), [
    ({"data": "nowhere.yaml"}, InputError, r"nowhere\.yaml"),
    ({"model": "yolov5z"}, ConfigError, "yolov5"),
    ({"weights": "nowhere.pt"}, InputError, r"nowhere\.pt"),
])
def test_bad_input_is_refused_before_any_worker(
        tmp_path: Path, recipe: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fit(make_config(tmp_path, 0, **recipe), quiet=True)


def test_more_workers_than_parts_of_a_step_are_refused_with_the_legal_numbers(tmp_path: Path) -> None:
    config = make_config(tmp_path, 16)
    with pytest.raises(ConfigError, match=r"only 4 parts; use 1 to 4 workers"):
        fit(config, quiet=True)


def test_a_training_is_finished_only_once_its_weights_are_there(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, session = make_config(tmp_path, 0, epochs=1), trainer.run_session

    def lose_weights(job: TrainSpec, *rest: Any, **more: Any) -> Summary:
        summary = session(job, *rest, **more)
        (job.run_dir / "weights" / "last.pt").unlink()
        return summary

    monkeypatch.setattr(trainer, "run_session", lose_weights)
    with pytest.raises(TrainingError, match=r"last\.pt is missing"):
        fit(config, quiet=True)
    run_dir = tmp_path / "runs" / "train" / "exp"
    end = read_events(run_dir / "events.jsonl")[-1]
    assert isinstance(end, EndEvent)
    assert end.status == "failed"
    assert not (run_dir / "finished").exists()
    monkeypatch.undo()
    result = fit(config, quiet=True)
    assert result.run_dir == run_dir
    assert (run_dir / "finished").exists()
    assert result.last.exists()


def test_a_changed_data_set_is_not_resumed(uninterrupted: TrainResult, tmp_path: Path) -> None:
    config = make_config(tmp_path, 0, {"name": "mine"}, **EXACT)
    result = fit(config, quiet=True)
    (result.run_dir / "finished").unlink()
    label = next((tmp_path / "data" / "labels" / "train").iterdir())
    label.write_text("0 0.5 0.5 0.2 0.2\n")
    with pytest.raises(DatasetError, match="changed"):
        fit(config.model_copy(), quiet=True)


def test_a_bare_resume_knows_its_recipe_and_its_data(tmp_path: Path) -> None:
    config = make_config(tmp_path, 0, epochs=2)
    first = fit(config, quiet=True)
    (first.run_dir / "finished").unlink()
    placement = config.placement.model_copy(update={"resume": str(first.run_dir)})
    resumed = fit(RunConfig(placement=placement), quiet=True)  # of a recipe it knows nothing but the defaults
    assert resumed.run_dir == first.run_dir
    assert [event.epoch for event in run_log.events_of(resumed.run_dir, StartEvent)] == [0, 2]


@pytest.mark.parametrize("named", [True, False])
def test_a_run_continues_on_a_data_set_that_has_moved(tmp_path: Path, named: bool) -> None:
    """By the same command with its new place, and by `--resume` with it."""
    config = make_config(tmp_path, 0, {"name": "mine"} if named else {}, epochs=2)
    first = fit(config, quiet=True)
    (first.run_dir / "finished").unlink()
    (tmp_path / "data").rename(tmp_path / "moved")
    moved = str(tmp_path / "moved" / "data.yaml")
    resume = config.placement.model_copy(update={"resume": str(first.run_dir), "name": ""})
    with pytest.raises(DatasetError):
        fit(RunConfig(placement=resume), quiet=True)
    elsewhere = config.recipe.model_copy(update={"data": moved})
    again = fit(config.model_copy(update={"recipe": elsewhere}), quiet=True)
    (again.run_dir / "finished").unlink()
    resumed = fit(RunConfig.model_validate({"recipe": {"data": moved}, "placement": resume}), quiet=True)
    assert resumed.run_dir == again.run_dir == first.run_dir
    assert [event.epoch for event in run_log.events_of(first.run_dir, StartEvent)] == [0, 2, 2]


def test_a_worker_reads_its_own_nodes_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "driver"))
    description = read_description(f"file://{make_dataset(tmp_path / 'set', 4)}")
    train, val = (read_index(description, split) for split in ("train", "val"))
    monkeypatch.setattr(worker.ray, "put", lambda value: value)
    monkeypatch.setattr(worker.ray, "get", lambda values, timeout: values)
    payload = worker.to_payload(replace(make_spec(tmp_path, 4), train=train, val=val))
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "node"))
    job = worker.from_payload(payload)
    for mine, theirs in ((job.train, train), (job.val, val)):
        assert mine.digest == theirs.digest
        assert [path.partition("/node/")[2] for path in mine.paths] == [
            path.partition("/driver/")[2] for path in theirs.paths]
        assert all(Path(path).is_file() for path in mine.paths)


def test_ray_prepares_the_loader_and_leaves_the_copies_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own copies of batches that are dicts could be overwritten on the GPU before Ray 2.60."""
    prepared: list[Any] = []
    monkeypatch.setattr("ray.train.get_context", lambda: SimpleNamespace(get_world_size=lambda: 2))
    monkeypatch.setattr("ray.train.torch.prepare_data_loader",
                        lambda loader, **options: prepared.append((loader, options)) or loader)
    monkeypatch.setattr("ray.train.torch.get_device", lambda: torch.device("cpu"))
    host, loader = worker._assigned_context(on_pool=False), DataLoader([0, 1])
    assert host.prepare_loader(loader) is loader
    assert prepared == [(loader, {"move_to_device": False})]


def test_the_record_of_a_run_has_the_request_and_the_decisions(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_yolo.runtime.preflight.is_bf16_faster", lambda: False)
    result = fit(make_config(tmp_path, 0, epochs=1, precision="auto"), quiet=True)
    record = json.loads((result.run_dir / "run.json").read_text())
    assert record["asked"]["precision"] == "auto"
    assert record["recipe"]["precision"] == "fp32"
    assert record["architecture"]["nc"] == 2


def test_a_job_keeps_its_run_and_its_tracking_where_they_last_and_says_where(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    placement = {"project": str(tmp_path / "project"), "storage_path": "", "mlflow_uri": ""}
    result = fit(make_config(tmp_path, 0, placement, epochs=1))
    assert result.run_dir == tmp_path / "project" / "exp"
    assert (tmp_path / "project" / "mlflow.db").exists()
    assert not list(copy.iterdir())
    assert capsys.readouterr().out.startswith(
        "the current folder is Ray's copy of the job's files and is removed with the cluster; the run is in "
        f"{result.run_dir}\n")


def test_pictures_changed_between_two_commands_are_reported_once(tmp_path: Path) -> None:
    def warnings() -> list[str]:
        return [event.message for event in read_events(run / "events.jsonl") if isinstance(event, WarningEvent)]

    def until(epochs: int) -> RunConfig:
        placement = config.placement.model_copy(update={"stop_after": epochs})
        return config.model_copy(update={"placement": placement})

    config = make_config(tmp_path, 0, epochs=3)
    run = fit(until(1), quiet=True).run_dir
    picture = next((tmp_path / "data" / "images" / "train").iterdir())
    cv2.imwrite(str(picture), 255 - cv2.imread(str(picture)))  # of the same size; the label index does not see it
    fit(until(2), quiet=True)
    fit(config, quiet=True)
    warning, = (text for text in warnings() if "pictures" in text)
    assert warning.startswith("pictures of train have other sizes or times than when the run was started last")


@pytest.mark.parametrize("workers", [0, pytest.param((1, 2), marks=pytest.mark.ray)])
def test_a_time_limit_pauses_and_the_command_continues(
        tmp_path: Path, uninterrupted: TrainResult, workers: Any, request: pytest.FixtureRequest) -> None:
    if workers:
        request.getfixturevalue("ray_session")
    config = make_config(tmp_path, workers, {"max_hours": 1e-6}, **EXACT)
    paused = fit(config, quiet=True)
    end = run_log.events_of(paused.run_dir, EndEvent)[-1]
    assert (paused.paused, end.status, end.reason) == (True, "stopped", "paused after 1e-06 hours (--hours)")
    assert [step.step for step in run_log.events_of(paused.run_dir, StepEvent)] == [1]
    assert (paused.run_dir / "checkpoints" / "step-1" / "state.pt").exists()
    assert not (paused.run_dir / "finished").exists()
    result = fit(config.model_copy(update={"placement": make_config(tmp_path, workers).placement}), quiet=True)
    assert len({step.step for step in run_log.events_of(result.run_dir, StepEvent)}) > 1
    assert result.run_dir == paused.run_dir
    assert_same(result, uninterrupted)
