"""Where the cache is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ray_yolo.core.cache_folder import cache_folder


def test_a_user_without_a_name_and_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as an id without an entry in its passwd: it was a traceback."""
    for name in ("HOME", "XDG_CACHE_HOME", "RAY_YOLO_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert cache_folder() == Path("/nonexistent/.cache/ray_yolo")
