"""Between Ray Tune, which starts and stops trials, and the ledger, which says what to try and keeps what came of it.

Ray's own saving and restoring of searches is not used: a restart opens the ledger. (It was measured to run finished
trials again, and it unpickles.)
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.search import Searcher

from ray_yolo.engine.ledger import Ledger, Trial
from ray_yolo.engine.sweep_files import write_sweep_files
from ray_yolo.runtime.cluster import free, held_by
from ray_yolo.runtime.sweep_display import SweepDisplay
from ray_yolo.runtime.trial import number_of, read_pointer

_DEAD_SECONDS = 15.0  # after which a stopped trial's processes are gone


def tune_config_of(trial: Trial) -> dict[str, Any]:
    """What Tune hands to a trial; the number makes its name and is not read afterwards."""
    origin = asdict(trial.origins[-1]) if trial.origins else None
    return {"trial": trial.number, "genes": dict(trial.genes), "origin": origin}


class LedgerSearcher(Searcher):
    """Gives out the ledger's unfinished rows first, then proposals, until `num_trials` rows have been given out."""

    def __init__(self, ledger: Ledger, num_trials: int) -> None:
        super().__init__(metric="fitness", mode="max")
        self._ledger, self._num_trials = ledger, num_trials
        self._waiting = list(ledger.to_run)

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        """A row to train, or FINISHED."""
        if self._waiting:
            return tune_config_of(self._waiting.pop(0))
        if len(self._ledger.trials) < self._num_trials:
            return tune_config_of(self._ledger.propose())
        return Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing: `LedgerCallback` hears of every scheduler's trials, also of those that no searcher made."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is on disk."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: see the module."""

    def __getstate__(self) -> dict[str, Any]:
        """Ray pickles searchers for its own restore, which is not used."""
        return {}


class LedgerCallback(Callback):
    """Writes down what happens to trials, before anything follows from it, and shows it."""

    def __init__(self, ledger: Ledger, display: SweepDisplay) -> None:
        self._ledger, self._display = ledger, display
        self._held: list[tuple[float, str]] = []  # when to give it back, placement group

    def on_trial_start(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """A trial's process is there and has not begun."""
        number = number_of(str(trial))
        pointer = read_pointer(trial.checkpoint) if trial.checkpoint else None
        row = self._ledger.trials[number]
        self._free_later(number)  # what an earlier attempt held
        genes = dict(trial.config["genes"])
        if pointer and pointer.trial != number and (row.origins[-1:], row.genes) != ((pointer,), genes):
            self._ledger.exploit(number, genes, pointer)
            self._display.say(f"trial {number} goes on from trial {pointer.trial} at epoch {pointer.epoch}")
        self._ledger.start(number)
        self._display.started(number)

    def on_trial_result(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: dict[str, Any],
                        **info: Any) -> None:
        """A validated epoch, or the reason of a failure."""
        if "fitness" in result:
            self._display.epoch(number_of(str(trial)), result["epoch"], result["fitness"])

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """A trial has ended or was stopped early: its last report counts."""
        result = trial.last_result or {}
        if "failed" in result or "fitness" not in result:
            self._end(trial, result.get("failed") or "it ended before its first validation")
            return
        row = json.loads(result["row"])
        self._ledger.finish(number_of(str(trial)), result["fitness"], row["metrics"], row["losses"], result["epoch"])
        self._tell(trial)

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """A trial's process died."""
        self._end(trial, "its process died")

    def on_step_end(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        """Called by Tune every moment: give back what stopped trials held.

        Ray's own cleaner does so within seconds, but not where the kill comes while a training ends. Not at once: a
        controller that still lives would take the loss of its workers for a failure and ask for others.
        """
        now = time.monotonic()
        for due, group in self._held:
            if due <= now:
                free(group)
        self._held = [(due, group) for due, group in self._held if due > now]

    def finish(self) -> None:
        """Wait until everything is given back; nothing to wait for where no trial was stopped lately."""
        while self._held:
            time.sleep(0.5)
            self.on_step_end(0, [])

    def _free_later(self, number: int) -> None:
        folder = self._ledger.path.parent / "trials" / self._ledger.trials[number].folder_name
        if group := held_by(folder):
            self._held.append((time.monotonic() + _DEAD_SECONDS, group))

    def __getstate__(self) -> dict[str, Any]:
        """Ray pickles callbacks for its own restore, which is not used."""
        return {}

    def _end(self, trial: TuneTrial, reason: str) -> None:
        self._ledger.fail(number_of(str(trial)), reason)
        self._tell(trial)

    def _tell(self, trial: TuneTrial) -> None:
        self._free_later(number_of(str(trial)))
        trials = self._ledger.trials
        write_sweep_files(self._ledger.path.parent, self._ledger.recipe, trials)
        self._display.ended(trials[number_of(str(trial))], trials)
