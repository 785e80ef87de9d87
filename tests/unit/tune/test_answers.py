"""What `list`, `status` and `verify` answer with `--json`, of runs and sweeps in a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ray_yolo.cli import list_runs, status, verify
from ray_yolo.core.documents import ListDocument, StatusDocument, VerifyDocument


@pytest.fixture
def finished(tmp_path: Path, training: Path) -> Path:
    """A project with a training that has ended."""
    project = tmp_path / "project"
    project.mkdir()
    shutil.move(training, project / "exp")
    (project / "exp" / "finished").touch()
    return project


def test_list_answers_with_the_runs_of_a_project(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert list_runs([str(finished), "--json"]) == 0
    out, err = capfd.readouterr()
    [row] = ListDocument.model_validate_json(out).runs
    assert (row.name, row.kind, row.state, row.done, row.epochs, row.best) == (
        "exp", "training", "finished", 1, 3, 0.0625)
    assert err.startswith("run ")


def test_status_answers_with_the_row_of_list_and_its_lines(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(finished / "exp")
    assert status([folder, "--json"]) == 0
    out, err = capfd.readouterr()
    document = StatusDocument.model_validate_json(out)
    assert (document.name, document.state, document.best) == (folder, "finished", 0.0625)
    assert "\n".join(document.lines) + "\n" == err


def test_verify_answers_with_each_check(tmp_path: Path, sweep: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    shutil.copytree(sweep, other)
    ledger = other / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    assert verify([str(sweep), str(sweep), "--json"]) == 3  # its ledger is made up
    out, err = capfd.readouterr()
    equal = VerifyDocument.model_validate_json(out)
    assert (equal.equal, [part.problem for part in equal.comparisons]) == (True, [None])
    assert [part.problem is None for part in equal.checks] == [False] * 3
    assert err.endswith("equal in every line of their ledgers\n")
    assert verify([str(sweep), str(other), "--json"]) == 3
    different = VerifyDocument.model_validate_json(capfd.readouterr().out)
    assert different.equal is False
    assert [part.what for part in different.comparisons if part.problem] == ["ledgers"]
