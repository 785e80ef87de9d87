"""`verify` of sweeps: decisions are computed again, and two sweeps are compared line by line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ray_yolo import cli
from tests.support.schedules import run_sweep


@pytest.fixture
def sweeps(tmp_path: Path) -> list[str]:
    """Two executions of one sweep, on other slots."""
    for name, slots in (("one", 1), ("two", 3)):
        run_sweep(tmp_path / name / "ledger.jsonl", 9, slots=slots, order=slots)
    return [str(tmp_path / "one"), str(tmp_path / "two")]


def without_checksums(ledger: str) -> str:
    """A ledger as earlier versions have written it."""
    return re.sub(r',"crc":"[0-9a-f]{8}"', "", ledger)


def test_two_executions_of_a_sweep_are_equal(sweeps: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.verify(sweeps) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:2]] == [["ledger.jsonl", "ok"], ["ledgers", "ok"]]
    assert lines[2:] == ["equal in every line of their ledgers"]


def test_other_weights_show_by_their_digests(sweeps: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(sweeps[1]) / "ledger.jsonl"
    changed = path.read_text().replace('"weights":"1-3-3"', '"weights":"other"')
    path.write_text(changed)
    assert cli.verify(sweeps[1:]) == 3
    assert "does not match its checksum" in capsys.readouterr().out
    path.write_text(without_checksums(changed))
    assert cli.verify(sweeps[1:]) == 0  # no decision follows from a digest
    assert cli.verify(sweeps) == 3
    assert '"weights":"other","classes":{}} in the second' in capsys.readouterr().out


def test_a_decision_that_does_not_follow_is_reported(sweeps: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(sweeps[0]) / "ledger.jsonl"
    path.write_text(without_checksums(path.read_text()).replace('"why":"default"', '"why":"best"', 1))
    assert cli.verify(sweeps[:1]) == 3
    assert "follows from the lines before" in capsys.readouterr().out
