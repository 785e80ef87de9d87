"""What a study asks: the first line of its ledger, from which its decisions follow.

A study is several trainings under one question: a sweep searches a better recipe, a comparison says which of two sides
is better. Each training of it to one epoch is a task.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.claim import FORMER_LAW, LAW
from ray_yolo.tune.evolution import Genes, Space
from ray_yolo.tune.identity import changed_parts
from ray_yolo.tune.ledger_events import CountedEvent, FailedEvent, LedgerEvent, ProposedEvent
from ray_yolo.tune.pairs import PairSchedule, pair_of, training_folder
from ray_yolo.tune.schedule import Schedule, Task
from ray_yolo.tune.search import Search
from ray_yolo.tune.sides import Recipes
from ray_yolo.tune.trials import network_name, overlay, replay_command, trial_folder

VERSION = 6
"""Of the ledger's format. It moves with the version of the package."""


class StudyEvent(LedgerEvent):
    """The first line of a ledger."""

    version: int = VERSION
    ray_yolo: str = ""  # version of the package that began the study; '' in ledgers up to version 5
    identity: Mapping[str, str]  # digests of all that the results depend on and the settings only name

    @abstractmethod
    def schedule(self, **options: Any) -> Schedule | PairSchedule:
        """What decides; the options are its `write`, and for a comparison its `limit`."""

    @abstractmethod
    def folder_of(self, task: Task) -> str:
        """The name of the run folder in which a task trains."""

    def changed(self, current: StudyEvent) -> list[str]:
        """What differs from the study of a command, in words. A command with another one cannot continue this study."""
        return changed_parts(self.identity, current.identity)

    def annotations(self, line: LedgerEvent) -> dict[str, Any]:
        """What a line has for its readers beside its own fields. Nothing follows from it."""
        return {}


class SweepEvent(StudyEvent):
    """The first line of a sweep, of type `sweep`: what is searched."""

    space: Space
    search: Search
    recipe: Recipe  # the base of all trials, resolved; its seed also seeds the search
    rungs: tuple[int, ...]  # epochs at which trials pause; the last one is the whole training
    virtual_slots: int
    latencies: Mapping[str, float] = {}  # milliseconds per image of each network, if the search has a limit

    def schedule(self, **options: Any) -> Schedule:
        """The schedule of this sweep."""
        is_former = self.version != VERSION
        law = FORMER_LAW if is_former else LAW
        space = replace(self.space, is_fine=not is_former)
        return Schedule(space, self.recipe.seed, self.rungs, self.virtual_slots, self.cost, law=law, **options)

    def folder_of(self, task: Task) -> str:
        """The name of a trial's run folder; a training on a fresh seed has its own."""
        return trial_folder(task.trial, seed=None if task.seed == self.recipe.seed else task.seed)

    def changed(self, current: StudyEvent) -> list[str]:
        """What differs from the sweep of a command."""
        assert isinstance(current, SweepEvent)
        changed = [] if self.space == current.space else ["search space"]
        changed += [] if self.search == current.search else ["search settings"]
        return changed + super().changed(current)

    def annotations(self, line: LedgerEvent) -> dict[str, Any]:
        """The command that trains a proposal alone."""
        return {"command": replay_command(self.recipe, line.genes)} if isinstance(line, ProposedEvent) else {}

    def cost(self, genes: Genes) -> float:
        """Virtual time of an epoch with these genes: pixels x images, 1 for the base recipe."""
        ours, base = overlay(self.recipe, genes), self.recipe
        return (ours.imgsz / base.imgsz) ** 2 * ours.fraction / base.fraction

    def exceeds_limit(self, genes: Genes) -> str:
        """Why these genes are not trained; '': their network is fast enough."""
        limit, network = self.search.limit, network_name(overlay(self.recipe, genes))
        if limit is None or (time := self.latencies[network]) <= limit.latency_ms:
            return ""
        return f"{network} takes {time:.3g} ms an image, over the limit of {limit.latency_ms:g}"


class ComparisonEvent(StudyEvent):
    """The first line of a comparison, of type `comparison`: its two sides."""

    a: Recipe  # resolved; its seed is the one from which those of the pairs follow
    b: Recipe

    @property
    def recipe(self) -> Recipe:
        """The recipe of A; the genes of each task replace all of its settings."""
        return self.a

    @property
    def recipes(self) -> Recipes:
        """Both recipes."""
        return Recipes(self.a, self.b)

    def schedule(self, **options: Any) -> PairSchedule:
        """The schedule of this comparison."""
        return PairSchedule(self.recipes, **options)

    def folder_of(self, task: Task) -> str:
        """The name of a training's run folder, by pair and side."""
        return training_folder(*pair_of(task.trial))

    def annotations(self, line: LedgerEvent) -> dict[str, Any]:
        """Pair and side of a result."""
        if not isinstance(line, (CountedEvent, FailedEvent)):
            return {}
        pair, side = pair_of(line.trial)
        return {"pair": pair, "side": side}
