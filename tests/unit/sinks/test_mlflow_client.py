"""MLflow's client: which server, and a database that is whole or not there."""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from ray_yolo.core.errors import InputError
from ray_yolo.sinks import mlflow_client
from ray_yolo.sinks.mlflow_client import _ensure_database, build_client, build_monitor, tracking_uri


class Killed(BaseException):
    """Stands for kill -9."""


def die(*_: Any, **__: Any) -> None:
    raise Killed


@pytest.mark.parametrize("in_place", [False, True])
def test_a_database_is_made_whole_or_not_at_all(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    path = tmp_path / "store" / "mlflow.db"
    with monkeypatch.context() as patch:
        patch.setattr("mlflow.store.db.utils._upgrade_db", die)
        if in_place:  # the same by MLflow itself: why it is made elsewhere
            patch.setattr("ray_yolo.sinks.mlflow_client._ensure_database", lambda *_: None)
        with pytest.raises(Killed):
            build_client(f"sqlite:///{path}").search_experiments()
    assert path.exists() == in_place


def test_the_first_of_two_commands_makes_the_database_and_the_second_uses_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, inodes = tmp_path / "mlflow.db", []

    def make(uri: str, artifacts: str | None) -> Mock:
        assert not path.exists()
        path.write_bytes(b"")  # the other one, meanwhile
        inodes.append(path.stat().st_ino)
        shutil.copy(path, uri.removeprefix("sqlite:///"))
        return Mock()

    monkeypatch.setattr("mlflow.store.tracking.sqlalchemy_store.SqlAlchemyStore", make)
    other = tmp_path / ".mlflow.db-left"
    other.mkdir()
    os.utime(other, (0, 0))
    _ensure_database(path, None)
    _ensure_database(path, None)
    assert [path.stat().st_ino] == inodes
    assert [file.name for file in tmp_path.iterdir()] == ["mlflow.db"]


@pytest.mark.parametrize(("module", "name"), [
    ("mlflow.store.tracking.sqlalchemy_store", "SqlAlchemyStore"),
    ("mlflow.system_metrics.system_metrics_monitor", "SystemMetricsMonitor")])
def test_an_mlflow_without_a_private_name_is_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """Seen with MLflow 3.17; that they do what they are used for is shown here and in test_mlflow_system."""
    monkeypatch.delattr(import_module(module), name)
    with pytest.raises(InputError):
        build_client(f"sqlite:///{tmp_path}/mlflow.db") if name == "SqlAlchemyStore" else build_monitor("", "0")


def test_a_database_that_was_left_half_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mlflow.db"
    with monkeypatch.context() as patch:  # between the two steps of a change of a table
        patch.setattr("alembic.ddl.impl.DefaultImpl.drop_table", die)
        with pytest.raises(Killed):
            SqlAlchemyStore(f"sqlite:///{path}", None)
    with pytest.raises(InputError):
        build_client(f"sqlite:///{path}")


def test_the_setting_goes_before_the_environment_and_that_before_the_storage_folder(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host")
    assert tracking_uri("http://mine", tmp_path) == "http://mine"
    assert tracking_uri("", tmp_path) == "http://host"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert tracking_uri("", tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"


def test_a_file_of_sqlite_is_named_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("sqlite:///mine.db?timeout=5", f"sqlite:///{tmp_path}/mine.db?timeout=5"):
        assert tracking_uri(given, "") == f"sqlite:///{tmp_path}/mine.db?timeout=5"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///runs/a.db")
    assert tracking_uri("", "") == f"sqlite:///{tmp_path}/runs/a.db"


def test_off_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host")
    assert tracking_uri("off", tmp_path) is None


def test_a_server_has_a_scheme_of_mlflow_or_of_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in ("https://host", "HTTP://host", "postgresql+psycopg2://host/db", "mysql://host/db", "databricks",
                  "databricks://profile", "file:///runs"):
        assert tracking_uri(known, tmp_path) == known
    for unknown in ("OFF", "nonsense", "./mlruns", "ftp://host", "uc:http://host", "http", "team-store://host"):
        with pytest.raises(InputError, match=f"^mlflow_uri: {unknown} is no address of an MLflow server"):
            tracking_uri(unknown, tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense")
    with pytest.raises(InputError, match=r"^MLFLOW_TRACKING_URI: nonsense is no address"):
        tracking_uri("", tmp_path)
    plugin = EntryPoint("team-store", "team:Store", "mlflow.tracking_store")
    monkeypatch.setattr(mlflow_client, "entry_points", lambda group: [plugin] if group == plugin.group else [])
    assert tracking_uri("team-store://host", tmp_path) == "team-store://host"
