"""What the ledger of a study says of it, as one value. All that is shown of a study is made from it: the lines of
`status`, the row of `list`, the page, and the MLflow run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_yolo.runs.location import is_active
from ray_yolo.runs.run_record import LEDGER_FILE
from ray_yolo.runs.run_state import FolderStatus
from ray_yolo.runs.working_copy import FINISHED
from ray_yolo.tune.claim import PairsClaim
from ray_yolo.tune.ledger import begun_of, claim_of, pairs_claim_of, read_ledger, read_trials
from ray_yolo.tune.ledger_events import ClaimedEvent, CountedEvent, FailedEvent, LedgerEvent
from ray_yolo.tune.pairs import PairResults, claim_from, results_of, training_folder
from ray_yolo.tune.sides import Recipes
from ray_yolo.tune.study import ComparisonEvent
from ray_yolo.tune.trials import Trial, best_trial


@dataclass(frozen=True)
class SweepState:
    """A sweep up to the last line of its ledger."""

    trials: Sequence[Trial]
    """All rows, by number."""
    claim: ClaimedEvent | None
    """None before the end."""

    @property
    def best(self) -> Trial | None:
        """The best trial so far."""
        return best_trial(self.trials)

    @property
    def failed(self) -> list[Trial]:
        """The trials that do not continue."""
        return [trial for trial in self.trials if trial.state == "failed"]

    def status(self, folder: Path) -> FolderStatus:
        """Whether it is active, from the lock of its folder."""
        return _status(folder, FolderStatus("searching"))

    def open_folders(self, folder: Path) -> list[str]:
        """The names of the run folders of trials that train, or were training when the sweep was interrupted."""
        return [trial.folder_name for trial in self.trials if trial.state == "running"]


@dataclass(frozen=True)
class ComparisonState:
    """A comparison up to the last line of its ledger."""

    recipes: Recipes
    results: PairResults
    trainings: Sequence[CountedEvent | FailedEvent]
    """The lines of the results."""
    claim: PairsClaim
    """The last one in the ledger; before there is one, what the pairs that have ended show."""
    is_claimed: bool
    """Whether the claim is in the ledger."""

    def status(self, folder: Path) -> FolderStatus:
        """Whether it is active, from the lock of its folder."""
        return _status(folder, FolderStatus("comparing"))

    def open_folders(self, folder: Path) -> list[str]:
        """The names of the run folders of trainings without a result."""
        ended = {training_folder(pair, side) for pair, side in self.results}
        return [path.name for path in sorted((folder / "trials").glob("*")) if path.name not in ended]


StudyState = SweepState | ComparisonState


def study_state_of(lines: Sequence[LedgerEvent]) -> StudyState:
    """The state that the lines of a ledger show; without lines, that of a sweep without trials.

    Raises:
        InputError: if a proposal is missing.
    """
    if not lines or not isinstance(begun_of(lines), ComparisonEvent):
        return SweepState(tuple(read_trials(lines).values()), claim_of(lines))
    results, claimed = results_of(lines), pairs_claim_of(lines)
    trainings = [line for line in lines if isinstance(line, (CountedEvent, FailedEvent))]
    return ComparisonState(begun_of(lines).recipes, results, trainings, claimed or claim_from(results),
                           is_claimed=claimed is not None)


def read_study_state(folder: Path) -> StudyState:
    """The state of the study in a folder.

    Raises:
        InputError: if its ledger cannot be read.
    """
    return study_state_of(read_ledger(folder / LEDGER_FILE))


def _status(folder: Path, if_active: FolderStatus) -> FolderStatus:
    if is_active(folder):
        return if_active
    return FolderStatus("finished" if (folder / FINISHED).exists() else "interrupted")
