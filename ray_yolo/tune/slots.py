"""How many trials a cluster has room for at once."""

from __future__ import annotations

import math

import ray

from ray_yolo.errors import ConfigError
from ray_yolo.tune.search import TuneConfig


def concurrent_trials(config: TuneConfig, gpus: float) -> int:
    """Trials that fit into the cluster at once.

    Tune does not know what a trial's own workers need: without this limit trials would hold a part of their workers
    each and wait for each other for ever.

    Raises:
        ConfigError: if not even one trial fits.
    """
    if not (room := room_for_trials(config, gpus)):
        there, workers = ray.cluster_resources(), config.sweep.workers_per_trial
        raise ConfigError(f"workers_per_trial: {workers} workers need {config.placement.cpus * workers:g} CPU and "
                          f"{gpus * workers:g} GPU, the cluster has {there.get('CPU', 0):g} and "
                          f"{there.get('GPU', 0):g}; use fewer")
    return room


def room_for_trials(config: TuneConfig, gpus: float) -> int:
    """The same, as the cluster is now; 0: none fits."""
    there, workers = ray.cluster_resources(), config.sweep.workers_per_trial
    needed = {"CPU": config.placement.cpus * workers, "GPU": gpus * workers}
    room = min(math.floor(there.get(kind, 0) / amount + 1e-9) for kind, amount in needed.items() if amount)
    return room if config.sweep.max_concurrent == "auto" else min(room, config.sweep.max_concurrent)


def trials_ahead(slots: int) -> int:
    """How many trials get ready while others train: as few as keep the slots busy, for proposals know nothing of them.

    Getting ready takes some seconds, the shortest trials some ten. One for each slot of two, as two trials may end
    together where idle workers have helped; of more slots an eighth ends meanwhile.
    """
    return min(slots, max(2, slots // 8))
