"""Between Ray Tune, which starts and stops trials, and the ledger, which says what to try and keeps what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ray.tune.search import Searcher

from ray_yolo.engine.ledger import Ledger, Trial


class LedgerSearcher(Searcher):
    """Gives out the ledger's unfinished rows first, then proposals, until `num_trials` rows have been given out.

    Ray's own saving and restoring of searchers is not used: a restart opens the ledger. (It was measured to run
    finished trials again, and it unpickles.)

    Args:
        told: called with the ledger after every trial that ends.
    """

    def __init__(self, ledger: Ledger, num_trials: int, told: Callable[[Ledger, Trial], None]) -> None:
        super().__init__(metric="fitness", mode="max")
        self._ledger, self._num_trials, self._told = ledger, num_trials, told
        self._waiting = list(ledger.to_run)
        self._numbers: dict[str, int] = {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        """A row to train, as {"trial": number, "genes": {...}}, or FINISHED."""
        if self._waiting:
            trial = self._waiting.pop(0)
        elif len(self._ledger.trials) < self._num_trials:
            trial = self._ledger.propose()
        else:
            return Searcher.FINISHED
        self._ledger.start(trial.number)
        self._numbers[trial_id] = trial.number
        return {"trial": trial.number, "genes": dict(trial.genes)}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Rows are recorded when they end."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Record the end of a row: its last report, or why there is none."""
        number = self._numbers.pop(trial_id)
        if error or result is None or "failed" in result or "fitness" not in result:
            reason = (result or {}).get("failed") or "its process died, or it ended before its first validation"
            self._ledger.fail(number, reason)
        else:
            row = json.loads(result["row"])
            self._ledger.finish(number, result["fitness"], row["metrics"], row["losses"], result["epoch"])
        self._told(self._ledger, next(trial for trial in self._ledger.trials if trial.number == number))

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is on disk."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: see the class."""

    def __getstate__(self) -> dict[str, Any]:
        """Ray pickles searchers for its own restore, which is not used."""
        return {}
