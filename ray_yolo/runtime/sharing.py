"""Which worker of an elastic training leaves for another job of the cluster, and when its place is requested again.

Each driver reads the same table of placement groups and computes the same answer, so drivers need neither a coordinator
nor a lock. Only the driver whose worker is named acts. The name of a placement group carries what the others have to
know: its kind and its priority.

| kind | group | gives its place | gets a place |
|---|---|---|---|
| minimum | the least workers of a range, in one group | never | from jobs of equal or lower priority |
| extra | one worker above the minimum | to those who may get it | to level out equal priorities, or by a higher one |
| foreign | of another program, or of a fixed number of workers | never | as a minimum of priority 0 |

This module is pure. `Supervisor` reads the table and acts.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

PATIENCE_SECONDS = 10.0  # that a group waits before a worker leaves for it
CALM_SECONDS = 60.0  # without a waiting group, until places are requested again; and between two moves of a worker
SETTLE_SECONDS = 5.0  # at most, until Ray reports the resources of a removed group as free
_NAME = re.compile(r"ray_yolo/(minimum|extra)/(-?\d+)/(\d+)/[0-9a-f]+")

GroupKind = Literal["minimum", "extra", "foreign"]


class Group(NamedTuple):
    """A placement group of the cluster."""

    id: str
    job: str  # Ray's id of the program that has created it
    is_placed: bool  # otherwise it waits for resources
    bundles: tuple[Mapping[str, float], ...]  # the CPUs and GPUs of those that reserve any
    is_strict: bool  # its bundles may not be placed freely
    kind: GroupKind = "foreign"
    priority: int = 0
    number: int = 0  # of the pool's bundle

    @property
    def largest_bundle(self) -> Mapping[str, float]:
        """A place of this size holds any of its bundles. Those of other programs may differ."""
        kinds = {kind for bundle in self.bundles for kind in bundle}
        return {kind: max(bundle.get(kind, 0.0) for bundle in self.bundles) for kind in sorted(kinds)}


class Offer(NamedTuple):
    """An extra worker that leaves, and the group that waits for its place."""

    leaves: Group
    waits: Group


def group_name(kind: GroupKind, priority: int, number: int) -> str:
    """A new name for a placement group. Ray demands that it is unique."""
    return f"ray_yolo/{kind}/{priority}/{number}/{uuid.uuid4().hex}"


def read_groups(table: Mapping[str, Mapping[str, Any]], creator_of: Callable[[str], str]) -> list[Group]:
    """The groups of Ray's table that are placed or wait, and reserve CPUs or GPUs."""
    groups = []
    for row in table.values():
        reserved = [{kind: bundle[kind] for kind in ("CPU", "GPU") if bundle.get(kind)}
                    for bundle in row["bundles"].values()]
        bundles = tuple(bundle for bundle in reserved if bundle)
        if row["state"] not in ("PENDING", "CREATED") or not bundles:
            continue
        identity = row["placement_group_id"]
        is_strict = row["strategy"].startswith("STRICT") and len(reserved) > 1
        group = Group(identity, creator_of(identity), row["state"] == "CREATED", bundles, is_strict)
        if match := _NAME.fullmatch(row["name"]):
            kind: GroupKind = "extra" if match[1] == "extra" else "minimum"
            group = group._replace(kind=kind, priority=int(match[2]), number=int(match[3]))
        groups.append(group)
    return groups


def choose_offer(groups: Sequence[Group], due: Collection[str], free: Sequence[Mapping[str, float]],
                 soon_free: Sequence[Mapping[str, float]] = ()) -> Offer | None:
    """The next worker that leaves, and for which group; None: none has to.

    Of the waiting groups the one of the highest priority comes first, then those that are no extras. Of the extras that
    may be taken, one of the lowest priority leaves first, then one of the job that has the most of them, then of the
    job whose id is first. Of a job, the youngest leaves. No worker leaves for a strict group, whose places are not free
    to choose.

    Args:
        due: the ids of the groups that have waited for `PATIENCE_SECONDS`.
        free: the free resources of each node.
        soon_free: the same once Ray has counted what removed groups have held.
    """
    extras = [group for group in groups if group.kind == "extra" and group.is_placed]
    count = Counter(extra.job for extra in extras)

    def may_take(waits: Group, extra: Group) -> bool:
        if extra.job == waits.job or not _holds(extra.bundles[0], waits.largest_bundle):  # an extra has one bundle
            return False
        if extra.priority != waits.priority:
            return extra.priority < waits.priority
        if waits.kind != "extra":
            return True
        # After the move the giver still has as many extras as the taker; with less, they would swap for ever.
        return count[extra.job] - 1 >= count[waits.job] + 1

    waiting = [group for group in groups if group.id in due and not group.is_placed and not group.is_strict]
    for waits in sorted(waiting, key=lambda group: (-group.priority, group.kind == "extra", group.id)):
        needed = waits.largest_bundle
        missing = len(waits.bundles) - max(_fitting(needed, free), _fitting(needed, soon_free))
        candidates = [extra for extra in extras if may_take(waits, extra)]
        # Ray is about to place it, or all extras together would not suffice
        if missing <= 0 or missing > len(candidates):
            continue
        leaver = min(candidates, key=lambda extra: (extra.priority, -count[extra.job], extra.job, -extra.number))
        return Offer(leaver, waits)
    return None


def _holds(bundle: Mapping[str, float], needed: Mapping[str, float]) -> bool:
    return all(bundle.get(kind, 0.0) >= amount for kind, amount in needed.items())


def _fitting(needed: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int:
    """How many such bundles fit into the free resources of the nodes."""
    return sum(min(int(free.get(kind, 0.0) / amount + 1e-9) for kind, amount in needed.items()) for free in nodes)


@dataclass(frozen=True)
class Decision:
    """What a driver has to do with its extra workers."""

    give: int | None = None  # this bundle's worker leaves
    to: str = ""  # the job that waits
    withdraws: bool = False  # extras of its own that wait would take what others give
    takes_back: bool = False  # request the places again


class Sharing:
    """The decisions of one driver over time.

    Args:
        job: Ray's id of this program.
        clock: returns the time in seconds.
    """

    def __init__(self, job: str, clock: Callable[[], float]) -> None:
        self._job, self._clock = job, clock
        self._seen: dict[str, float] = {}  # the waiting groups, and when each was first seen
        self._calm_since = clock()
        self._moved: dict[int, float] = {}  # bundles, and when each was given or taken back
        self._placed: dict[str, Group] = {}  # at the last look, as the free resources
        self._free: list[Mapping[str, float]] = []
        self._soon_free: list[Mapping[str, float]] = []
        self._settled_at = clock()  # until then `_soon_free` holds

    def decide(self, groups: Sequence[Group], free: Iterable[Mapping[str, float]], leaving: Collection[int]
               ) -> Decision:
        """The decision at this moment.

        Args:
            leaving: bundles whose workers are about to leave: the next one waits until they have.
        """
        now = self._clock()
        waiting = [group.id for group in groups if not group.is_placed]
        foreign = [group.id for group in groups if not group.is_placed and group.job != self._job]
        self._seen = {group: self._seen.get(group, now) for group in waiting}
        if foreign:
            self._calm_since = now
        due = [group for group, since in self._seen.items() if now - since >= PATIENCE_SECONDS]
        free = list(free)
        offer = choose_offer(groups, due, free, self._expect_free(groups, free, now))
        if offer is None:
            is_calm = now - self._calm_since >= CALM_SECONDS
            return Decision(takes_back=is_calm)
        withdraws = offer.waits.job != self._job
        if offer.leaves.job != self._job or leaving or not self._may_move(offer.leaves.number, now):
            return Decision(withdraws=withdraws)
        self._moved[offer.leaves.number] = now
        return Decision(give=offer.leaves.number, to=offer.waits.job, withdraws=withdraws)

    def took_back(self, number: int) -> None:
        """A bundle was requested again."""
        self._moved[number] = self._clock()

    def _expect_free(self, groups: Sequence[Group], free: list[Mapping[str, float]], now: float
                     ) -> list[Mapping[str, float]]:
        """What is free soon: Ray's report of free resources is later than its table. Empty: the report is true.

        Without it one worker too many would leave: the group that it left for waits for a moment longer.
        """
        placed = {group.id: group for group in groups if group.is_placed}
        removed = [group for group in self._placed.values() if group.id not in placed]
        if now >= self._settled_at or placed.keys() - self._placed.keys():  # a new group has taken some of it
            self._soon_free = []
        if removed:
            self._soon_free = list(self._soon_free or self._free)
            for group in removed:
                self._soon_free += group.bundles
            self._settled_at = now + SETTLE_SECONDS
        self._placed, self._free = placed, free
        return self._soon_free

    def _may_move(self, number: int, now: float) -> bool:
        return now - self._moved.get(number, now - CALM_SECONDS) >= CALM_SECONDS
