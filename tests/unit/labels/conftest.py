"""Every test of labels has a cache folder of its own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder of one test."""
    folder = tmp_path / "user-cache"
    monkeypatch.setenv("RAY_YOLO_CACHE", str(folder))
    return folder
