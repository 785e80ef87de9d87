"""The time for an image: which networks a space has, how long they take, and what is worth its time."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_yolo.tune import tuner
from ray_yolo.tune.latency import measure
from ray_yolo.tune.ledger import read_ledger, verify
from ray_yolo.tune.ledger_events import FailedEvent
from ray_yolo.tune.tuner import search
from tests.process.tune.test_tuner import formula_task, stand_in
from tests.support.sweeps import make_sweep


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_networks_over_the_limit_are_not_trained_and_the_others_end_in_a_table(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[list[str]] = []

    def on_worker(function: Any, _: Any, parts: Any, *__: Any, **___: Any) -> Iterator[tuple[int, dict[str, float]]]:
        assert function is measure
        measured.append(sorted(parts[0]))
        yield 0, {name: float(network.imgsz) for name, network in parts[0].items()}

    stand_in(monkeypatch, formula_task)
    monkeypatch.setattr(tuner, "map_on_workers", on_worker)
    space = "imgsz: {type: choice, values: [64, 96, 128]}\nlr0: {type: choice, values: [0.001, 0.005]}\n"
    config = make_sweep(tmp_path, "search: {algorithm: grid, limit: {latency_ms: 100}}\n" + space)
    result = search(config, quiet=True)
    lines = read_ledger(result.folder / "ledger.jsonl")
    assert verify(lines) == []
    failed = {line.trial: line.reason for line in lines if isinstance(line, FailedEvent)}
    assert failed == {row.number: f"{config.recipe.model} at 128 px takes 128 ms an image, over the limit of 100"
                      for row in result.trials if row.genes["imgsz"] == 128}
    assert len(failed) == 2
    rows = list(csv.DictReader((result.folder / "pareto.csv").read_text().splitlines()))
    assert [(row["latency_ms"], row["network"].split(" at ")[1]) for row in rows] == [("64", "64 px")]
    assert len(measured) == 1
