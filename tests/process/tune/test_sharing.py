"""A sweep gives places of its trials to another program in the middle of them, and takes them back."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

from ray_yolo.core.events import StartEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runs.verification import compare_runs
from ray_yolo.tune.ledger import read_ledger
from ray_yolo.tune.ledger_events import CountedEvent
from ray_yolo.tune.tuner import search
from tests.support.faults import left_over, ray_nodes
from tests.support.run_log import only
from tests.support.sweeps import SPACE, make_sweep

PROGRAM = """
import sys, time, ray
from ray.util.placement_group import placement_group
ray.init(address=sys.argv[1], log_to_driver=False)
group = placement_group([{"CPU": 1}] * 2)
began = time.monotonic()
assert group.wait(120)
print(time.monotonic() - began, flush=True)
time.sleep(20)
"""


def sweep(folder: Path) -> Path:
    folder.mkdir()
    config = make_sweep(folder, "search: {algorithm: random}\n" + SPACE, recipe={"epochs": 300}, trials=3,
                        keep_weights=True)
    return search(config, quiet=True).folder


@pytest.mark.faults
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_places_of_trials_are_given_within_30_seconds_and_taken_back(tmp_path: Path) -> None:
    with ray_nodes(3), ThreadPoolExecutor(1) as pool:
        shared = pool.submit(sweep, tmp_path / "shared")
        trials = tmp_path / "shared" / "runs" / "evolve" / "exp" / "trials"
        deadline = time.monotonic() + 180

        def training() -> int:
            return sum(bool(only(StartEvent, read_events(path / EVENTS_FILE))) for path in trials.glob("*"))

        while training() < 3:
            assert time.monotonic() < deadline
            assert not shared.done(), shared.result()
            time.sleep(0.5)
        time.sleep(10)
        address = ray.get_runtime_context().gcs_address
        program = subprocess.run([sys.executable, "-c", PROGRAM, address], capture_output=True, text=True, check=True)
        seconds = float(program.stdout)
        assert not shared.done(), "the trials were over"
        folder = shared.result()
        assert left_over() == ""
        alone = sweep(tmp_path / "alone")
    log = (folder / "workers.log").read_text()
    assert log.count("is given to") == 2
    assert "requested again" in log
    for trial in sorted((alone / "trials").iterdir()):
        assert not [found for found in compare_runs(trial, folder / "trials" / trial.name) if found.problem]
    shared_lines, lone_lines = [sorted(
        line.model_dump_json(include={"trial", "seed", "epochs", "fitness", "metrics", "losses"})
        for line in only(CountedEvent, read_ledger(each / "ledger.jsonl"))) for each in (folder, alone)]
    assert shared_lines == lone_lines
    assert len(lone_lines) >= 3
    starts = [len(only(StartEvent, read_events(trial / EVENTS_FILE))) for trial in (folder / "trials").iterdir()]
    assert sorted(starts)[0] == 1
    assert sum(starts) >= 5  # two have left, and continued
    print(f"the other program got its places after {seconds:.1f} s")
    assert seconds < 30
