"""Sweeps whose runs lie in a store: what is there before anything follows from it, and who goes on with it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray.tune

from ray_yolo import cli
from ray_yolo.checkpoints.state_file import digest, read_state
from ray_yolo.config.yaml import to_yaml
from ray_yolo.core.events import CheckpointEvent, StartEvent
from ray_yolo.runs.remote_run import read_log
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.storage import lease
from ray_yolo.storage.lease import LEASE
from ray_yolo.storage.store import FolderStore, Store, open_store
from ray_yolo.tune.files import drop_weights, keep_best
from ray_yolo.tune.ledger import read_ledger, read_trials, verify
from ray_yolo.tune.ledger_events import CountedEvent, ProposedEvent
from ray_yolo.tune.mlflow import _child
from ray_yolo.tune.search import TuneConfig
from ray_yolo.tune.task import payload_of
from ray_yolo.tune.trainable import train_task
from ray_yolo.tune.verification import compare
from tests.process.tune.test_sweep_kill import RECIPE as LEARNS
from tests.process.tune.test_sweep_kill import SPACE as GENES
from tests.support import checkpoints, run_log
from tests.support.processes import kill, on_machine
from tests.support.schedules import propose
from tests.support.sweeps import make_sweep
from tests.unit.tune.test_stored import Start, bucket, die, logged, saved, scheduled, start, stored, train

__all__ = ["bucket", "start"]  # fixtures
TRIALS = 4


def counted(trial: int, fitness: float) -> CountedEvent:
    return CountedEvent(trial=trial, seed=0, epochs=2, fitness=fitness)


def test_each_line_is_in_the_store_before_anything_follows_from_it(start: Start, bucket: FolderStore) -> None:
    run, ledger = start()
    propose(ledger)
    assert read_log(bucket) == ledger.path.read_bytes()
    ledger.append(scheduled(0))
    (run.folder / "evolve.csv").write_text("0")
    ledger.append(counted(0, 0.5))
    ledger.append(scheduled(0))
    die(run)
    again, continued = start("two")
    assert (continued.trials, again.folder.name) == (ledger.trials, "exp")
    assert (again.folder / "evolve.csv").read_text() == "0"
    continued.append(counted(0, 0.25))
    ledger.append(counted(0, 0.125))  # by the first driver, which was taken for dead
    assert stored(run).is_lost
    die(again)
    assert start("three")[1].lines == continued.lines


def test_a_trial_that_ended_unseen_is_reported_by_another_machine(start: Start, tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    run, ledger = start()
    propose(ledger)
    train(run, "trial0", 1)
    die(run)
    again, ledger = start("two")
    config = make_sweep(tmp_path)
    placement = config.placement.model_copy(update={"storage_path": f"file://{tmp_path}/bucket"})
    payload = payload_of(placement, config.recipe, again.folder, None, is_stored=True)
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "of Ray's processes"))
    reports: list[dict[str, Any]] = []
    monkeypatch.setattr(ray.tune, "report", reports.append)
    train_task({"trial": "trial0", "genes": {"lr0": 0.01}, "seed": 0, "until": 1, "end": 1.0}, payload, None)
    assert [json.loads(report["outcome"])["weights"] for report in reports] == ["ab"]
    assert not (tmp_path / "of Ray's processes").exists()


def test_weights_of_the_beaten_leave_the_store_and_the_best_come_from_anywhere(
        start: Start, bucket: FolderStore, tmp_path: Path) -> None:
    run, _ = start()
    folders = [train(run, f"trial{number}", number, ends=number < 2) for number in range(3)]
    bucket.put("trials/trial0/detections.npy", b"x")
    for _ in range(2):
        drop_weights(folders[0])
    for name in ("checkpoints", "states", "weights"):
        assert bucket.list(f"trials/trial0/{name}/") == []
    assert {"finished", "log/", "run.json"} <= {entry.name for entry in bucket.list("trials/trial0/")}
    assert bucket.list("trials/trial1/states/")
    die(run)
    again, ledger = start("two")
    for number in (1, 2):  # one has weights of its own there, the other pointers
        propose(ledger)
        keep_best(again.folder, [again.folder / "trials" / f"trial{number}"])
        assert checkpoints.value(again.folder / "weights" / "best.pt") == number
    bucket.put("trials/trial1/mlflow.json", b'{"run_id": "its"}')
    assert [_child(again.folder, f"trial{number}") for number in range(2)] == [None, "its"]


@contextmanager
def command(config: TuneConfig, storage: str, machine: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The sweep's command on a machine with a cluster of its own, of which nothing is left after this."""
    file = machine.with_suffix(".yaml")
    file.write_text(to_yaml({
        "recipe": config.recipe.model_dump(mode="json"), "sweep": config.sweep.model_dump(mode="json"),
        "placement": {"storage_path": storage, "project": "runs/evolve", "noplots": True, "mlflow_uri": "off"}}))
    with on_machine(machine, "-m", "ray_yolo.tune", "--config", file) as process:
        yield process


def finished(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors.decode()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("s3")
def test_a_killed_sweep_goes_on_on_another_machine_as_if_nothing_had_been(tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_sweep(tmp_path, GENES, recipe=LEARNS, trials=TRIALS, max_concurrent=1)
    with command(config, str(tmp_path), tmp_path / "uninterrupted") as process:
        finished(process)
    uninterrupted = tmp_path / "runs/evolve/exp"
    address = "s3://bucket/x/runs/evolve/exp"
    store = open_store(address)
    with command(config, "s3://bucket/x", tmp_path / "one") as process:
        while not store.list("trials/trial1/checkpoints/"):
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            time.sleep(0.05)
        kill(process)
    for key in (LEASE, f"trials/trial1/{LEASE}"):  # as if they had expired
        terms = lease.read_terms(store, key)
        assert terms
        store.put(key, lease.Terms(terms[0].attempt, "", "").to_bytes())
    with command(config, "s3://bucket/x", tmp_path / "two") as process:
        finished(process)
    (folder,) = (tmp_path / "two" / "spool").glob("*/runs/evolve/exp")
    check(folder, store, uninterrupted)
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "three"))
    assert cli.status([address]) == cli.verify([address]) == 0


def check(folder: Path, store: Store, uninterrupted: Path) -> None:
    """A sweep that went on on its second machine while trial 1 was trained, in its folder there and in the store."""
    ours, theirs = read_ledger(folder / LEDGER_FILE), read_ledger(uninterrupted / LEDGER_FILE)
    assert [type(line) for line in ours if isinstance(line, ProposedEvent)] == [ProposedEvent] * TRIALS
    assert verify(ours) == []
    assert compare(ours[1:], theirs[1:]) is None  # the recipes have other paths
    assert read_log(store) == (folder / LEDGER_FILE).read_bytes()
    for number in range(TRIALS):
        trained = saved(list(run_log.events_of(uninterrupted / "trials" / f"trial{number}", CheckpointEvent)))
        stored = saved(logged(store, f"trial{number}"))
        assert stored.items() <= trained.items()  # the one before the kill may be stored but not reported
        assert stored[max(trained)]
    assert run_log.only(StartEvent, logged(store, "trial1"))[-1].step > 0
    for name in ("evolve.csv", "hyp_evolve.yaml"):
        assert store.get(name).data == (folder / name).read_bytes() == (uninterrupted / name).read_bytes()
    assert store.get("finished").data == b""
    assert store.get("weights/best.pt").data == (folder / "weights/best.pt").read_bytes()
    assert digest(read_state(folder / "weights/best.pt")) == digest(read_state(uninterrupted / "weights/best.pt"))
    best = ours[-1].winner
    for number in read_trials(ours):
        there = [entry.name for entry in store.list(f"trials/trial{number}/")]
        assert ("states/" in there) == ("weights/" in there) == (number == best)
        assert {"finished", "log/", "run.json", "results.csv"} <= set(there)
