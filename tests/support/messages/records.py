"""Callbacks, trackers, MLflow's database and pictures of a run that cannot be used or made."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.internals import internal
from ray_yolo.runs.run_record import FolderRecord, SweepRecord, write_record
from ray_yolo.sinks import pictures
from ray_yolo.sinks.callbacks import check_functions, load_callbacks
from ray_yolo.sinks.mlflow_client import build_client
from ray_yolo.sinks.pictures import Pictures, recorded_spec
from ray_yolo.sinks.retry import RecordError
from ray_yolo.sinks.trackers import GROUP, load_tracker
from tests.support import run_log
from tests.support.jobs import make_dataset
from tests.support.messages import Refusal
from tests.support.messages.runs import record_of
from tests.support.packages import installed

HOOKS = "on_run_start, on_batch_end, on_step_end, on_val_end, on_epoch_end"
FORMS = "give package.module:object or file.py:object"
CALLBACKS = {
    "mine_own.nothing":
        f"cannot be imported (ModuleNotFoundError: No module named 'mine_own'); {FORMS}",
    "mine.py:no": f"cannot be imported (AttributeError: …); {FORMS}",
    "mine.py:number": f"has no function named {HOOKS} or on_run_end",
    "nowhere.py": f"cannot be imported (FileNotFoundError: …); {FORMS}",
    "broken.py": f"cannot be imported (SyntaxError: …); {FORMS}",
    ":x": f"cannot be imported (ValueError: Empty module name); {FORMS}",
    "foreign.py": f"on_train_epoch_end is never called; the names are {HOOKS}, on_run_end; rename it "
                  "(_on_train_epoch_end is left alone)",
}
FILES = {"mine.py": "number = 3\n", "broken.py": "def (", "foreign.py":
         "def on_run_start(*_): pass\ndef on_train_epoch_end(*_): pass\ndef _on_fit(*_): pass\n"}
"""Python paths of callbacks, and the files that there are."""

FUNCTIONS: list[tuple[dict[str, object], str]] = [
    ({"on_train_epoch_end": print}, f"'on_train_epoch_end' is never called; the names are {HOOKS}, on_run_end"),
    ({"on_epoch_end": "print"}, "on_epoch_end: 'print' is not a function"),
]

MISSING = "'team' is not installed (installed: {}); a package offers one by an entry point of ray_yolo.records"
UNIMPORTED = "'team' of the package ours0 cannot be imported (ModuleNotFoundError: No module named 'nowhere')"
TRACKERS: dict[tuple[str, ...], str] = {
    (): MISSING.format("…"),
    ("other = own:build",): MISSING.format("…other…"),
    ("team = nowhere:build",): UNIMPORTED,
    ("team = nowhere:build [rare]",): f"{UNIMPORTED}; pip install 'ours0[rare]'",
    ("team = own:__name__",): "'team' of the package ours0 is not a function that takes the run folder",
    ("team = own:build", "team = own:build"): "'team' is offered by ours0 and by ours1; uninstall one of them",
}
"""The entry points of installed packages, ours0 and ours1, where the tracker team is asked for."""


PRIVATE = {"mlflow.store.tracking.sqlalchemy_store": ("SqlAlchemyStore", "MLflow 3.17"),
           "mlflow.system_metrics.system_metrics_monitor": ("SystemMetricsMonitor", "MLflow 3.17"),
           "torch._gone": ("name", "PyTorch 2.11 to 2.15")}
"""Private names of other packages by their module, and the releases that have them."""


def _load(path: str) -> None:
    for name, text in FILES.items():
        Path(name).write_text(text)
    load_callbacks(path)


def _track(entries: tuple[str, ...]) -> None:
    with installed(GROUP, "def build(folder): pass\n", *entries):
        load_tracker("team")


def _lack(module: str, name: str) -> None:
    """Ask a release of MLflow for a private name that it has no more."""
    with mock.patch.dict(sys.modules, {module: ModuleType(module)}):
        internal(module, name)


def _open(write: Callable[[Path], object]) -> None:
    write(Path("mlflow.db"))
    with mock.patch.dict(sys.modules, mlflow=mock.Mock()):  # its import takes seconds
        build_client("sqlite:///mlflow.db")


def _interrupt(path: Path) -> None:
    """Leave what MLflow leaves between the two steps of a change of a table."""
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE _alembic_tmp_runs (id)")


def _draw(record: FolderRecord) -> None:
    """Read what a picture needs, in the folder of a run."""
    write_record(Path(), record)
    recorded_spec(Path(), [Path()], None)


def _draw_on_a_full_disk() -> None:
    with mock.patch.object(pictures, "plot_results", side_effect=OSError("full")), \
            mock.patch.object(Pictures, "_draw_images"):
        Pictures(Path(), []).update(run_log.trained_epoch(0), ended=False)


def _draw_other_labels() -> None:
    _draw(record_of(Recipe(data=str(make_dataset(Path("set"), 2))), labels="former"))


def _refusals() -> Iterator[Refusal]:
    for path, message in CALLBACKS.items():
        yield Refusal(f"callbacks: {path}", f"callbacks: {path}: {message}", partial(_load, path))
    for functions, message in FUNCTIONS:
        yield Refusal(f"callbacks: {functions}", f"callbacks: {message}", partial(check_functions, functions))
    for entries, message in TRACKERS.items():
        yield Refusal(f"trackers: {entries}", f"trackers: {message}", partial(_track, entries))
    for module, (name, needed) in PRIVATE.items():
        package = module.partition(".")[0]
        yield Refusal(f"{package} without {name}", f"{package} … has no {module}.{name}; this needs {needed}: install "
                      "the versions of constraints.txt", partial(_lack, module, name))
    yield Refusal("no database", "…/here/mlflow.db: is no SQLite database; move it away, or name another one with "
                  "--mlflow-uri", partial(_open, lambda path: path.write_text("nothing of the kind, but long enough")))
    yield Refusal("half a database", "…/here/mlflow.db: its creation was interrupted; move it away, and ray_yolo.sync "
                  "of a run creates a new one", partial(_open, _interrupt))
    yield Refusal("other labels", "set/data.yaml: the training labels have changed since the training, so its images "
                  "are not drawn", _draw_other_labels)
    yield Refusal("pictures of a sweep", "…/here/run.json: is not the record of a training",
                  partial(_draw, SweepRecord(digest="ab", space="", trials=1)))
    yield Refusal("a picture on a full disk", "not drawn: results.png (OSError: full)", _draw_on_a_full_disk,
                  RecordError)


REFUSALS = list(_refusals())
