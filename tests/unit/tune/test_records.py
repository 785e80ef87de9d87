"""The records of a sweep and of its trials."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.sinks import records as settings_module
from ray_yolo.sinks.records import locked
from ray_yolo.tune import records as module
from ray_yolo.tune.records import StudyRecords


def test_a_trial_whose_records_another_process_makes_is_pending(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "records_of", lambda *_: [])
    warnings: list[str] = []
    records = StudyRecords(sweep, None, sweep, warnings.append)
    with locked(sweep / "trials" / "trial1") as lock:
        assert lock is not None
        records.update(ended=True)
        assert records.pending == ["trial1"]
        assert records.failing == []
        (sweep / "trials" / "trial1").rename(sweep / "gone")
        records.update(ended=True)
        assert records.pending == []  # the trial was removed
        (sweep / "gone").rename(sweep / "trials" / "trial1")
    records.update(ended=True)
    assert (records.pending, warnings) == ([], [])


def test_a_trial_whose_settings_cannot_be_read_is_pending_alone(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "build_records", lambda *_: [])
    (sweep / "trials" / "trial1" / "opt.yaml").write_text("{")
    warnings: list[str] = []
    records = StudyRecords(sweep, None, sweep, warnings.append)
    records.update(ended=True)
    assert (records.pending, records.failing, records.needs_user) == (["records"], ["records"], True)
    assert [str(sweep / "trials" / "trial1" / "opt.yaml") in text for text in warnings] == [True]
    (sweep / "trials" / "trial1").rename(sweep / "gone")
    records.update(ended=True)
    assert records.pending == []
