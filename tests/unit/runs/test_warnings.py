"""Warnings reach the run's log from wherever they are given."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ray_yolo.config.recipe import Recipe
from ray_yolo.runs.warnings import MOST, forward_warnings
from ray_yolo.runtime import trainer
from ray_yolo.runtime.preflight import read_dataset
from tests.support import run_log
from tests.support.jobs import make_config

LOG = logging.getLogger("ray_yolo.data.anything")
IN_TORCH = f"{Path(torch.__file__).parent}/somewhere.py"


class Worried(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> int:
        LOG.warning("image %d is torn", number % 2)
        return number


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


def test_warnings_of_loader_processes_are_forwarded() -> None:
    messages: list[str] = []
    before = threading.active_count()
    with forward_warnings(messages.append, 2) as loader_init:
        loader = DataLoader(Worried(), batch_size=2, num_workers=2, worker_init_fn=loader_init,
                            multiprocessing_context="forkserver")
        assert len([int(number) for batch in loader for number in batch]) == 8
    assert sorted(messages) == ["image 0 is torn", "image 1 is torn"]
    deadline = time.monotonic() + 30
    while threading.active_count() > before + 1 and time.monotonic() < deadline:  # the queue's own may stay
        time.sleep(0.05)
    assert threading.active_count() <= before + 1


def test_a_flood_of_warnings_ends_with_a_word_about_the_rest() -> None:
    messages: list[str] = []
    with forward_warnings(messages.append, 0):
        for number in range(2 * MOST):
            LOG.warning("image %d is gone", number)
    assert len(messages) == MOST + 1
    assert messages[-1] == f"more than {MOST} different warnings; the rest is not shown"


@pytest.mark.parametrize("loader_processes", [0, 1])
def test_an_image_that_was_replaced_by_its_neighbour_is_a_warning_in_the_log(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader_processes: int) -> None:
    config = make_config(tmp_path, 0, {"workers": loader_processes}, epochs=1)
    torn = tmp_path / "data" / "images" / "train" / "003.png"

    def read_and_tear(recipe: Recipe) -> Any:
        found = read_dataset(recipe)
        torn.write_bytes(torn.read_bytes()[:100])
        return found

    monkeypatch.setattr(trainer, "read_dataset", read_and_tear)
    result = trainer.fit(config, quiet=True)
    messages = run_log.messages(result.run_dir)
    assert len(messages) == 1
    assert messages[0].startswith(str(torn))
    assert messages[0].endswith("replaced by the next image")
