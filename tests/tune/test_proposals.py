"""Optuna's proposals are functions of their rows, as all others are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ray_yolo.errors import ConfigError
from ray_yolo.tune import proposals
from ray_yolo.tune.evolution import Gene, Row, Space
from ray_yolo.tune.proposals import check_algorithm, propose

SPACE = Space((Gene("lr0", low=0.001, high=0.1, log=True), Gene("close", "int", 1, 10),
               Gene("name", "choice", values=("SGD", "AdamW"))),
              ({"lr0": 0.01, "close": 5, "name": "SGD"},), algorithm="tpe")


def fitness(genes: Any) -> float:
    return 1 - abs(np.log10(genes["lr0"] / 0.05)) - abs(genes["close"] - 9) / 20 - 0.2 * (genes["name"] == "SGD")


def rows(count: int, seed: int = 0) -> list[Row]:
    found: list[Row] = []
    for number in range(count):
        genes = propose(SPACE, seed, number, found)
        found.append(Row(number, genes, fitness(genes)))
    return found


def test_equal_rows_in_any_order_give_equal_proposals() -> None:
    known = rows(15)
    one = propose(SPACE, 7, 15, known)
    assert one == propose(SPACE, 7, 15, known[::-1])
    assert one != propose(SPACE, 8, 15, known)
    assert one != propose(SPACE, 7, 16, known)


def test_the_start_comes_first_and_proposals_stay_in_the_space() -> None:
    found = rows(30)
    assert found[0].genes == SPACE.starts[0]
    for row in found:
        assert 0.001 <= row.genes["lr0"] <= 0.1
        assert row.genes["close"] in range(1, 11)
        assert row.genes["name"] in ("SGD", "AdamW")


def test_a_failed_row_teaches_nothing() -> None:
    known = rows(12)
    assert propose(SPACE, 0, 12, known) == propose(SPACE, 0, 12, [*known, Row(99, SPACE.starts[0], None)])


def test_a_short_trainings_fitness_teaches_less_than_a_whole_ones() -> None:
    """Two hills: the higher one is of trainings that were stopped."""
    genes = [{**SPACE.starts[0], "lr0": lr0, "close": close} for close in range(1, 9) for lr0 in (0.002, 0.08)]
    known = [Row(n, each, 0.9 if each["lr0"] == 0.08 else 0.5 - n / 100, 1 if each["lr0"] == 0.08 else 2)
             for n, each in enumerate(genes)]
    level = [row._replace(rung=1) for row in known]
    lr0 = [[propose(SPACE, seed, 16, rows)["lr0"] for seed in range(40)] for rows in (known, level)]
    assert np.median(lr0[0]) < 0.01 < np.median(lr0[1])


def test_it_learns() -> None:
    """Better than random draws, by the mean of the last ten of forty, over five seeds."""
    random = replace(SPACE, algorithm="random")
    learnt = [row.fitness or 0.0 for seed in range(5) for row in rows(40, seed)[30:]]
    drawn = [fitness(propose(random, seed, number, ())) for seed in range(5) for number in range(30, 40)]
    assert np.mean(learnt) > np.mean(drawn) + 0.2


def test_without_optuna_the_answer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    check_algorithm(SPACE)
    monkeypatch.setattr(proposals.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"ray_yolo\[optuna\]"):
        check_algorithm(SPACE)
    check_algorithm(replace(SPACE, algorithm="random"))
