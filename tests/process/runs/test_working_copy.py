"""What a machine knows of the runs of a store."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ray_yolo.runs import working_copy
from ray_yolo.runs.working_copy import (
    refresh,
)
from tests.support.object_storage import DistantStore


def test_a_project_of_300_runs_is_read_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With requests of 0.1 s, as to a bucket. One after the other they took a minute."""
    distant = DistantStore(tmp_path / "bucket")
    for number in range(300):
        distant.put(f"exp{number}/run.json", b"%d" % number)
    monkeypatch.setattr(working_copy, "open_store", lambda address: distant)
    distant.requests.clear()
    distant.delay, start = 0.1, time.monotonic()
    refresh(tmp_path / "spool", f"file://{tmp_path}/bucket", lambda folder: False)
    seconds = time.monotonic() - start
    print(f"{dict(distant.requests)}: {seconds:.1f} s")
    assert seconds < 8
    assert distant.most_at_once <= 32
    assert {path.parent.name: path.read_text() for path in (tmp_path / "spool").glob("*/run.json")} == {
        f"exp{number}": str(number) for number in range(300)}
