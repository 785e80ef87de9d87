"""Sweeps without trainings: outcomes are a function of genes, seed and epochs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.tune.dispatch import Dispatcher
from ray_yolo.tune.evolution import Gene, Space
from ray_yolo.tune.ledger import Ledger
from ray_yolo.tune.ledger_events import ProposedEvent
from ray_yolo.tune.schedule import Outcome, Task
from ray_yolo.tune.search import Search
from ray_yolo.tune.study import SweepEvent

EPOCHS, RUNGS = 9, (3, 9)
SPACE = Space((Gene("lr0", low=0.001, high=0.1), Gene("augment.close_mosaic", "int", 1, 10),
               Gene("optimizer.name", "choice", values=("SGD", "AdamW"))),
              ({"lr0": 0.01, "augment.close_mosaic": 5, "optimizer.name": "SGD"},), random_share=0.3)
SEARCH = Search.model_validate({"scheduler": "ladder"})
RESOLVED = Recipe(seed=3, epochs=EPOCHS, batch_size=16, microbatch=8, precision="fp32")
ASKED = Recipe(seed=3, epochs=EPOCHS)


def sweep_of(labels: str = "0123", asked: Recipe = ASKED, **fields: Any) -> SweepEvent:
    """The sweep over a data set and a requested recipe, with other fields."""
    return SweepEvent(identity={"data set": labels, "base recipe": recipe_digest(asked)},
                 **{"space": SPACE, "search": SEARCH, "recipe": RESOLVED, "rungs": RUNGS, "virtual_slots": 3, **fields})


def outcome_of(task: Task) -> Outcome:
    """What a training comes to; one with nine epochs of close_mosaic fails."""
    if task.genes["augment.close_mosaic"] == 9:
        return Outcome(reason="the loss stays non-finite")
    noise = np.random.default_rng([task.seed, task.until, round(1e6 * float(task.genes["lr0"]))]).standard_normal()
    fitness = float((1 - abs(float(task.genes["lr0"]) - 0.05) * 5) * (0.5 + task.until / 18) * (1 + 0.002 * noise))
    return Outcome(fitness=fitness, metrics={"mAP50": fitness, "recall": 0.5}, losses={"box": 0.1},
                   weights=f"{task.trial}-{task.seed}-{task.until}")


def open_ledger(path: Path, virtual_slots: int = 3, **fields: Any) -> Ledger:
    """The ledger of the sweep, begun or continued."""
    return Ledger(path, sweep_of(virtual_slots=virtual_slots, **fields))


def propose(ledger: Ledger) -> ProposedEvent:
    """Write another trial with the first genes of the space."""
    line = ProposedEvent(trial=len(ledger.trials), genes=dict(ledger.begun.space.starts[0]), how="start", parents=(),
                         at=0.0)
    ledger.append(line)
    return line


def dispatcher_of(ledger: Ledger, trials: int, slots: int = 3,
                  known: Callable[[Task], Outcome | None] = lambda task: None) -> Dispatcher:
    """The dispatcher of a driver that continues the ledger until there are so many trials."""
    schedule = ledger.begun.schedule(write=ledger.append)
    schedule.restore(ledger.lines)
    return Dispatcher(schedule, ledger.begun.folder_of, lambda: len(schedule.genes) < trials, known, lambda: slots)


def run_sweep(path: Path, trials: int, *, slots: int = 3, order: int = 0, stop_after: int = -1,
              virtual_slots: int = 3, **fields: Any) -> Ledger:
    """A driver whose slots end in a random order. Returns its closed ledger.

    Args:
        stop_after: tasks after which it is killed; those under way are lost.
    """
    ledger, draw, done = open_ledger(path, virtual_slots, **fields), random.Random(order), 0
    dispatcher = dispatcher_of(ledger, trials, slots)
    while done != stop_after:
        while dispatcher.take():
            pass
        if not dispatcher.running:
            break
        name = draw.choice(sorted(dispatcher.running))
        dispatcher.finish(name, outcome_of(dispatcher.running[name]))
        done += 1
    ledger.close()
    return ledger


def names_of(tasks: Sequence[Task]) -> list[tuple[int, int, int]]:
    """What identifies each task."""
    return [(task.trial, task.seed, task.until) for task in tasks]
