"""Every message of the tables: what causes it, and its text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.messages import (
    Refusal,
    Warned,
    calls,
    clusters,
    config,
    datasets,
    models,
    pictures,
    records,
    requests,
    runs,
    starts,
    studies,
    sweeps,
    warned,
    weights,
)

ROOMS = {"config": config, "weights": weights, "data": datasets, "pictures": pictures, "models": models, "runs": runs,
         "clusters": clusters, "starts": starts, "studies": studies, "sweeps": sweeps, "requests": requests,
         "records": records, "calls": calls}
CASES = [(room, refusal) for room, table in ROOMS.items() for refusal in table.REFUSALS]


@pytest.mark.parametrize("refusal", [case for _, case in CASES], ids=[f"{room}: {case.name}" for room, case in CASES])
def test_a_mistake_is_answered_with_its_text(
        refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(refusal.error) as caught:
        refusal.cause()
    assert re.fullmatch(refusal.pattern, str(caught.value), re.DOTALL), str(caught.value)


@pytest.mark.parametrize("case", warned.WARNINGS, ids=[case.name for case in warned.WARNINGS])
def test_a_surprise_is_a_warning_with_its_text(
        case: Warned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    case.cause()
    [said] = caplog.messages
    assert re.fullmatch(case.pattern, said, re.DOTALL), said


def test_the_cases_have_names_of_their_own() -> None:
    names = [(room, refusal.name) for room, refusal in CASES]
    assert len(set(names)) == len(names)
