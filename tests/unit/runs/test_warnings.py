"""Warnings reach the run's log from wherever they are given."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ray_yolo.runs.warnings import MOST, forward_warnings

LOG = logging.getLogger("ray_yolo.data.anything")
IN_TORCH = f"{Path(torch.__file__).parent}/somewhere.py"


@pytest.fixture(autouse=True)
def _as_in_a_command() -> Iterator[None]:
    """Warnings are forwarded, not raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


def test_log_records_and_warnings_of_torch_are_forwarded_once_each() -> None:
    messages: list[str] = []
    with forward_warnings(messages.append, 0):
        for _ in range(3):
            LOG.warning("%s is torn", "a.png")
            warnings.warn_explicit("slow\nkernel", UserWarning, IN_TORCH, 1)
        LOG.info("all is well")
    LOG.warning("too late")
    assert messages == ["a.png is torn", "slow kernel"]


def test_warnings_of_other_packages_go_where_they_went() -> None:
    messages: list[str] = []
    with pytest.warns(UserWarning, match="old"), forward_warnings(messages.append, 0):
        warnings.warn_explicit("old", UserWarning, "/elsewhere/package.py", 1)
    assert messages == []


def test_a_flood_of_warnings_ends_with_a_word_about_the_rest() -> None:
    messages: list[str] = []
    with forward_warnings(messages.append, 0):
        for number in range(2 * MOST):
            LOG.warning("image %d is gone", number)
    assert len(messages) == MOST + 1
    assert messages[-1] == f"more than {MOST} different warnings; the rest is not shown"
