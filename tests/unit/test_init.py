"""What the package itself offers."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace

import pytest

import ray_yolo


def test_the_python_interface_is_loaded_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    api = SimpleNamespace(YOLO=object())
    monkeypatch.setitem(sys.modules, "ray_yolo.api", api)
    assert ray_yolo.YOLO is api.YOLO


def test_the_version_is_that_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"ray_yolo": "1.2.3"}.__getitem__)
    assert ray_yolo.__version__ == "1.2.3"


def test_a_source_tree_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert ray_yolo.__version__ == "0+source"


def test_nothing_else_is_offered() -> None:
    assert ray_yolo.__all__ == ["YOLO", "__version__"]
    assert dir(ray_yolo) == ["YOLO", "__version__"]
    with pytest.raises(AttributeError):
        _ = ray_yolo.yolo
