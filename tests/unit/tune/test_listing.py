"""The table of a project's runs and sweeps, in a folder and in a store."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from ray_yolo.cli import list_runs
from ray_yolo.core.documents import RunSummary
from ray_yolo.core.errors import InputError
from ray_yolo.tune.listing import format_table, list_project
from tests.support import run_log


@pytest.fixture
def project(tmp_path: Path, sweep: Path) -> Path:
    """An interrupted training, a finished one, one that was only created, and an interrupted sweep."""
    project = tmp_path / "project"
    project.mkdir()
    interrupted = project / "exp"
    shutil.copytree(sweep / "trials" / "trial1", interrupted)
    finished = project / "done"
    shutil.copytree(interrupted, finished)
    (finished / "finished").touch()
    created = project / "created"
    created.mkdir()
    shutil.copy(interrupted / "run.json", created)
    shutil.move(sweep, project / "sweep")
    (project / "notes").mkdir()
    return project


def test_a_table_has_each_run_with_its_state_epochs_and_best_result(project: Path) -> None:
    rows = {row.name: row for row in list_project(str(project))}
    assert {name: (row.kind, row.state, row.done, row.epochs, row.best) for name, row in rows.items()} == {
        "exp": ("training", "stopped", 1, 3, 0.0625), "done": ("training", "finished", 1, 3, 0.0625),
        "created": ("training", "created", None, None, None),
        "sweep": ("sweep", "interrupted", 2, None, 0.25)}
    events = [event.time for event in run_log.events_of(project / "exp", object)]
    assert (rows["exp"].started, rows["exp"].changed) == (events[0], events[-1])


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_validations_and_predictions_have_rows(tmp_path: Path, scheme: str) -> None:
    for name, found in {"val/exp": {"metrics": {"mAP50-95": 0.25}}, "detect/exp": {"pictures": 3}}.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "results.json").write_text(json.dumps(found))
    (tmp_path / "detect" / "other").mkdir()
    rows = list_project(f"{scheme}{tmp_path}")
    assert {row.name: (row.kind, row.state, row.done, row.best) for row in rows} == {
        "detect/exp": ("prediction", "finished", 3, None), "val/exp": ("validation", "finished", None, 0.25)}
    table = "\n".join(format_table(rows, time.time()))
    assert "prediction, finished  3 pictures" in table
    assert "validation, finished              0.2500" in table
    assert [row.name for row in list_project(f"{scheme}{tmp_path}/val/")] == ["exp"]


@pytest.mark.parametrize(("file", "content", "reason"), [
    ("ledger.jsonl", b'{"seq":0,"time":1.0,"type":"sweep","identity":7}\n', ""),
    ("events.jsonl", None, "IsADirectoryError: "),
    (".lock", None, "IsADirectoryError: "),
])
def test_a_folder_that_cannot_be_read_is_one_row_among_the_others(
        project: Path, file: str, content: bytes | None, reason: str) -> None:
    odd = project / "odd"
    shutil.copytree(project / "exp", odd)
    if content is None:
        (odd / file).unlink(missing_ok=True)
        (odd / file).mkdir()
    else:
        (odd / file).write_bytes(content)
    rows = {row.name: row.state for row in list_project(str(project))}
    assert rows.pop("odd").startswith(f"unreadable: {reason}")
    assert rows == {"exp": "stopped", "done": "finished", "created": "created", "sweep": "interrupted"}


def test_the_last_changed_run_is_first_and_columns_are_aligned() -> None:
    now = time.mktime((2026, 5, 4, 3, 2, 0, 0, 0, -1))
    rows = [RunSummary(name="a", kind="training", state="training", done=1, epochs=3, best=0.5, started=now - 60,
                       changed=now),
            RunSummary(name="long", kind="training", state="created"),
            RunSummary(name="s", kind="sweep", state="finished", done=2, best=0.25),
            RunSummary(name="c", kind="comparison", state="finished", done=1, better="B")]
    assert format_table(rows, now) == [
        "run   state                 epochs    mAP50-95          started      changed",
        "a     training              1 of 3    0.5000            05-04 03:01  05-04 03:02",
        "long  created",
        "s     sweep, finished       2 trials  0.2500 (fitness)",
        "c     comparison, finished  1 pair    B is better"]
    assert "2025-05-04" in format_table([rows[0].model_copy(update={"changed": now - 365 * 86400})], now)[1]


def test_a_folder_of_projects_lists_the_runs_of_each(project: Path) -> None:
    other = project.parent / "other"
    shutil.copytree(project / "exp", other / "exp")
    names = {row.name for row in list_project(str(project.parent))}
    assert names == {"other/exp", "project/exp", "project/done", "project/created", "project/sweep"}


def test_the_command_lists_a_folder_and_refuses_one_without_runs(
        project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_runs([str(project)]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["run", "state"]
    assert len(lines) == 4
    with pytest.raises(InputError):
        list_runs([str(project / "notes")])
