"""Which worker of an elastic training leaves for another job of the cluster, and when its place is requested again.

Each driver reads the same tables of nodes and placement groups and computes the same answer, so drivers need neither a
coordinator nor a lock. Only the driver whose worker is named acts. The name of a placement group carries what the
others have to know: its kind and its priority.

| kind | group | gives its place | gets a place |
|---|---|---|---|
| minimum | the least workers of a range, in one group | never | from jobs of equal or lower priority |
| extra | one worker above the minimum | to those who may get it | to level out equal priorities, or by a higher one |
| foreign | of another program, or of a fixed number of workers | never | as a minimum of priority 0 |

All resources of a bundle and the labels of its node count. This module is pure. `Supervisor` reads the tables and acts.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

PATIENCE_SECONDS = 10.0  # a group waits this long before a worker leaves for it; room lasts as long before it is used
CALM_SECONDS = 60.0  # after this time without a place for others, all are requested again, or a worker is moved again
SETTLE_SECONDS = 5.0  # Ray needs at most this long to report the resources of a removed group as free
SOON_SECONDS, LATE_SECONDS = 1.0, 10.0  # a pool looks this often while places may have to move, and otherwise
ALL = 1_000_000  # places
_NAME = re.compile(r"ray_yolo/(minimum|extra)/(-?\d+)/(\d+)/[0-9a-f]+")

GroupKind = Literal["minimum", "extra", "foreign"]


class Bundle(NamedTuple):
    """Resources that a group reserves together, on one node."""

    needs: Mapping[str, float]
    node: str = ""  # this node holds it; '': it waits
    labels: Mapping[str, str] = {}  # its node has to have them; a label selector of Ray


_NODE = attrgetter("node")


class Group(NamedTuple):
    """A placement group of the cluster."""

    id: str
    job: str  # Ray's id of the program that has created it
    bundles: tuple[Bundle, ...]
    strategy: str = "PACK"
    kind: GroupKind = "foreign"
    priority: int = 0
    number: int = 0  # the pool gives each bundle one

    @property
    def is_placed(self) -> bool:
        """Whether it waits for nothing."""
        return all(map(_NODE, self.bundles))

    @property
    def missing(self) -> list[Bundle]:
        """What it waits for, the largest first. Bundles that have to be on one node are one."""
        waiting = [bundle for bundle in self.bundles if not bundle.node]
        if self.strategy == "STRICT_PACK" and waiting:
            total, labels = Counter[str](), dict[str, str]()
            for bundle in waiting:
                total.update(bundle.needs)
                labels |= bundle.labels
            return [Bundle(total, labels=labels)]
        return sorted(waiting, key=lambda bundle: (-bundle.needs.get("GPU", 0), -sum(bundle.needs.values())))


class Node(NamedTuple):
    """A node that places can be on."""

    id: str
    free: Mapping[str, float]
    labels: Mapping[str, str] = {}


class Offer(NamedTuple):
    """An extra worker that leaves, and the group that waits for its place."""

    leaves: Group
    waits: Group
    gains: Mapping[str, float]
    """What its node has free then."""


def group_name(kind: GroupKind, priority: int, number: int) -> str:
    """A new name for a placement group. Ray demands that it is unique."""
    return f"ray_yolo/{kind}/{priority}/{number}/{uuid.uuid4().hex}"


def named_group(identity: str, job: str, name: str, bundles: tuple[Bundle, ...], strategy: str) -> Group:
    """A group of Ray's table, with what its name tells."""
    group = Group(identity, job, bundles, strategy)
    if match := _NAME.fullmatch(name):
        kind: GroupKind = "extra" if match[1] == "extra" else "minimum"
        group = group._replace(kind=kind, priority=int(match[2]), number=int(match[3]))
    return group


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node has the labels that a selector of Ray asks for: `a`, `!a`, `in(a,b)` or `!in(a,b)` for each."""
    for key, condition in selector.items():
        wanted, has_not = condition.removeprefix("!"), condition.startswith("!")
        values = wanted[3:-1].split(",") if wanted.startswith("in(") else [wanted]
        if (labels.get(key) in [value.strip() for value in values]) == has_not:
            return False
    return True


def _fits(needs: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(free.get(kind, 0.0) >= amount - 1e-6 for kind, amount in needs.items())


class _Plan(NamedTuple):
    """Where a waiting group gets its places."""

    leavers: list[Group]  # the first one leaves first
    places: list[tuple[Bundle, str]]  # each of its bundles and its node


class Places:
    """The places of the cluster at one moment, and who gets which of them.

    Of the waiting groups the one of the highest priority comes first, then those that are no extras. Each gets what is
    free, and what the workers free that may have to leave for it. Of these, one of the lowest priority leaves first,
    then one of the job that has the most of them, then of the job whose id is first. Of a job, the youngest leaves. If
    all together would not suffice, none leaves.

    Args:
        due: the ids of the groups that have waited for `PATIENCE_SECONDS`. The others get what is free.
    """

    def __init__(self, groups: Sequence[Group], nodes: Sequence[Node], due: Collection[str]) -> None:
        self._nodes = sorted(nodes, key=lambda node: node.id)
        self._free = {node.id: Counter[str](dict(node.free)) for node in nodes}
        self._extras: dict[str, list[Group]] = {node.id: [] for node in nodes}
        waiting = list[Group]()
        for group in groups:
            if not group.is_placed:
                waiting.append(group)
            elif group.kind == "extra":
                self._extras.setdefault(group.bundles[0].node, []).append(group)
        self._count = Counter(extra.job for extras in self._extras.values() for extra in extras)
        self.offer: Offer | None = None
        self.is_calm = True
        """Whether no waiting group gets a place: Ray takes a moment to place one, and a new group could be faster."""
        without = set[tuple[object, ...]]()  # equal groups have none either: there are ever fewer places
        for waits in sorted(waiting, key=lambda group: (-group.priority, group.kind == "extra", group.id)):
            is_due = waits.id in due
            same = waits.job, waits.kind, waits.priority, waits.strategy, str(waits.bundles), is_due
            plan = None if same in without else self._plan(waits, is_due=is_due)
            if plan is None:
                without.add(same)
                continue
            self.is_calm = False
            if plan.leavers and self.offer is None:
                first = min(plan.leavers, key=self._leaves_before)
                here = first.bundles[0]
                self.offer = Offer(first, waits, self._free[here.node] + Counter(here.needs))
            for leaver in plan.leavers:
                self._release(leaver)
            for bundle, node in plan.places:
                self._free[node].subtract(bundle.needs)

    def room(self, place: Bundle) -> int:
        """How many such places fit into what no waiting job gets."""
        number = 0
        for node in self._nodes:
            free = Counter(self._free[node.id])
            while matches(place.labels, node.labels) and _fits(place.needs, free) and number < ALL:
                free.subtract(place.needs)
                number += 1
        return number

    def _leaves_before(self, extra: Group) -> tuple[int, int, str, int]:
        return extra.priority, -self._count[extra.job], extra.job, -extra.number

    def _may_take(self, waits: Group, extra: Group) -> bool:
        if extra.job == waits.job:
            return False
        if extra.priority != waits.priority:
            return extra.priority < waits.priority
        # After the move the giver still has as many extras as the taker; with less, they would swap for ever.
        return waits.kind != "extra" or self._count[extra.job] - 1 >= self._count[waits.job] + 1

    def _plan(self, waits: Group, *, is_due: bool) -> _Plan | None:
        """Where a group gets its places; None: nowhere. Nothing has changed after this call."""
        before = ({node: Counter(free) for node, free in self._free.items()},
                  {node: list(extras) for node, extras in self._extras.items()}, Counter(self._count))
        plan = _Plan([], [])
        used = {bundle.node for bundle in waits.bundles}
        for bundle in waits.missing:
            found: list[tuple[tuple[int, int, list[tuple[int, int, str, int]], str], list[Group]]] = []
            for node in self._nodes:
                if not matches(bundle.labels, node.labels) or (waits.strategy == "STRICT_SPREAD" and node.id in used):
                    continue
                leavers = self._leavers(bundle, node.id, waits) if is_due else (
                    [] if _fits(bundle.needs, self._free[node.id]) else None)
                if leavers is None:
                    continue
                highest = max((extra.priority for extra in leavers), default=-ALL)
                order = highest, len(leavers), sorted(map(self._leaves_before, leavers)), node.id
                found.append((order, leavers))
            if not found:
                self._free, self._extras, self._count = before
                return None
            (_, _, _, node_id), leavers = min(found, key=lambda each: each[0])
            for leaver in leavers:
                self._release(leaver)
            self._free[node_id].subtract(bundle.needs)
            used.add(node_id)
            plan.leavers.extend(leavers)
            plan.places.append((bundle, node_id))
        self._free, self._extras, self._count = before
        return plan

    def _leavers(self, bundle: Bundle, node: str, waits: Group) -> list[Group] | None:
        """The fewest extras on a node that have to leave, until a bundle fits on it; None: all do not suffice."""
        free, count, chosen = Counter(self._free[node]), Counter(self._count), list[Group]()
        try:
            while not _fits(bundle.needs, free):
                lacking = {kind for kind, amount in bundle.needs.items() if free[kind] < amount - 1e-6}
                candidates = [extra for extra in self._extras[node]
                              if any(extra.bundles[0].needs.get(kind) for kind in lacking)
                              and extra not in chosen and self._may_take(waits, extra)]
                if not candidates:
                    return None
                leaver = min(candidates, key=self._leaves_before)
                chosen.append(leaver)
                free.update(leaver.bundles[0].needs)
                self._count[leaver.job] -= 1
            return chosen
        finally:
            self._count = count

    def _release(self, extra: Group) -> None:
        """An extra leaves."""
        self._extras[extra.bundles[0].node].remove(extra)
        self._count[extra.job] -= 1
        self._free[extra.bundles[0].node].update(extra.bundles[0].needs)


@dataclass(frozen=True)
class Decision:
    """What a driver has to do with its extra workers."""

    give: int | None = None  # this bundle's worker leaves
    to: str = ""  # the job that waits
    withdraws: bool = False  # extras of its own that wait would take what others give
    takes_back: int = 0  # request so many places again, if so many were given
    look_again: float = LATE_SECONDS  # the next look is this many seconds away


class Sharing:
    """The decisions of one driver over time.

    Args:
        job: Ray's id of this program.
        place: of each of its extra workers.
        clock: returns the time in seconds.
    """

    def __init__(self, job: str, place: Bundle, clock: Callable[[], float]) -> None:
        self._job, self._place, self._clock = job, place, clock
        self._seen: dict[str, float] = {}
        """The waiting groups, and when each was first seen."""
        self._calm_since = clock() - CALM_SECONDS
        """Since when no worker has to leave for another job."""
        self._room_since: float | None = None
        """Since when there is room for a place that no waiting job gets; None: there is none."""
        self._moved: dict[int, float] = {}
        """The bundles that were given or taken back, and when."""
        self._newest: tuple[tuple[tuple[Group, ...], list[Node], list[str]], Offer | None, bool, int] | None = None
        """What was seen at the last look, and what follows from it. In most looks nothing has changed."""
        self._held: dict[str, tuple[Bundle, ...]] = {}
        self._nodes: Sequence[Node] = ()
        """The bundles of each group, and the nodes, at the last look."""
        self._soon_free: dict[str, Counter[str]] = {}
        """What nodes have free once Ray has counted what removed groups have held; it holds until `_settled_at`."""
        self._settled_at = clock()

    def decide(self, groups: Sequence[Group], nodes: Sequence[Node], leaving: Collection[int] = ()) -> Decision:
        """The decision at this moment.

        Args:
            leaving: bundles whose workers are about to leave: the next one waits until they have.
        """
        now = self._clock()
        self._seen = {group.id: self._seen.get(group.id, now) for group in groups if not group.is_placed}
        due = [group for group, since in self._seen.items() if now - since >= PATIENCE_SECONDS]
        seen = tuple(groups), self._expect_free(groups, nodes, now), due
        if self._newest is None or self._newest[0] != seen:
            places = Places(*seen)
            self._newest = seen, places.offer, places.is_calm, places.room(self._place)
        _, offer, is_calm, room = self._newest
        has_new = any(now - since < CALM_SECONDS for since in self._seen.values())
        look_again = SOON_SECONDS if offer or has_new else LATE_SECONDS
        if not room:
            self._room_since = None
        elif self._room_since is None:
            self._room_since = now

        if offer and offer.waits.job != self._job:
            self._calm_since = now
        takes_back = ALL if is_calm and now - self._calm_since >= CALM_SECONDS else 0
        if self._room_since is not None and now - self._room_since >= PATIENCE_SECONDS:
            takes_back = max(takes_back, room)
        if offer is None:
            return Decision(takes_back=takes_back, look_again=look_again)
        is_for_own_extra = offer.waits.job == self._job and offer.waits.kind == "extra"
        withdraws = not is_for_own_extra and _fits(self._place.needs, offer.gains)
        takes_back = 0 if withdraws else takes_back
        if offer.leaves.job != self._job or leaving or not self._may_move(offer.leaves.number, now):
            return Decision(withdraws=withdraws, takes_back=takes_back, look_again=look_again)
        self._moved[offer.leaves.number] = now
        return Decision(give=offer.leaves.number, to=offer.waits.job, withdraws=withdraws, look_again=look_again)

    def took_back(self, number: int) -> None:
        """A bundle was requested again."""
        self._moved[number] = self._clock()

    def _expect_free(self, groups: Sequence[Group], nodes: Sequence[Node], now: float) -> list[Node]:
        """The nodes with what is free soon: Ray's report of free resources is later than its table.

        Without it one worker too many would leave: the group that it left for waits for a moment longer.
        """
        held, left, taken = {group.id: group.bundles for group in groups}, list[Bundle](), list[Bundle]()
        for identity in held.keys() | self._held.keys():
            before, after = self._held.get(identity, ()), held.get(identity, ())
            if before != after:
                left += [bundle for bundle in before if bundle.node]
                taken += [bundle for bundle in after if bundle.node]
        if now >= self._settled_at:
            self._soon_free = {}
        if left:
            self._soon_free = self._soon_free or {node.id: Counter(node.free) for node in self._nodes}
            self._settled_at = now + SETTLE_SECONDS
        for bundle in left:
            if bundle.node in self._soon_free:
                self._soon_free[bundle.node].update(bundle.needs)
        for bundle in taken:  # between two looks, others may have got what became free
            if bundle.node in self._soon_free:
                self._soon_free[bundle.node].subtract(bundle.needs)
        self._held, self._nodes = held, nodes
        if not self._soon_free:
            return list(nodes)
        return [node._replace(free=Counter(node.free) | self._soon_free.get(node.id, Counter())) for node in nodes]

    def _may_move(self, number: int, now: float) -> bool:
        return now - self._moved.get(number, now - CALM_SECONDS) >= CALM_SECONDS
