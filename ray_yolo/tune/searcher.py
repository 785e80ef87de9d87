"""Connects Ray Tune, which starts and stops trials, to the ledger, which proposes them and records their results.

Ray's own saving and restoring of searches is not used: it ran finished trials again when measured, and it unpickles.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ray.tune import Callback
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import Searcher

from ray_yolo.core.errors import ResourcesError, TrainingError
from ray_yolo.tune.console import SweepDisplay
from ray_yolo.tune.evolution import Gene, GeneValue, Space, draw, nearest
from ray_yolo.tune.files import drop_weights, write_sweep_files
from ray_yolo.tune.ledger import Failed, Judged, Ledger, Lost
from ray_yolo.tune.search import Asha, MedianStop, Pbt, Search
from ray_yolo.tune.trial import number_of, read_pointer
from ray_yolo.tune.trials import Trial, best_trial

if TYPE_CHECKING:
    from ray.tune.execution.tune_controller import TuneController

_DEAD_SECONDS = 15.0  # after which a stopped trial's processes are gone
_DIED: dict[str, Any] = {"lost": "its process died", "lacking": False}  # stands in for a report that was not made


def tune_config_of(trial: Trial) -> dict[str, Any]:
    """The Tune configuration of a trial; the number becomes its name and is not read afterwards."""
    origin = asdict(trial.origins[-1]) if trial.origins else None
    return {"trial": trial.number, "genes": dict(trial.genes), "origin": origin}


def _no_state(self: object) -> dict[str, Any]:
    """Nothing to pickle: Ray's own restore is not used."""
    return {}


class LedgerSearcher(Searcher):
    """Suggests the ledger's unfinished rows first, then new proposals, until there are `num_trials` rows.

    Args:
        limit: returns how many trials may run or start now.
    """

    def __init__(self, ledger: Ledger, num_trials: int, limit: Callable[[], int]) -> None:
        super().__init__(metric="fitness", mode="max")
        self._ledger, self._num_trials, self._limit = ledger, num_trials, limit
        self._queued = list(ledger.to_run)
        self._active: set[str] = set()

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The configuration of a row to train, FINISHED, or None while the limit is reached."""
        has_more = self._queued or len(self._ledger.trials) < self._num_trials
        if not has_more:
            return Searcher.FINISHED
        if len(self._active) >= self._limit():
            return None
        self._active.add(trial_id)
        return tune_config_of(self._queued.pop(0) if self._queued else self._ledger.propose())

    def stop(self) -> None:
        """Suggest no more trials."""
        self._queued, self._num_trials = [], 0

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Free the trial's slot. `LedgerCallback` records the result, since PBT has no searcher."""
        self._active.discard(trial_id)

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: the ledger is on disk."""

    __getstate__ = _no_state


class LedgerCallback(Callback):
    """Records what happens to trials before Tune acts on it, and displays it.

    Args:
        searcher: the searcher of the sweep; None under population based training.
        drops: whether to remove the checkpoints of beaten trials during the sweep.
    """

    def __init__(self, ledger: Ledger, display: SweepDisplay, scheduler: TrialScheduler,
                 searcher: LedgerSearcher | None, *, drops: bool) -> None:
        self._ledger, self._display, self._scheduler, self._drops = ledger, display, scheduler, drops
        self._searcher = searcher
        self._lacking = ""  # why the cluster has no capacity for any trial
        self._rungs = frozenset(ledger.rungs)
        self._started: set[int] = set()  # since the driver was started
        self._lost: dict[int, dict[str, Any]] = {}  # by trial: the last report of a failure that restarts it
        self._beaten: list[tuple[float, Path]] = []  # when the checkpoints of a run folder can be removed
        recall_ended(scheduler, ledger)

    def on_trial_start(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Record a start, or an exploit, before the trial's process begins to train."""
        number = number_of(str(trial))
        pointer = read_pointer(trial.checkpoint) if trial.checkpoint else None
        row = self._ledger.trials[number]
        genes = dict(trial.config["genes"])
        if pointer and pointer.trial != number and (row.origins[-1:], row.genes) != ((pointer,), genes):
            self._ledger.exploit(number, genes, pointer)
            self._display.say(f"trial {number} continues from trial {pointer.trial} at epoch {pointer.epoch}")
        if number not in self._started:
            recall(self._scheduler, trial, row.judged)
        self._started.add(number)
        self._ledger.start(number)
        self._display.started(number)

    def on_trial_result(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: dict[str, Any],
                        **info: Any) -> None:
        """Record a validated epoch or the reason of a failure, after the scheduler's decision."""
        number = number_of(str(trial))
        if "lost" in result:
            self._lost[number] = result
        if "fitness" not in result:
            return
        judged = {epoch for epoch, _ in self._ledger.trials[number].judged}  # a resumed training reports some again
        if result["epoch"] in self._rungs - judged and not result.get("done"):
            self._ledger.append(Judged(trial=number, epoch=result["epoch"], fitness=result["fitness"]))
        self._display.epoch(number, result["epoch"], result["fitness"])

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Record the result of a trial that completed, failed, or was stopped early, from its last report."""
        result, number = trial.last_result or {}, number_of(str(trial))
        if "failed" in result or "fitness" not in result:
            self._fail(number, result.get("failed") or "it ended before its first validation")
            return
        row = json.loads(result["row"])
        self._ledger.finish(number, row["fitness"], row["metrics"], row["losses"], result["epoch"],
                            stopped=not (self._folder(number) / "finished").exists(), last_fitness=result["fitness"])
        self._notify(number)

    def on_trial_recover(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Record a failure that the recipe did not cause; Tune starts the trial again."""
        number = number_of(str(trial))
        reason = self._lost.pop(number, _DIED)["lost"]
        self._ledger.append(Lost(trial=number, reason=reason))
        self._display.say(f"trial {number} is queued again: {reason}")

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Record a trial that failed too often. If the cluster has no capacity, the sweep ends and it stays queued."""
        report = self._lost.pop(number_of(str(trial)), _DIED)
        if not report["lacking"]:
            self._fail(number_of(str(trial)), report["lost"])
            return
        self._lacking = report["lost"]
        if self._searcher:
            self._searcher.stop()

    def on_step_end(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        """Remove the checkpoints that are due; Tune calls this many times a second.

        Raises:
            TrainingError: if another process has taken over the sweep.
        """
        if self._ledger.stored and self._ledger.stored.is_lost:
            raise TrainingError(f"{self._ledger.stored.address}: another process has taken over this sweep")
        due = [entry for entry in self._beaten if entry[0] <= time.monotonic()]
        self._beaten = [entry for entry in self._beaten if entry not in due]
        for _, folder in due:
            drop_weights(folder)

    def check_room(self) -> None:
        """Check, after the last trial, that the cluster had capacity for all of them.

        Raises:
            ResourcesError: if trials are left without capacity.
        """
        if self._lacking:
            raise ResourcesError(f"{self._lacking}; the same command continues")

    def _folder(self, number: int) -> Path:
        return self._ledger.path.parent / "trials" / self._ledger.trials[number].folder_name

    def _drop_later(self, number: int) -> None:
        """Schedule the checkpoints of a beaten trial for removal: the former best one, or the one that just ended.

        The workers of a stopped trial may write for some more seconds. The end of the sweep removes what is left.
        """
        rows = self._ledger.trials
        former_best = best_trial(row for row in rows if row.number != number)
        beaten = former_best if best_trial(rows) is rows[number] else rows[number]
        if self._drops and beaten is not None:
            delay = 0.0 if (self._folder(beaten.number) / "finished").exists() else _DEAD_SECONDS
            self._beaten.append((time.monotonic() + delay, self._folder(beaten.number)))

    __getstate__ = _no_state

    def _fail(self, number: int, reason: str) -> None:
        self._ledger.append(Failed(trial=number, reason=reason))
        self._notify(number)

    def _notify(self, number: int) -> None:
        self._drop_later(number)
        trials = self._ledger.trials
        write_sweep_files(self._ledger.path.parent, self._ledger.recipe, trials)
        self._display.ended(trials[number], trials)


class KeyedPbt(PopulationBasedTraining):
    """Ray's scheduler with draws that follow from (seed, trial, epoch).

    Ray draws the donor and the changed genes from Python's global generator.
    """

    def __init__(self, seed: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._seed = seed

    def on_trial_result(self, tune_controller: TuneController, trial: TuneTrial, result: dict[str, Any]) -> str:
        """Ray's decision. It seeds Python's generator with the key, and restores it."""
        before = random.getstate()
        random.seed(f"{self._seed} {trial} {result.get('epoch')}")
        try:
            return str(super().on_trial_result(tune_controller, trial, result))
        finally:
            random.setstate(before)


def build_scheduler(settings: Search, space: Space, epochs: int, seed: int) -> TrialScheduler:
    """The scheduler of a search over trainings of `epochs` epochs. Only population based training uses the seed."""
    common: dict[str, Any] = {"time_attr": "epoch", "metric": "fitness", "mode": "max"}
    match settings.scheduler:
        case Asha(reduction=reduction):
            # one more than there are: else ASHA stops a training that is about to complete
            return ASHAScheduler(**common, max_t=epochs + 1, grace_period=settings.first_rung(epochs),
                                 reduction_factor=reduction)
        case MedianStop(min_trials=least):
            return MedianStoppingRule(**common, grace_period=settings.first_rung(epochs), min_samples_required=least)
        case Pbt() as pbt:
            return KeyedPbt(
                seed, **common, perturbation_interval=pbt.interval_epochs, quantile_fraction=pbt.quantile,
                resample_probability=pbt.resample,
                hyperparam_mutations={"genes": {gene.name: _domain(gene) for gene in space.genes}},
                custom_explore_fn=lambda config: {**config, "genes": _clipped(space, config["genes"])},
                require_attrs=False,  # the report of a failure has no fitness
                log_config=False)
    return FIFOScheduler()


def recall(scheduler: TrialScheduler, trial: Any, judged: Iterable[tuple[int, float]]) -> None:
    """Replay to a new scheduler what an earlier one has judged of a trial: (epochs, fitness).

    Ray's schedulers compare other trials with a result at a trial's end as with any other result.
    """
    for epoch, fitness in judged:
        scheduler.on_trial_add(None, trial)
        scheduler.on_trial_complete(None, trial, {"epoch": epoch, "fitness": fitness})
        scheduler.on_trial_add(None, trial)


class _Ended(NamedTuple):
    """As much of a Tune trial as schedulers read."""

    trial_id: str


def recall_ended(scheduler: TrialScheduler, ledger: Ledger) -> None:
    """Replay all rows of a ledger that have ended, each with the result at which it was stopped."""
    for row in ledger.trials:
        fitness = row.fitness if row.last_fitness is None else row.last_fitness
        last = [(row.epochs, fitness)] if fitness is not None and row.epochs in ledger.rungs else []
        if row.has_ended:
            recall(scheduler, _Ended(f"trial{row.number}"), [*row.judged, *last])


def _domain(gene: Gene) -> list[GeneValue] | Callable[[], GeneValue]:
    """The values of a choice, or a function that draws from Python's generator (Ray's domains draw from NumPy's)."""
    return list(gene.values) if gene.kind == "choice" else lambda: draw(gene, random.random())


def _clipped(space: Space, genes: dict[str, Any]) -> dict[str, Any]:
    """Genes rounded to five digits and clipped to their limits: Ray multiplies by 0.8 or 1.2 without limits."""
    short = {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in genes.items()}
    return {gene.name: nearest(gene, short[gene.name]) for gene in space.genes}
