"""A sweep gives places of its trials to another program in the middle of them, and takes them back."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

from ray_yolo.core.events import StartEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.verification import compare_runs
from ray_yolo.runtime.workers import worker
from ray_yolo.tune.ledger import read_ledger
from ray_yolo.tune.ledger_events import CountedEvent
from tests.support.faults import left_over, ray_nodes
from tests.support.run_log import only
from tests.support.sweeps import pool_sweep, slow_worker

PROGRAM = """
import sys, time, ray
from ray.util.placement_group import placement_group
ray.init(address=sys.argv[1], log_to_driver=False)
began = time.monotonic()
assert placement_group([{"CPU": 1}] * 2).wait(120)
print(time.monotonic() - began, flush=True)
time.sleep(5)
"""


def starts(sweep: Path) -> list[int]:
    """How often workers have begun to train each training of a sweep together."""
    return [len(only(StartEvent, read_events(trial / EVENTS_FILE))) for trial in sorted(sweep.glob("trials/*"))]


@pytest.mark.faults
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_places_of_trials_are_given_within_30_seconds_and_taken_back(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trials would last for minutes; they are slow until the places are back."""
    monkeypatch.setattr(worker, "pool_worker", slow_worker)
    folder, slow = tmp_path / "shared" / "runs" / "evolve" / "exp", tmp_path / "slow"
    slow.touch()
    with ray_nodes(3), ThreadPoolExecutor(1) as threads:
        shared = threads.submit(pool_sweep, tmp_path / "shared", trials=3, epochs=30)

        def wait(until: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 180
            while not until():
                assert time.monotonic() < deadline, starts(folder)
                assert not shared.done(), shared.result()
                time.sleep(0.2)

        try:
            wait(lambda: starts(folder) == [1, 1, 1])
            address = ray.get_runtime_context().gcs_address
            program = subprocess.run([sys.executable, "-c", PROGRAM, address], capture_output=True, text=True,
                                     check=True)
            seconds = float(program.stdout)
            assert max(starts(folder)) == 1  # one trial trains, two have left
            wait(lambda: sum(starts(folder)) == 5)
        finally:
            slow.unlink(missing_ok=True)
        assert shared.result() == folder
        assert left_over() == ""
        alone = pool_sweep(tmp_path / "alone", trials=3, epochs=30)

    log = (folder / "workers.log").read_text()
    assert log.count("is given to") == 2
    assert "requested again: 2 worker places" in log
    for trial in sorted((alone / "trials").iterdir()):
        assert not [found for found in compare_runs(trial, folder / "trials" / trial.name) if found.problem]
    shared_lines, lone_lines = [sorted(
        line.model_dump_json(include={"trial", "seed", "epochs", "fitness", "metrics", "losses"})
        for line in only(CountedEvent, read_ledger(each / "ledger.jsonl"))) for each in (folder, alone)]
    assert shared_lines == lone_lines
    assert len(lone_lines) >= 3
    print(f"the other program got its places after {seconds:.1f} s")
    assert seconds < 30
