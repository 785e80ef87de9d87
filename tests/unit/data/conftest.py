"""Every test of the data path has a cache folder of its own, and shared memory of its own."""

from pathlib import Path

import pytest

from ray_yolo.data import image_cache


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder of one test."""
    folder = tmp_path / "user-cache"
    monkeypatch.setenv("RAY_YOLO_CACHE", str(folder))
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(image_cache, "SHARED_MEMORY", memory)
    return folder
