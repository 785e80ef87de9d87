"""Hands out the tasks of a study, the virtually earliest first, and returns their results to its schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ray_yolo.core.errors import RayYoloError, TrainingError
from ray_yolo.tune.ledger_events import ClaimedEvent
from ray_yolo.tune.schedule import Ending, Outcome, Task


class TaskSource(Protocol):
    """Decides what to train next: the schedule of a sweep, or that of a comparison's pairs."""

    def next(self, explore: Callable[[], bool], ending: Callable[[], Ending]) -> Task | ClaimedEvent | None:
        """The next task, the claim at the end, or None until one of the tasks handed out has its outcome."""

    def finish(self, task: Task, outcome: Outcome) -> None:
        """Record the outcome of a task.

        Raises:
            TrainingError: if no decision can follow from it.
        """


class Dispatcher:
    """The tasks that are ready or running, by the names of their run folders.

    Args:
        folder_of: returns the name of the run folder in which a task trains.
        explores: whether the study continues with new trainings.
        known: returns the result of a task if any sweep of the project has trained it; None: it must be trained.
        limit: the maximum number of running tasks.
        ending: returns what there is time for once exploration is closed; see `Schedule.next`.
    """

    def __init__(self, schedule: TaskSource, folder_of: Callable[[Task], str], explores: Callable[[], bool],
                 known: Callable[[Task], Outcome | None], limit: Callable[[], int],
                 ending: Callable[[], Ending] = Ending) -> None:
        self._schedule, self.name, self._known, self._limit = schedule, folder_of, known, limit
        self._explores, self._ending = explores, ending
        self._ready: list[Task] = []
        self.running: dict[str, Task] = {}
        self.over: ClaimedEvent | None = None
        """The claim at the end."""
        self.error: RayYoloError | None = None
        """Why the study ends without a claim, once its running tasks have ended."""

    @property
    def has_ended(self) -> bool:
        """Whether no task is handed out any more."""
        return self.over is not None or self.error is not None

    def close(self, error: RayYoloError) -> None:
        """Hand out no more tasks, for this reason. The first reason counts."""
        self.error = self.error or error

    def advance(self) -> None:
        """Make the decisions that are due."""
        while not self.has_ended:
            reply = self._schedule.next(self._explores, self._ending)
            if reply is None:
                return
            if isinstance(reply, ClaimedEvent):
                self.over = reply
            elif outcome := self._known(reply):
                self._finish(reply, outcome)
            else:
                self._ready.append(reply)

    def take(self) -> Task | None:
        """The task whose result is needed first; it counts as running from now on. None if none can start now."""
        self.advance()
        if self.has_ended or not self._ready or len(self.running) >= self._limit():
            return None
        task = min(self._ready, key=lambda task: (task.end, task.start, task.trial, task.seed))
        self._ready.remove(task)
        self.running[self.name(task)] = task
        return task

    def finish(self, name: str, outcome: Outcome) -> None:
        """Pass on the result of the task in a run folder."""
        self._finish(self.running.pop(name), outcome)
        self.advance()

    def give_up(self, name: str, reason: str, kind: type[RayYoloError] = TrainingError) -> None:
        """Close with an error of this kind: the task in a run folder failed, and not by its recipe, so it stays."""
        del self.running[name]
        self.close(kind(f"{name}: {reason}; the same command continues"))

    def config(self, task: Task) -> dict[str, Any]:
        """The Tune configuration of a task."""
        return {"trial": self.name(task), "genes": dict(task.genes), "seed": task.seed, "until": task.until,
                "end": task.end}

    def _finish(self, task: Task, outcome: Outcome) -> None:
        try:
            self._schedule.finish(task, outcome)
        except TrainingError as error:
            self.close(TrainingError(f"{error}; the same command continues"))
