"""All workers have equal weights. One whose weights differ has computed wrongly."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import NamedTuple

import torch

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.core.errors import PeerDepartedError, TrainingError, WrongWeightsError
from ray_yolo.core.events import Emit, WarningEvent
from ray_yolo.engine.collectives import Collectives, collective_errors
from ray_yolo.engine.keeper import Keeper
from ray_yolo.engine.learner import Learner
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.state import fingerprint

STEPS_PER_COMPARISON = 50
"""The workers' weights are compared after so many steps, and also before each checkpoint and regrouping."""


class _Standing(NamedTuple):
    """What a worker knows when weights are compared."""

    step: int  # its state is after this step; -1: it has none
    agreed: int  # newest step after which it has compared its weights
    weights: int  # their fingerprint


class WeightCheck:
    """Compares the weights of workers."""

    def __init__(self, spec: TrainSpec, context: WorkerContext, keeper: Keeper, emit: Emit) -> None:
        self._spec, self._context, self._keeper, self._emit = spec, context, keeper, emit
        self.agreed = -1
        """The newest step after which all workers have compared their weights."""
        self.has_state = False
        """Whether training can continue from this worker's state: it has one, and no comparison found it wrong."""

    def compare(self, learner: Learner, collectives: Collectives) -> None:
        """Compare the weights of those workers of a group that have its newest state. All workers get `agreed`.
        Collective.

        Raises:
            WrongWeightsError: on workers without a majority. They depart.
            PeerDepartedError: on the others, which have added the wrong gradients. They no longer have a state: the
                next generation restores the newest checkpoint whose weights were compared.
        """
        step = learner.state.progress.step if self.has_state else -1
        own = _Standing(step, self.agreed, int(fingerprint(learner)))
        standings = [_Standing(*row) for row in collectives.gather(torch.tensor([own])).tolist()]
        self.agreed = max(each.agreed for each in standings)
        newest = max(each.step for each in standings)
        votes = Counter(each.weights for each in standings if each.step == newest)
        if len(votes) == 1:
            return
        self.has_state = False
        self._keeper.wait()
        with contextlib.suppress(PeerDepartedError), collective_errors():
            # a barrier: a worker that left earlier would appear departed to one that has not compared yet
            collectives.gather(torch.zeros(1, 1))
        if collectives.rank == 0:  # faulty workers have contributed to checkpoints since the last comparison
            self._emit(WarningEvent(
                message=f"the workers' weights differ after step {newest}: training goes back to the newest checkpoint "
                        "on which they agreed"))
            self._remove_uncompared()
        has_majority = 2 * votes[own.weights] > votes.total()
        if own.step == newest and not has_majority:
            raise WrongWeightsError(f"the weights after step {newest} are not those of the other workers: memory or "
                                    "arithmetic that is broken, or a processor of another kind")
        raise PeerDepartedError(f"a worker had other weights than the rest after step {newest}")

    def _remove_uncompared(self) -> None:
        """Remove the checkpoints after the last step on which all workers agreed.

        Raises:
            TrainingError: if storage fails. Training must not continue from one of them.
        """
        run_dir, stored = self._spec.run_dir, self._context.stored
        try:
            checkpoint.remove_newer(run_dir, self.agreed)
            if stored:
                stored.remove_newer(self.agreed)
        except OSError as error:
            raise TrainingError(f"{run_dir}: its checkpoints after step {self.agreed} may be wrong, and could not be "
                                f"removed ({error}); remove them, and run the same command again") from error
