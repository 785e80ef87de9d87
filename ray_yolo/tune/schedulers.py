"""Ray Tune's own schedulers for a search's settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ray import tune
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from ray_yolo.tune.evolution import Gene, Space, nearest
from ray_yolo.tune.ledger import Ledger
from ray_yolo.tune.search import Asha, MedianStop, Pbt, Search


def build_scheduler(settings: Search, space: Space, epochs: int) -> TrialScheduler:
    """The scheduler of a search over trainings of so many epochs; the search's seed does not reach it."""
    scheduler = settings.scheduler
    common: dict[str, Any] = {"time_attr": "epoch", "metric": "fitness", "mode": "max"}
    if isinstance(scheduler, Asha):
        # one more than there are, so that trainings that come to their end are not stopped while they end
        return ASHAScheduler(**common, max_t=epochs + 1, grace_period=settings.first_rung(epochs),
                             reduction_factor=scheduler.reduction)
    if isinstance(scheduler, MedianStop):
        return MedianStoppingRule(**common, grace_period=settings.first_rung(epochs),
                                  min_samples_required=scheduler.min_trials)
    if isinstance(scheduler, Pbt):
        genes = {gene.name: _domain(gene) for gene in space.genes}
        return PopulationBasedTraining(
            **common, perturbation_interval=scheduler.interval_epochs, quantile_fraction=scheduler.quantile,
            resample_probability=scheduler.resample, hyperparam_mutations={"genes": genes},
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


def recall_ended(scheduler: TrialScheduler, ledger: Ledger) -> None:
    """The same for all rows of a ledger that have ended, each with the result that it was stopped at."""
    for row in ledger.trials:
        last = [(row.epochs, row.fitness)] if row.fitness is not None and row.epochs in ledger.rungs else []
        if row.has_ended:
            recall(scheduler, _Ended(f"trial{row.number}"), [*row.judged, *last])


class _Ended(NamedTuple):
    """What schedulers know a trial by."""

    trial_id: str


def _domain(gene: Gene) -> Any:
    """What a gene is drawn from, in Tune's terms."""
    if gene.kind == "choice":
        return list(gene.values)
    if gene.kind == "int":
        return tune.randint(int(gene.low), int(gene.high) + 1)
    return tune.loguniform(gene.low, gene.high) if gene.log else tune.uniform(gene.low, gene.high)


def _clipped(space: Space, genes: dict[str, Any]) -> dict[str, Any]:
    """Genes of five digits inside their limits: Ray multiplies by 0.8 or 1.2 without looking at them."""
    short = {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in genes.items()}
    return {gene.name: nearest(gene, short[gene.name]) for gene in space.genes}
