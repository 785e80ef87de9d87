"""Between Ray Tune, which starts trials and stops them by its own schedulers, and the ledger, which says what to try
and keeps what came of it.

Ray's own saving and restoring of searches is not used: a restart opens the ledger. (It was measured to run finished
trials again, and it unpickles.)
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
_DIED: dict[str, Any] = {"lost": "its process died", "lacking": False}  # the report of who could not make one


def tune_config_of(trial: Trial) -> dict[str, Any]:
    """What Tune hands to a trial; the number makes its name and is not read afterwards."""
    origin = asdict(trial.origins[-1]) if trial.origins else None
    return {"trial": trial.number, "genes": dict(trial.genes), "origin": origin}


def _no_state(self: object) -> dict[str, Any]:
    """Ray pickles searchers and callbacks for its own restore, which is not used."""
    return {}


class LedgerSearcher(Searcher):
    """Gives out the ledger's unfinished rows first, then proposals, until `num_trials` rows have been given out.

    Args:
        limit: how many may be under way at once, as it is now.
    """

    def __init__(self, ledger: Ledger, num_trials: int, limit: Callable[[], int]) -> None:
        super().__init__(metric="fitness", mode="max")
        self._ledger, self._num_trials, self._limit = ledger, num_trials, limit
        self._waiting = list(ledger.to_run)
        self._under_way: set[str] = set()

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """A row to train, or FINISHED; None: not yet."""
        more = self._waiting or len(self._ledger.trials) < self._num_trials
        if more and len(self._under_way) >= self._limit():
            return None
        self._under_way.add(trial_id)
        if self._waiting:
            return tune_config_of(self._waiting.pop(0))
        if len(self._ledger.trials) < self._num_trials:
            return tune_config_of(self._ledger.propose())
        return Searcher.FINISHED

    def stop(self) -> None:
        """Give out no more."""
        self._waiting, self._num_trials = [], 0

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """One less is under way. What has come of it is heard by `LedgerCallback`, of every scheduler's trials."""
        self._under_way.discard(trial_id)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is on disk."""

    __getstate__ = _no_state


class LedgerCallback(Callback):
    """Writes down what happens to trials, before anything follows from it, and shows it.

    Args:
        searcher: what gives out the trials, if that is ours.
        drops: whether the checkpoints of trials that are beaten are removed at once.
    """

    def __init__(self, ledger: Ledger, display: SweepDisplay, scheduler: TrialScheduler,
                 searcher: LedgerSearcher | None, *, drops: bool) -> None:
        self._ledger, self._display, self._scheduler, self._drops = ledger, display, scheduler, drops
        self._searcher = searcher
        self._lacking = ""  # why there is no room for any trial
        self._rungs = frozenset(ledger.rungs)
        self._begun: set[int] = set()  # since the driver was started
        self._lost: dict[int, dict[str, Any]] = {}  # last report of trials that something happened to
        self._beaten: list[tuple[float, Path]] = []  # run folders, and when their checkpoints can be removed
        recall_ended(scheduler, ledger)

    def on_trial_start(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """A trial's process is there and has not begun."""
        number = number_of(str(trial))
        pointer = read_pointer(trial.checkpoint) if trial.checkpoint else None
        row = self._ledger.trials[number]
        genes = dict(trial.config["genes"])
        if pointer and pointer.trial != number and (row.origins[-1:], row.genes) != ((pointer,), genes):
            self._ledger.exploit(number, genes, pointer)
            self._display.say(f"trial {number} goes on from trial {pointer.trial} at epoch {pointer.epoch}")
        if number not in self._begun:
            recall(self._scheduler, trial, row.judged)
        self._begun.add(number)
        self._ledger.start(number)
        self._display.started(number)

    def on_trial_result(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: dict[str, Any],
                        **info: Any) -> None:
        """A validated epoch, or the reason of a failure; the scheduler has said whether it goes on."""
        number = number_of(str(trial))
        if "lost" in result:
            self._lost[number] = result
        if "fitness" not in result:
            return
        judged = {epoch for epoch, _ in self._ledger.trials[number].judged}  # a training that goes on tells some again
        if result["epoch"] in self._rungs - judged and not result.get("done"):
            self._ledger.append(Judged(trial=number, epoch=result["epoch"], fitness=result["fitness"]))
        self._display.epoch(number, result["epoch"], result["fitness"])

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """A trial has ended or was stopped early: its last report counts."""
        result, number = trial.last_result or {}, number_of(str(trial))
        if "failed" in result or "fitness" not in result:
            self._fail(number, result.get("failed") or "it ended before its first validation")
            return
        row = json.loads(result["row"])
        self._ledger.finish(number, row["fitness"], row["metrics"], row["losses"], result["epoch"],
                            stopped=not (self._folder(number) / "finished").exists(), last_fitness=result["fitness"])
        self._notify(number)

    def on_trial_recover(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """A trial was interrupted by no fault of its recipe, and Tune starts it again."""
        number = number_of(str(trial))
        reason = self._lost.pop(number, _DIED)["lost"]
        self._ledger.append(Lost(trial=number, reason=reason))
        self._display.say(f"trial {number} is queued again: {reason}")

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """The same, once too often; where there is no room even for one trial the sweep ends, and the trial has not."""
        last = self._lost.pop(number_of(str(trial)), _DIED)
        if not last["lacking"]:
            self._fail(number_of(str(trial)), last["lost"])
            return
        self._lacking = last["lost"]
        if self._searcher:
            self._searcher.stop()

    def on_step_end(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        """Called by Tune every moment: remove what nothing needs any more.

        Raises:
            TrainingError: if another process has the sweep.
        """
        if self._ledger.stored and self._ledger.stored.is_lost:
            raise TrainingError(f"{self._ledger.stored.address}: another process goes on with this sweep")
        due = [entry for entry in self._beaten if entry[0] <= time.monotonic()]
        self._beaten = [entry for entry in self._beaten if entry not in due]
        for _, folder in due:
            drop_weights(folder)

    def check_room(self) -> None:
        """See, after the last trial, whether it was the last one for want of room.

        Raises:
            ResourcesError: if trials are left for which there is none.
        """
        if self._lacking:
            raise ResourcesError(f"{self._lacking}; the same command continues")

    def _folder(self, number: int) -> Path:
        return self._ledger.path.parent / "trials" / self._ledger.trials[number].folder_name

    def _drop_later(self, number: int) -> None:
        """Have the checkpoints removed that nothing needs any more: of the best trial so far, or of the one that has
        ended and does not beat it. Its workers may write some more until it has ended; what they leave after that goes
        with the sweep's end.
        """
        rows = self._ledger.trials
        before, best = (best_trial(each) for each in ([row for row in rows if row.number != number], rows))
        beaten = rows[number] if best is not rows[number] else before
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
            # one more than there are, so that trainings that come to their end are not stopped while they end
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
    """Tell a new scheduler what an earlier one has seen of a trial: (epochs, fitness), which are not judged again.

    Ray's schedulers compare others with what they are told at a trial's end as with any other result.
    """
    for epoch, fitness in judged:
        scheduler.on_trial_add(None, trial)
        scheduler.on_trial_complete(None, trial, {"epoch": epoch, "fitness": fitness})
        scheduler.on_trial_add(None, trial)


class _Ended(NamedTuple):
    """What schedulers know a trial by."""

    trial_id: str


def recall_ended(scheduler: TrialScheduler, ledger: Ledger) -> None:
    """The same for all rows of a ledger that have ended, each with the result that it was stopped at."""
    for row in ledger.trials:
        fitness = row.fitness if row.last_fitness is None else row.last_fitness
        last = [(row.epochs, fitness)] if fitness is not None and row.epochs in ledger.rungs else []
        if row.has_ended:
            recall(scheduler, _Ended(f"trial{row.number}"), [*row.judged, *last])


def _domain(gene: Gene) -> list[GeneValue] | Callable[[], GeneValue]:
    """The values of a choice, or a function that draws from Python's generator (Ray's domains draw from NumPy's)."""
    return list(gene.values) if gene.kind == "choice" else lambda: draw(gene, random.random())


def _clipped(space: Space, genes: dict[str, Any]) -> dict[str, Any]:
    """Genes of five digits inside their limits: Ray multiplies by 0.8 or 1.2 without looking at them."""
    short = {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in genes.items()}
    return {gene.name: nearest(gene, short[gene.name]) for gene in space.genes}
