"""Warnings reach the run's log from wherever they are given."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from ray_yolo.config.recipe import Recipe
from ray_yolo.runs.warnings import forward_warnings
from ray_yolo.runtime import trainer
from ray_yolo.runtime.preflight import read_dataset
from tests.support import run_log
from tests.support.jobs import make_config
from tests.unit.runs.test_warnings import LOG, _as_in_a_command

__all__ = ["_as_in_a_command"]  # fixtures


class Worried(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> int:
        LOG.warning("image %d is torn", number % 2)
        return number


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
