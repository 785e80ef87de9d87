"""The Weights & Biases run of a training: written offline, and continued online."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from ray_yolo.core.errors import TrackingError
from ray_yolo.sinks.wandb_run import WandbRun
from tests.support import run_log

FIRST = [run_log.run(run_id="mine"), run_log.start(), *run_log.trained_epoch(0)]
SECOND = [run_log.start(10), *run_log.trained_epoch(1), run_log.end(20)]
_BLOCK, _HEADER = 32768, 7


def stored(file: Path) -> Iterator[Any]:
    """The records of W&B's offline file: a log of LevelDB's format with a protobuf message each."""
    wandb.teardown()  # it waits until all is written
    data, place, message = file.read_bytes(), _HEADER, b""
    while place < len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place:place + _HEADER])
        message += data[place + _HEADER:place + _HEADER + size]
        place += _HEADER + size
        if kind in (1, 4):  # a whole message, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            message = b""
            yield record


def history(file: Path) -> list[dict[str, Any]]:
    """What was logged, one mapping for each step."""
    rows = []
    for record in stored(file):
        if record.WhichOneof("record_type") == "history":
            rows.append({".".join(item.nested_key) or item.key: json.loads(item.value_json)
                         for item in record.history.item})
    return rows


class TestOffline:
    @pytest.fixture(autouse=True)
    def _offline(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("WANDB_MODE", "offline")
        wandb.teardown()
        yield
        wandb.teardown()

    def test_resumed_training_is_one_run_with_every_epoch_once(self, tmp_path: Path) -> None:
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / "best.pt").write_bytes(b"weights")
        (tmp_path / "results.csv").write_text("epoch")
        WandbRun(tmp_path).update(run_log.numbered([*FIRST, run_log.end(10, status="stopped")]), ended=True)
        record = WandbRun(tmp_path)
        record.update(run_log.numbered([*FIRST, *SECOND[:2]]), ended=False)
        record.update(run_log.numbered([*FIRST, *SECOND]), ended=True)
        [file] = tmp_path.glob("wandb/offline-run-*/run-mine.wandb")
        assert [(row["epoch"], row["_step"], row["metrics/mAP50"]) for row in history(file)] == [
            (1, 1, 0.125), (2, 2, 1.125)]
        records = list(stored(file))
        kinds = {record.WhichOneof("record_type"): record for record in records}
        assert kinds["run"].run.run_id == "mine"
        assert kinds["run"].run.project == "train"
        config = {item.key: json.loads(item.value_json) for item in kinds["run"].run.config.update}
        assert config["optimizer.lr0"] == 0.01
        assert [record.artifact.type for record in records if record.WhichOneof("record_type") == "artifact"] == [
            "results", "model"]
        assert kinds["exit"].exit.exit_code == 0

    def test_epoch_without_checkpoint_is_left_out(self, tmp_path: Path) -> None:
        WandbRun(tmp_path).update(run_log.numbered([*FIRST, run_log.epoch(1)]), ended=True)
        [file] = tmp_path.glob("wandb/offline-run-*/run-mine.wandb")
        assert [row["epoch"] for row in history(file)] == [1]

    def test_secret_of_a_setting_is_not_stored(self, tmp_path: Path) -> None:
        run = run_log.run(run_id="mine", command="train --mlflow-uri https://ann:s3cr3t@host")
        WandbRun(tmp_path).update(run_log.numbered([run, *FIRST[1:]]), ended=True)
        [file] = tmp_path.glob("wandb/offline-run-*/run-mine.wandb")
        assert list(stored(file))
        assert b"s3cr3t" not in file.read_bytes()


class _Server:
    """What `wandb.init` returns online: a run that has some steps already."""

    def __init__(self, starting_step: int) -> None:
        self.starting_step, self.steps, self.exit_code = starting_step, list[int](), -1
        self.summary: dict[str, Any] = {}

    def define_metric(self, name: str, step_metric: str) -> None: ...

    def log(self, data: dict[str, Any], step: int, commit: bool) -> None:
        self.steps.append(step)

    def log_artifact(self, artifact: Any, aliases: list[str] | None = None) -> None: ...

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class TestOnline:
    @pytest.fixture(autouse=True)
    def _online(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("WANDB_MODE", "online")
        wandb.teardown()
        yield
        wandb.teardown()

    def test_continued_run_gets_the_steps_that_it_lacks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        server, asked = _Server(starting_step=2), dict[str, Any]()

        def init(**settings: Any) -> _Server:
            asked.update(settings)
            return server

        monkeypatch.setattr(wandb, "init", init)
        record = WandbRun(tmp_path)
        story = [*FIRST, *SECOND[:-1], *run_log.trained_epoch(2)]
        record.update(run_log.numbered(story), ended=False)
        record.update(run_log.numbered(story), ended=False)
        assert server.steps == [2, 3]
        record.update(run_log.numbered([*story, run_log.end(30, status="stopped")]), ended=True)
        assert (server.steps, server.exit_code) == ([2, 3], 1)
        assert (asked["id"], asked["resume"]) == ("mine", "allow")
        assert not (tmp_path / "wandb").exists()

    def test_run_without_a_login_says_how(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("WANDB_API_KEY", "NETRC"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(TrackingError, match="log in with `wandb login`"):
            WandbRun(tmp_path).update(run_log.numbered(FIRST), ended=False)
