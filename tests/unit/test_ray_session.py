"""Tests that need Ray share one, which ends with the last of them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from tests import conftest

WITH_RAY, OTHER = (SimpleNamespace(nodeid=f"tests/{file}::test") for file in ("process/runtime/test_trainer.py",
                                                                             "unit/ops/test_nms.py"))


def test_ray_ends_with_the_last_file_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[bool]()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(shutdown=lambda: ended.append(True)))
    for pair in ((WITH_RAY, WITH_RAY), (OTHER, OTHER), (OTHER, WITH_RAY), (WITH_RAY, None)):
        conftest.pytest_runtest_teardown(*pair)
    assert ended == []
    conftest.pytest_runtest_teardown(WITH_RAY, OTHER)
    assert ended == [True]
