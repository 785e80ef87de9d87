"""Trainings whose runs lie in a store: killed, continued on another machine, with storage that is away for a while."""

from __future__ import annotations

import builtins
import errno
import io
import json
import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints.state_file import digest, read_state
from ray_yolo.config.commands import ValConfig
from ray_yolo.config.placement import RunConfig
from ray_yolo.core.errors import TrainingError
from ray_yolo.core.events import CheckpointEvent, StepEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.remote_run import read_log
from ray_yolo.runs.verification import compare_runs
from ray_yolo.runtime.trainer import TrainResult, fit
from ray_yolo.runtime.validator import validate
from ray_yolo.storage import lease
from ray_yolo.storage.lease import LEASE
from ray_yolo.storage.store import FolderStore, Store, open_store
from tests.support import run_log
from tests.support.jobs import make_config
from tests.support.machines import wait_for
from tests.support.object_storage import Relay, upload
from tests.support.processes import kill, on_machine

TRAIN = """
import sys
from ray_yolo.config.placement import RunConfig
from ray_yolo.runtime.trainer import fit
if __name__ == "__main__":
    fit(RunConfig.model_validate_json(sys.argv[1]))
"""
EPOCHS = 4


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """The training, in a folder."""
    return fit(make_config(tmp_path_factory.mktemp("calm"), 0, {"save_steps": 2}, epochs=EPOCHS, noval=False),
               quiet=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "EXPIRES", 1.5)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.2)


def config(folder: Path, address: str, num_workers: int = 0) -> RunConfig:
    """The same in a store."""
    return make_config(folder, num_workers, {"storage_path": address, "save_steps": 2}, epochs=EPOCHS, noval=False)


@contextmanager
def train(machine: Path, config: RunConfig) -> Iterator[subprocess.Popen[bytes]]:
    """The command on a machine, of which nothing is left after this."""
    script = machine.with_suffix(".py")
    script.write_text(TRAIN)
    with on_machine(machine, script, config.model_dump_json()) as process:
        yield process


def kill_once_saved(process: subprocess.Popen[bytes], store: Store, step: int) -> None:
    """kill -9 of a driver and of all that it has started."""
    while not any(int(entry.name[12:-5]) >= step for entry in store.list("checkpoints/")):
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        time.sleep(0.05)
    kill(process)


def check(run_dir: Path, store: Store, uninterrupted: TrainResult) -> None:
    """A complete run, in its folder and in the store, with the weights of an uninterrupted one."""
    assert not any(found.problem for found in compare_runs(run_dir, uninterrupted.run_dir))
    assert max(event.step for event in run_log.events_of(run_dir, CheckpointEvent)) == 3 * EPOCHS
    assert store.get("finished").data == b""
    for name in ("weights/last.pt", "weights/best.pt", "results.csv", "detections.npy"):
        assert store.get(name).data == (run_dir / name).read_bytes()
    for kind in ("last", "best"):
        mine, theirs = (read_state(folder / "weights" / f"{kind}.pt") for folder in (run_dir, uninterrupted.run_dir))
        assert digest(mine) == digest(theirs)
    assert read_log(store) == (run_dir / EVENTS_FILE).read_bytes()
    rows = store.get("results.csv").data.decode().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(EPOCHS))


@pytest.mark.smoke
def test_killed_and_continued_on_another_machine(s3: dict[str, str], uninterrupted: TrainResult, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    address = "s3://bucket/killed"
    settings, store = config(tmp_path, address), open_store(f"{address}/runs/train/exp")
    with train(tmp_path / "one", settings) as process:
        kill_once_saved(process, store, 4)
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "two"))
    result = fit(settings, quiet=True)
    check(result.run_dir, store, uninterrupted)
    assert result.best_fitness == uninterrupted.best_fitness
    secrets = [path for path in tmp_path.rglob("*") if path.is_file() and b"canary" in path.read_bytes()]
    assert secrets == []


def test_a_data_set_in_a_store_trains_the_same_bits(s3: dict[str, str], uninterrupted: TrainResult, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    data = "s3://bucket/sets/tiny/data.yaml"
    settings = make_config(tmp_path, 0, {"save_steps": 2}, epochs=EPOCHS, noval=False, data=data)
    upload(tmp_path / "data", "s3://bucket/sets/tiny")
    shutil.rmtree(tmp_path / "data")
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "one"))
    result = fit(settings, quiet=True)
    for kind in ("last", "best"):
        mine, theirs = (read_state(each.run_dir / "weights" / f"{kind}.pt") for each in (result, uninterrupted))
        assert digest(mine) == digest(theirs)
    assert json.loads((result.run_dir / "run.json").read_text())["recipe"]["data"] == data
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "two"))
    found = validate(ValConfig.model_validate({  # of weights that know the address
        "weights": str(result.last), "placement": {"storage_path": "s3://bucket/vision", "noplots": True}}), quiet=True)
    assert found.metrics == pytest.approx(result.metrics, abs=1e-6)
    messages = json.loads(open_store("s3://bucket/vision/runs/val/exp").get("results.json").data)
    assert (messages["data"], messages["folder"]) == (data, "s3://bucket/vision/runs/val/exp")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_killed_and_continued_on_ray_workers(s3: dict[str, str], uninterrupted: TrainResult, tmp_path: Path) -> None:
    address = "s3://bucket/ray"
    settings, store = config(tmp_path, address, num_workers=2), open_store(f"{address}/runs/train/exp")
    with train(tmp_path / "one", settings) as process:
        kill_once_saved(process, store, 4)
    store.put(LEASE, lease.Terms(1, "", "").to_bytes())  # as if it had expired
    with train(tmp_path / "two", settings) as process:
        _, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors.decode()
    (run_dir,) = (tmp_path / "two" / "spool").glob("*/runs/train/exp")
    check(run_dir, store, uninterrupted)


@pytest.mark.parametrize("away", ["log", "all"])
def test_storage_that_is_away_for_a_while_costs_a_warning(uninterrupted: TrainResult, tmp_path: Path, away: str,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "one"))
    put, put_if, refused, states = FolderStore.put, FolderStore.put_if, list[str](), list[str]()

    def is_away(key: str) -> bool:
        """From the first checkpoint to the second epoch's end."""
        steps = [event.step for path in (tmp_path / "one").rglob(EVENTS_FILE) for event in read_events(path)
                 if isinstance(event, CheckpointEvent)]
        missed = sum("states" in each for each in refused)
        gone = max(steps, default=0) == 2 if away == "log" else bool(steps) and missed < 2
        if gone and (away == "all" or key.partition("/")[0] not in ("states", "checkpoints", "weights")):
            refused.append(key)
            return True
        return False

    def try_put(self: FolderStore, key: str, data: Any) -> None:
        if key.startswith("states/"):
            states.append(key)
        if away == "log" and len(states) == 2:  # the second checkpoint waits until the log was to be uploaded once
            wait_for(lambda: refused, 60)
        if is_away(key):
            raise OSError("SlowDown")
        put(self, key, data)

    def try_put_if(self: FolderStore, key: str, *rest: Any) -> Any:
        if is_away(key):
            raise OSError("SlowDown")
        return put_if(self, key, *rest)

    monkeypatch.setattr(FolderStore, "put", try_put)
    monkeypatch.setattr(FolderStore, "put_if", try_put_if)
    result = fit(config(tmp_path, f"file://{tmp_path}/bucket"), quiet=True)
    store = FolderStore(tmp_path / "bucket" / "runs/train/exp")
    assert refused
    messages = run_log.messages(result.run_dir)
    assert len([text for text in messages if text.startswith("storage: OSError: SlowDown. Training continues")]) <= 1
    missed = [text for text in messages if "could not be written (SlowDown)" in text]
    assert len(missed) == (2 if away == "all" else 0)
    assert messages
    check(result.run_dir, store, uninterrupted)


def test_a_driver_that_was_taken_for_dead_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "one"))
    store = FolderStore(tmp_path / "bucket" / "runs/train/exp")

    def take() -> None:
        while not store.list("checkpoints/"):
            time.sleep(0.01)
        store.put(LEASE, lease.Terms(2, "other", "elsewhere 4711").to_bytes())

    thief = threading.Thread(target=take)
    thief.start()
    with pytest.raises(TrainingError, match=r"attempt 2 of this run has started \(elsewhere 4711\)"):
        fit(config(tmp_path, f"file://{tmp_path}/bucket"), quiet=True)
    thief.join()
    messages = lease.read_terms(store, LEASE)
    assert messages
    assert messages[0].attempt == 2
    assert not store.list("finished")


def test_a_slow_bucket_loses_nothing(
    uninterrupted: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "one"))

    def slowly(method: Any) -> Any:
        return lambda *given: (time.sleep(0.3), method(*given))[1]

    for name in ("put", "put_if", "fetch", "get", "list"):
        monkeypatch.setattr(FolderStore, name, slowly(getattr(FolderStore, name)))
    monkeypatch.setattr(lease, "EXPIRES", 30.0)
    result = fit(config(tmp_path, f"file://{tmp_path}/bucket"), quiet=True)
    monkeypatch.undo()
    check(result.run_dir, FolderStore(tmp_path / "bucket" / "runs/train/exp"), uninterrupted)


class ReadOnly:
    """A folder whose file system refuses writes from the first checkpoint until it has refused two more of them."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.refused = folder, list[str]()
        for module, name in ((os, "open"), (io, "open"), (builtins, "open"), (os, "write"), (os, "mkdir"),
                             (os, "rename"), (os, "replace"), (os, "link"), (os, "unlink")):
            patch.setattr(module, name, self.guarded(getattr(module, name), name))

    @property
    def is_on(self) -> bool:
        return sum(".writing-" in path for path in self.refused) < 2 and any(
            os.path.isfile(f"{path}/MANIFEST.json") for path in self.folder.glob("runs/train/exp/checkpoints/step-*"))

    def guarded(self, deed: Any, name: str) -> Any:
        def try_it(first: Any, *rest: Any, **named: Any) -> Any:
            place = str(first)
            if name == "write":
                place = os.readlink(f"/proc/self/fd/{first}")
            mode = named.get("mode", rest[0] if rest else "r")
            reads = name == "open" and (not set(mode) & set("wax+") if isinstance(mode, str)
                                        else not mode & (os.O_WRONLY | os.O_RDWR))
            if not reads and place.startswith(str(self.folder)) and self.is_on:
                self.refused.append(place)
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), place)
            return deed(first, *rest, **named)

        return try_it


def test_a_folder_that_is_read_only_for_a_while_loses_nothing(uninterrupted: TrainResult, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_config(tmp_path, 0, {"save_steps": 2}, epochs=EPOCHS, noval=False)
    with monkeypatch.context() as patch:
        storage = ReadOnly(tmp_path, patch)
        result = fit(settings, quiet=True)
    assert sum(path.endswith(EVENTS_FILE) for path in storage.refused) > 2
    events = read_events(result.run_dir / EVENTS_FILE)
    assert [event.seq for event in events] == list(range(len(events)))
    missed = [text for text in run_log.messages(result.run_dir) if "could not be written" in text]
    assert len(missed) >= 2
    assert (result.run_dir / "finished").exists()
    assert (result.run_dir / "results.csv").read_text().count("\n") == EPOCHS + 1
    mine, theirs = (digest(read_state(run / "weights" / "last.pt")) for run in (result.run_dir, uninterrupted.run_dir))
    assert mine == theirs


STOPPED = """
import signal, sys
from ray_yolo.cli import run
from ray_yolo.config.placement import RunConfig
from ray_yolo.core.signals import raise_from_now_on
from ray_yolo.runtime.trainer import fit
def main():
    raise_from_now_on()
    return fit(RunConfig.model_validate_json(sys.argv[1])) and 0
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    sys.exit(run(main))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_ends_in_time_although_its_bucket_is_closed(
        s3: dict[str, str], tmp_path: Path, number: signal.Signals) -> None:
    """Each request to the bucket would wait for a minute. The newest save is on this machine's disk."""
    machine, name = tmp_path / "machine", f"closed-{number.name}"
    address = f"s3://bucket/{name}"
    settings = make_config(tmp_path, 0, {"storage_path": address, "save_steps": 2}, epochs=2000, noval=True)
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED)
    store = open_store(f"{address}/runs/train/exp")
    with Relay(s3["AWS_ENDPOINT_URL"]) as relay, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", relay.url)
        with on_machine(machine, script, settings.model_dump_json()) as process:
            while not store.list("checkpoints/"):
                assert process.poll() is None, process.stderr and process.stderr.read().decode()
                time.sleep(0.1)
            relay.delay = math.inf
            time.sleep(0.5)
            process.send_signal(number)
            start = time.monotonic()
            status = process.wait(120)
            seconds = time.monotonic() - start
    print(f"{number.name} with a closed bucket: {seconds:.1f} s")
    assert status == 128 + number
    assert seconds < 16  # 15 by the command's clock, and the exit of a process on a busy machine
    (log,) = machine.glob("*/*/runs/train/exp/events.jsonl")
    newest = max(event.step for event in run_log.only(StepEvent, read_events(log)))
    saved = int(next(checkpoint.newest_first(log.parent)).name.removeprefix("step-"))
    assert saved >= newest - 2  # a save waits for the upload of the one before
