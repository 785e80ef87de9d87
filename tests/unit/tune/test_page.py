"""The page of a sweep: its trials, claim and pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.tune.ledger import read_ledger, rung_results
from ray_yolo.tune.page import write_page
from ray_yolo.tune.records import read_options
from tests.support.pictures import smooth_picture, write_image


def test_a_page_has_the_trials_and_the_pictures(sweep: Path) -> None:
    write_image(sweep / "rungs.png", smooth_picture(20, 30))
    write_page(sweep)
    page = (sweep / "report.html").read_text()
    assert "2 trials, 1 trained to the end; best 0.2500 (trial 0)" in page
    assert "<h2>Best trials</h2>" in page
    assert 'alt="rungs.png"' in page
    assert "Claim" not in page


def test_a_sweep_without_a_result_has_no_table(sweep: Path) -> None:
    lines = (sweep / "ledger.jsonl").read_text().splitlines(keepends=True)
    before_results = [line for line in lines if '"fitness"' not in line]
    assert len(before_results) < len(lines)
    (sweep / "ledger.jsonl").write_text("".join(before_results))
    write_page(sweep)
    assert "<h2>Best trials</h2>" not in (sweep / "report.html").read_text()


@pytest.mark.parametrize("content", ["", "text", "5", "[1]", "a: 1"])
def test_damaged_options_are_those_of_the_ledger(sweep: Path, content: str) -> None:
    (sweep / "opt.yaml").unlink(missing_ok=True)
    expected = read_options(sweep)
    (sweep / "opt.yaml").write_text(content)
    assert read_options(sweep) == expected


def test_results_of_rungs_are_those_of_the_first_seed(sweep: Path) -> None:
    lines = read_ledger(sweep / "ledger.jsonl")
    assert rung_results(lines) == {0: {3: 0.25}}
    counted = lines[-1]
    more = [counted.model_copy(update={"epochs": 9, "fitness": 0.5}),
            counted.model_copy(update={"seed": 7, "fitness": 0.9})]
    assert rung_results([*lines, *more]) == {0: {3: 0.25, 9: 0.5}}
