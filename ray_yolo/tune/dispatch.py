"""Passes the tasks of a schedule to Ray Tune, the virtually earliest first, and returns their results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from ray_yolo.tune.claim import PairsClaim
from ray_yolo.tune.ledger_events import ClaimedEvent
from ray_yolo.tune.schedule import Outcome, Task
from ray_yolo.tune.trials import trial_folder


class TaskSource(Protocol):
    """Decides what to train next: the schedule of a sweep, or that of a comparison's pairs."""

    def next(self, explore: Callable[[], bool], finishing: Callable[[], float]
             ) -> Task | ClaimedEvent | PairsClaim | None:
        """The next task, the claim at the end, or None until one of the tasks handed out has its outcome."""

    def finish(self, task: Task, outcome: Outcome) -> None:
        """Record the outcome of a task."""


class Dispatcher:
    """The tasks that are ready or running, by the names of their run folders.

    Args:
        seed: of the recipe; a training on another seed has its own run folder.
        explores: whether the sweep continues with new proposals.
        known: returns the result of a task if any sweep of the project has trained it; None: it must be trained.
        limit: the maximum number of running tasks.
        finishing: returns the virtual time for paused trials to end once exploration is closed; see `Schedule.next`.
    """

    def __init__(self, schedule: TaskSource, seed: int, explores: Callable[[], bool],
                 known: Callable[[Task], Outcome | None], limit: Callable[[], int],
                 finishing: Callable[[], float] = lambda: math.inf) -> None:
        self._schedule, self._seed, self._known, self._limit = schedule, seed, known, limit
        self._explores, self._finishing = explores, finishing
        self._ready: list[Task] = []
        self.running: dict[str, Task] = {}
        self.over: ClaimedEvent | PairsClaim | None = None
        """The claim at the end."""

    def advance(self) -> None:
        """Make the decisions that are due."""
        while self.over is None:
            reply = self._schedule.next(self._explores, self._finishing)
            if reply is None:
                return
            if not isinstance(reply, Task):
                self.over = reply
            elif outcome := self._known(reply):
                self._schedule.finish(reply, outcome)
            else:
                self._ready.append(reply)

    def name(self, task: Task) -> str:
        """The name of the run folder in which a task trains."""
        return trial_folder(task.trial, seed=None if task.seed == self._seed else task.seed)

    def take(self, can_take: Callable[[str], bool]) -> Task | None:
        """The task whose result is needed first; it counts as running from now on.

        Args:
            can_take: whether the caller can train in a run folder; if not, the task waits for another caller.
        """
        self.advance()
        if not self._ready or len(self.running) >= self._limit():
            return None
        task = min(self._ready, key=lambda task: (task.end, task.start, task.trial, task.seed))
        if not can_take(self.name(task)):
            return None
        self._ready.remove(task)
        self.running[self.name(task)] = task
        return task

    def finish(self, name: str, outcome: Outcome) -> None:
        """Pass on the result of the task in a run folder."""
        self._schedule.finish(self.running.pop(name), outcome)
        self.advance()

    def config(self, task: Task) -> dict[str, Any]:
        """The Tune configuration of a task."""
        return {"trial": self.name(task), "genes": dict(task.genes), "seed": task.seed, "until": task.until,
                "end": task.end}
