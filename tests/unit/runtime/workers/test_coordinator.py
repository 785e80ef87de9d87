"""The coordinator alone, on the test's clock: generations, stalls and hung workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ray_yolo.core.events import Summary
from ray_yolo.core.structures import Progress
from ray_yolo.core.system import Process
from ray_yolo.runtime.workers.coordinator import Coordinator, Heartbeat, Quorum, Registration

ELSEWHERE = Process("node7", "pid:[1]", 42, 7)
ENDED = Summary(step=8, epoch=1, best_epoch=1, best_fitness=0.5, stopped_early=False, stopped=False, last_epoch=None)
JOINING = Heartbeat("joining", 0, 0.0, 30.0)
EXCHANGING = Heartbeat("exchanging", 3, 1.0, 30.0)


class Desk:
    """A coordinator, its clock, and workers named by one letter, each on a node of this name."""

    def __init__(self, wanted: int = 3) -> None:
        self.now = 0.0
        self.coordinator = Coordinator(wanted, lambda: self.now)

    def register(self, names: str, step: int | None = 0) -> None:
        for name in names:
            progress = None if step is None else Progress(0, 4 * step, step)
            number = "abcdef".index(name)
            self.coordinator.register(name, Registration(number, ELSEWHERE, (name, 1), progress, JOINING, node=name))

    def heartbeat(self, names: str, heartbeat: Heartbeat = EXCHANGING) -> list[bool]:
        return [self.coordinator.heartbeat(name, heartbeat).regroup for name in names]

    def pass_by(self, seconds: int, alive: str = "", heartbeat: Heartbeat = EXCHANGING) -> None:
        """Seconds pass, in each of which living workers send a heartbeat."""
        for _ in range(seconds):
            self.now += 1.0
            self.heartbeat(alive, heartbeat)

    def quorum(self, name: str) -> Any:
        """The reply without nodes: each worker is on a node of its own."""
        reply = self.coordinator.quorum(name)
        return reply._replace(nodes=()) if isinstance(reply, Quorum) else reply

    def members(self, names: str) -> list[int | None]:
        """The number that each has in its generation."""
        found = [self.coordinator.quorum(name) for name in names]
        return [each.rank if isinstance(each, Quorum) else None for each in found]


def started(names: str = "abc") -> Desk:
    desk = Desk(len(names))
    desk.register(names, None)
    assert desk.members(names) == list(range(len(names)))
    return desk


def test_the_first_generation_waits_for_all_and_knows_nobodys_state() -> None:
    desk = Desk()
    desk.register("cb", None)
    assert desk.members("bc") == [None, None]
    desk.register("a", None)
    assert [desk.quorum(name) for name in "abc"] == [
        Quorum(1, number, 3, ("a", 1), None, False, (0, 1, 2) if number == 0 else ())
        for number in range(3)]  # in the order of Ray's numbers; the first, which records, knows them all


def test_that_all_workers_are_lost_is_reported_once_if_no_other_starts() -> None:
    desk = started("ab")
    desk.pass_by(1, "ab")
    assert desk.coordinator.mark_departed([0, 1]) == [0, 1]
    desk.now += 59.0
    assert desk.coordinator.describe_stall() is None
    desk.now += 2.0
    found = desk.coordinator.describe_stall()
    assert found is not None
    assert found.startswith("all workers are lost, and none has started for 60 s")
    assert desk.coordinator.describe_stall() is None
    desk.register("c")
    desk.now += 1.0
    assert desk.members("c") == [0]
    assert desk.coordinator.describe_stall() is None
    desk.coordinator.mark_departed([2])
    desk.now += 61.0
    assert desk.coordinator.describe_stall() == found  # those of the next generation, too


def test_workers_that_leave_in_order_are_not_lost() -> None:
    desk = started("ab")
    for name in "ab":
        desk.coordinator.leave(name)
    desk.now += 100.0
    assert desk.coordinator.describe_stall() is None


def test_workers_of_a_node_have_ranks_one_after_the_other() -> None:
    desk = Desk(5)
    for number, (name, node) in enumerate({"a": "n2", "b": "n1", "c": "n2", "d": "n1", "e": "n0"}.items()):
        desk.coordinator.register(name, Registration(number, ELSEWHERE, (name, 1), None, JOINING, node=node))
    assert desk.members("acbde") == [0, 1, 2, 3, 4]  # the first worker stays the first
    quorum = desk.coordinator.quorum("d")
    assert isinstance(quorum, Quorum)
    assert quorum.nodes == ("n2", "n2", "n1", "n1", "n0")


def test_workers_of_one_node_need_no_nodes() -> None:
    desk = Desk(2)
    for number, name in enumerate("ab"):
        desk.coordinator.register(name, Registration(number, ELSEWHERE, (name, 1), None, JOINING, node="n0"))
    quorum = desk.coordinator.quorum("a")
    assert isinstance(quorum, Quorum)
    assert quorum.nodes == ()


def test_the_first_generation_does_not_wait_for_ever() -> None:
    desk = Desk()
    desk.register("ab", None)
    desk.pass_by(60, "ab")
    assert desk.members("ab") == [None, None]
    desk.pass_by(1, "ab")
    assert desk.members("ab") == [0, 1]


def test_the_first_generation_is_not_made_of_workers_that_leave() -> None:
    """A pool recalls helpers that have not begun: counted among those wanted, they left one worker to start alone."""
    desk = Desk(2)
    desk.register("ab", None)
    desk.coordinator.drain_nodes({"a"})
    assert desk.members("b") == [None]
    assert desk.coordinator.quorum("a") == "left"
    desk.register("c", None)
    assert desk.members("bc") == [0, 1]


def test_workers_that_leave_start_where_no_other_comes() -> None:
    desk = Desk(2)
    desk.register("a", None)
    desk.coordinator.drain_nodes({"a"})
    assert desk.members("a") == [None]
    desk.register("b", None)
    desk.coordinator.drain_nodes({"b"})
    assert desk.members("ab") == [0, 1]


def test_the_only_one_with_a_state_does_not_leave_before_it_is_taken_over() -> None:
    desk = started("ab")
    desk.coordinator.leave("b")
    desk.register("c", None)
    desk.coordinator.drain_nodes({"a"})
    desk.register("a", 3)
    assert desk.members("ac") == [0, 1]
    assert desk.quorum("c") == Quorum(2, 1, 2, ("a", 1), 0, True)


def test_the_death_of_a_leaving_worker_is_no_failure() -> None:
    desk = started()
    desk.coordinator.drain_nodes({"b"})
    desk.coordinator.drain_nodes({"nowhere"})
    assert desk.coordinator.mark_departed([0, 1, 5]) == [0, 5]  # the last has not come at all
    desk.coordinator.register("d", Registration(1, ELSEWHERE, ("d", 1), None, JOINING))
    assert desk.coordinator.mark_departed([1]) == [1]


def test_after_all_were_lost_the_first_new_worker_starts_and_the_others_join() -> None:
    desk = started()
    desk.coordinator.mark_departed([0, 1, 2])
    desk.register("d", 4)
    assert desk.quorum("d") == Quorum(2, 0, 1, ("d", 1), 0, False, (3,))
    desk.register("e", None)
    assert desk.heartbeat("d") == [True]


def test_survivors_continue_without_a_silent_worker_from_the_furthest_state() -> None:
    desk = started()
    desk.register("a", 5)
    desk.register("c", 6)
    desk.pass_by(3, "ac")
    assert desk.members("ac") == [None, None]  # b may still come
    desk.pass_by(1, "ac")
    assert desk.quorum("a") == Quorum(2, 0, 2, ("a", 1), 1, True, (0, 2))
    assert desk.quorum("c") == Quorum(2, 1, 2, ("a", 1), 1, True)
    assert desk.members("b") == [None]


def test_survivors_continue_at_once_without_a_worker_that_has_left() -> None:
    desk = started()
    desk.coordinator.leave("b")
    desk.register("ac", 5)
    assert desk.members("ac") == [0, 1]
    assert not desk.coordinator.quorum("a").behind


def test_members_hear_of_a_newcomer_and_take_it_in_with_its_old_number() -> None:
    desk = started()
    desk.coordinator.leave("b")
    desk.register("ac", 5)
    desk.members("ac")
    assert desk.heartbeat("ac") == [False, False]
    desk.register("e", None)
    assert desk.members("e") == [None]  # the others train
    assert desk.heartbeat("ac") == [True, True]
    desk.register("ac", 9)
    assert desk.quorum("e") == Quorum(3, 2, 3, ("a", 1), 0, True)
    assert desk.heartbeat("ac") == [False, False]


def test_a_newcomer_that_dies_while_it_waits_disturbs_no_member() -> None:
    desk = started()
    desk.register("d", None)
    desk.pass_by(4, "abc")
    assert desk.heartbeat("abc") == [False] * 3
    desk.register("abc", 5)
    assert desk.members("abc") == [0, 1, 2]
    assert desk.coordinator.quorum("a").size == 3


def test_a_silent_worker_that_returns_is_a_newcomer() -> None:
    desk = started()
    desk.register("ac", 5)
    desk.pass_by(4, "ac")
    assert desk.members("ac") == [0, 1]
    desk.register("b", 5)
    assert desk.members("b") == [None]
    assert desk.heartbeat("ac") == [True, True]


def test_a_draining_worker_leaves_after_the_current_step() -> None:
    desk = started()
    desk.coordinator.drain_nodes({"b"})
    assert desk.heartbeat("abc") == [True] * 3
    desk.register("abc", 5)
    assert [desk.quorum(name) for name in "abc"] == [
        Quorum(2, 0, 2, ("a", 1), 0, False, (0, 2)), "left", Quorum(2, 1, 2, ("a", 1), 0, False)]
    assert desk.heartbeat("ac") == [False, False]


def test_the_last_draining_worker_leaves_once_another_has_joined() -> None:
    desk = started("ab")
    for name in "ab":
        desk.coordinator.drain_nodes({name})
    assert desk.heartbeat("ab") == [False, False]
    assert [desk.coordinator.heartbeat(name, EXCHANGING).save for name in "abc"] == [True, True, False]
    desk.register("c", None)
    assert desk.heartbeat("ab") == [True, True]
    desk.register("ab", 5)
    assert desk.members("c") == [2]  # takes over the state
    assert not desk.coordinator.heartbeat("a", EXCHANGING).save
    assert desk.heartbeat("abc") == [True] * 3
    desk.register("abc", 6)
    assert [desk.coordinator.quorum(name) for name in "ab"] == ["left", "left"]
    assert desk.quorum("c") == Quorum(3, 0, 1, ("c", 1), 0, False, (2,))


def test_a_draining_newcomer_does_not_wait() -> None:
    desk = started()
    desk.register("d", None)
    desk.coordinator.drain_nodes({"d"})
    assert desk.coordinator.quorum("d") == "left"
    assert desk.heartbeat("abc") == [False] * 3


def test_a_worker_that_reports_that_it_leaves_is_leaving() -> None:
    """By a heartbeat; or by its registration, also at a restarted coordinator."""
    desk, joining = started(), Registration(3, ELSEWHERE, ("d", 1), None, JOINING._replace(leaves=True))
    desk.coordinator.register("d", joining)
    assert desk.coordinator.quorum("d") == "left"
    desk.heartbeat("b", EXCHANGING._replace(leaves=True))
    assert desk.heartbeat("abc") == [True] * 3
    quorum = restarted(desk)
    for number, name in enumerate("abc"):
        heartbeat = EXCHANGING._replace(leaves=name == "b")
        registration = Registration(number, ELSEWHERE, (name, 1), None, heartbeat)
        assert not desk.coordinator.heartbeat(name, heartbeat, (registration, quorum[name])).abort
    desk.register("abc", 5)
    desk.pass_by(4, "abc")
    assert [desk.coordinator.quorum(name) == "left" for name in "abc"] == [False, True, False]


def test_all_workers_of_a_draining_node_leave() -> None:
    desk = started()
    for name, node in zip("ab", ("left", "right"), strict=True):
        desk.coordinator.register(
            name, Registration("ab".index(name), ELSEWHERE, (name, 1), Progress(0, 20, 5), JOINING, node)
        )
    assert desk.coordinator.drain_nodes({"right", "up"}) == {1: "right"}
    desk.register("c", 5)
    assert [desk.quorum(name) for name in "abc"] == [
        Quorum(2, 0, 2, ("a", 1), 0, False, (0, 2)), "left", Quorum(2, 1, 2, ("a", 1), 0, False)]
    assert desk.coordinator.drain_nodes({"right"}) == {}


def test_a_lost_worker_is_neither_waited_for_nor_hung() -> None:
    desk = started()
    desk.heartbeat("b", Heartbeat("loading", 3, 40.0, 30.0))
    desk.coordinator.mark_departed([1])
    desk.register("ac", 5)
    assert accused(desk) is None
    assert desk.members("ac") == [0, 1]


def test_a_lost_worker_that_returns_is_refused() -> None:
    """Another one has replaced it: after a network partition, or of a frozen process."""
    desk = started()
    desk.coordinator.mark_departed([1])
    desk.register("ac", 5)
    assert desk.members("ac") == [0, 1]
    desk.register("b", 4)
    assert desk.heartbeat("abc") == [False, True, False]
    assert desk.coordinator.quorum("b") == "left"
    desk.pass_by(60, "ac")
    assert desk.coordinator.find_hung_worker() is None
    assert [each.worker for each in desk.coordinator.worker_statuses()] == [0, 2]


def test_present_workers_have_registered_and_not_left() -> None:
    desk = started()
    assert desk.coordinator.present() == 3
    desk.register("d", None)
    desk.coordinator.leave("a")
    desk.pass_by(4, "bd")
    assert desk.coordinator.present() == 2
    desk.coordinator.end(ENDED)
    assert desk.coordinator.present() == 2
    assert desk.coordinator.quorum("d") == ENDED


def test_one_of_a_generation_rescues_its_last_step() -> None:
    desk = started()
    assert [desk.coordinator.elect_saver(1) for _ in range(3)] == [True, False, False]
    desk.register("abc", 5)
    desk.members("abc")
    assert desk.coordinator.elect_saver(2)
    assert not desk.coordinator.elect_saver(1)


@pytest.mark.parametrize(("happens", "allowed"), [
    ("nothing", [True, False, False]), ("a step", [True, True, True]), ("a departure", [True, True, True])])
def test_groups_that_fail_by_themselves_are_counted(happens: str, allowed: list[bool]) -> None:
    """Workers that cannot reach each other fail without a departure, and would form groups for ever."""
    desk = started("abcdef")
    answers = []
    for number in range(3):
        names = "abcdef"
        if happens == "a departure":
            names = "abcdef"[number + 1:]
            desk.coordinator.mark_departed([number])
        desk.register(names, number if happens == "a step" else None)
        assert desk.members(names)[-1] == len(names) - 1
        answers.append(desk.coordinator.may_regroup(1))
        assert desk.coordinator.may_regroup(-1)
    assert answers == allowed


def test_a_restarted_coordinator_elects_one_of_a_generation_that_it_does_not_know_yet() -> None:
    coordinator = Coordinator(2, restarted=True)
    assert [coordinator.elect_saver(7) for _ in range(2)] == [True, False]


def test_a_worker_that_registers_after_the_end_gets_the_summary() -> None:
    desk = started()
    desk.coordinator.end(ENDED)
    desk.register("d", None)
    assert desk.coordinator.quorum("d") == ENDED


def accused(desk: Desk, waiting: str = "ac") -> str | None:
    """The worker that is killed, once all have dumped their stacks."""
    first = desk.coordinator.find_hung_worker()
    assert first is None
    desk.pass_by(3, waiting)
    found = desk.coordinator.find_hung_worker()
    return found and found.text


@pytest.mark.parametrize(("phase", "alive"), [("loading", "b"), ("saving", "b"), ("exchanging", "")])
def test_a_member_that_holds_up_the_others_beyond_its_limit_is_named(phase: str, alive: str) -> None:
    """One that is stuck and says so; and one that is frozen and says nothing, wherever that has caught it."""
    desk = started()
    desk.heartbeat("b", Heartbeat(phase, 3, 20.0, 30.0))
    desk.pass_by(9, "ac")
    assert accused(desk) is None
    desk.pass_by(1, "ac")
    if alive:
        desk.heartbeat("b", Heartbeat(phase, 3, 31.0, 30.0))
    assert accused(desk) == (f"worker 1 on node7 (process 42) has not moved for {34 if alive else 36} s "
                             f"({phase}, after step 3)")
    desk.register("ac", 3)
    assert desk.members("ac") == [0, 1]  # without it, though its process may take a while to end


def test_a_worker_in_an_exchange_that_the_others_have_left_is_hung() -> None:
    desk = started()
    for seconds in range(20, 31):
        desk.now += 1.0
        desk.heartbeat("ac")
        desk.heartbeat("b", Heartbeat("exchanging", 2, float(seconds), 30.0))
        assert accused(desk) is None
    desk.heartbeat("b", Heartbeat("exchanging", 2, 31.0, 30.0))
    assert accused(desk) == "worker 1 on node7 (process 42) has not moved for 34 s (exchanging, after step 2)"


def test_no_worker_is_hung_while_no_worker_waits() -> None:
    desk = started()
    busy = Heartbeat("computing", 3, 0.5, 30.0)
    desk.heartbeat("b", Heartbeat("loading", 3, 100.0, 30.0))
    desk.pass_by(4, "ac", busy)
    assert desk.coordinator.find_hung_worker() is None
    desk.pass_by(4, "ac", busy)
    assert desk.coordinator.find_hung_worker() is None


def test_a_worker_without_heartbeats_after_it_has_joined_is_hung() -> None:
    desk = started()
    desk.pass_by(30, "ac")
    assert desk.coordinator.find_hung_worker() is None
    desk.pass_by(1, "ac")
    text = accused(desk)
    assert text
    assert "(process 42) has not moved for 34 s (joining, after step 0)" in text


def test_workers_that_wait_for_one_another_are_not_hung() -> None:
    desk = started()
    desk.pass_by(200, "abc")
    assert desk.coordinator.find_hung_worker() is None


@pytest.mark.parametrize("phase", ["loading", "exchanging"])
def test_a_worker_that_trains_alone_can_be_hung(phase: str) -> None:
    """In any phase: it has no peer to exchange with."""
    desk = started("a")
    desk.heartbeat("a", Heartbeat(phase, 3, 31.0, 30.0))
    assert accused(desk, "") is not None


def test_a_worker_that_stays_in_an_aborted_exchange_is_hung_a_limit_later() -> None:
    """Its own end of the exchange may take a while."""
    desk = started()
    stuck = EXCHANGING._replace(seconds=600.0)
    desk.pass_by(600, "abc", stuck)
    desk.register("a", 3)
    assert accused(desk, "ac") is None
    desk.register("c", 3)
    desk.pass_by(30, "abc", stuck)
    assert desk.coordinator.find_hung_worker() is None
    desk.pass_by(1, "abc", stuck)
    assert accused(desk, "ac") == "worker 1 on node7 (process 42) has not moved for 603 s (exchanging, after step 3)"
    assert desk.members("ac") == [0, 1]


def test_a_newcomer_that_is_silent_for_a_moment_joins_after_its_next_heartbeat() -> None:
    desk = started()
    desk.register("d", None)
    desk.pass_by(4, "abc")
    assert desk.heartbeat("abc") == [False] * 3
    desk.register("abc", 5)
    assert desk.members("abcd") == [0, 1, 2, None]
    desk.heartbeat("d", JOINING)
    assert desk.heartbeat("abc") == [True] * 3
    desk.register("abc", 6)
    assert desk.members("abcd") == [0, 1, 2, 3]


def test_a_newcomer_that_is_silent_beyond_its_limit_is_ended_to_make_room_for_another() -> None:
    desk = started()
    desk.register("d", None)
    busy = Heartbeat("computing", 3, 0.5, 30.0)
    desk.pass_by(int(JOINING.limit), "abc", busy)
    assert accused(desk, "abc") is None
    text = accused(desk, "abc")
    assert text
    assert text.startswith("worker 3 on node7 (process 42) has not moved for ")
    assert [each.worker for each in desk.coordinator.worker_statuses()] == [0, 1, 2]
    assert desk.heartbeat("abc", busy) == [False] * 3


def test_a_stall_is_reported_once_for_each_step() -> None:
    desk = started()
    desk.heartbeat("b", Heartbeat("loading", 3, 0.0, 30.0))
    desk.pass_by(7, "ac")
    assert desk.coordinator.describe_stall() is None
    desk.pass_by(1, "ac")
    assert desk.coordinator.describe_stall() == (
        "training stalls: 2 of 3 workers wait for worker 1 on node7 (process 42), loading for 8 s after step 3")
    desk.pass_by(5, "ac")
    assert desk.coordinator.describe_stall() is None
    desk.heartbeat("b", Heartbeat("loading", 4, 9.0, 30.0))
    desk.heartbeat("ac", Heartbeat("exchanging", 4, 9.0, 30.0))
    assert desk.coordinator.describe_stall() is not None
    desk.heartbeat("ac", Heartbeat("computing", 4, 0.0, 30.0))
    assert [(each.worker, each.phase, each.waits) for each in desk.coordinator.worker_statuses()] == [
        (0, "computing", False), (1, "loading", False), (2, "computing", False)]
    desk.register("d", None)
    assert [(each.worker, each.phase, each.waits) for each in desk.coordinator.worker_statuses()][-1] == (
        3,
        "joining",
        True,
    )


def test_all_workers_dump_their_stacks_once_for_each_hung_worker() -> None:
    desk = started()
    before = desk.coordinator.heartbeat("a", EXCHANGING).dumps
    desk.heartbeat("b", Heartbeat("loading", 3, 31.0, 30.0))
    desk.coordinator.find_hung_worker()
    desk.coordinator.find_hung_worker()
    assert desk.coordinator.heartbeat("a", EXCHANGING).dumps == before + 1


@pytest.mark.parametrize("lose", [
    lambda desk: desk.coordinator.mark_departed([2]), lambda desk: (desk.pass_by(31, "ab"), accused(desk, "ab"))])
def test_members_that_wait_for_an_ended_worker_are_informed(lose: Callable[[Desk], object]) -> None:
    """By the driver, or by the limit; a silent worker may come back. A worker that leaves closes its connections."""
    desk = started()
    desk.heartbeat("c", EXCHANGING)
    desk.pass_by(20, "ab")
    assert [desk.coordinator.heartbeat(name, EXCHANGING).abort for name in "ab"] == [False, False]
    lose(desk)
    assert [desk.coordinator.heartbeat(name, EXCHANGING).abort for name in "ab"] == [True, True]
    desk.register("ab", 3)
    assert desk.members("ab") == [0, 1]
    assert [desk.coordinator.heartbeat(name, EXCHANGING).abort for name in "ab"] == [False, False]


def drive(desk: Desk, inside: str, *, aborts: bool = True, phase: str = "exchanging") -> tuple[float, list[str]]:
    """Up to an hour passes, in which workers wait in a collective until they have to abort it.

    Returns:
        When none of them was in it any more; and what the driver said.
    """
    began, stuck, said = desk.now, set(inside), list[str]()
    outside = [name for name in "abc" if desk.coordinator.quorum(name) is None]
    while stuck and desk.now - began < 3600:
        desk.now += 1.0
        said += filter(None, [desk.coordinator.describe_stall()])
        if found := desk.coordinator.find_hung_worker():
            said.append(found.text)
            stuck -= {"abc"[int(found.text.split()[1])]}
        desk.heartbeat("".join(outside), JOINING)
        for name in sorted(stuck):
            if desk.coordinator.heartbeat(name, Heartbeat(phase, 3, desk.now - began, 30.0)).abort and aborts:
                desk.register(name, 3)
                stuck.remove(name)
                outside.append(name)
    return desk.now - began, said


def test_workers_that_wait_for_one_another_beyond_the_timeout_abort_and_regroup() -> None:
    """A fabric that fails while all hosts live."""
    desk = started()
    seconds, said = drive(desk, "abc")
    assert 600 < seconds <= 602
    assert said == ["3 of 3 workers have waited for one another for 601 s (exchanging, after step 3): they "
                    "abort the exchange and form a new group"]
    assert desk.quorum("a") == Quorum(2, 0, 3, ("a", 1), 0, False, (0, 1, 2))


def test_a_validation_that_takes_long_is_not_aborted() -> None:
    desk = started()
    assert drive(desk, "abc", phase="validating") == (3600.0, [])


def test_two_that_wait_for_one_that_has_left_the_exchange_abort_and_regroup() -> None:
    """Its own collective failed; theirs, a kernel, does not notice."""
    desk = started()
    desk.pass_by(3, "abc")
    desk.register("a", 3)
    seconds, said = drive(desk, "bc")
    assert 30 < seconds <= 32
    assert said == ["2 of 3 workers have waited for worker 0 on node7 (process 42), which left, for 31 s (exchanging, "
                    "after step 3): they abort the exchange and form a new group"]
    assert desk.quorum("c") == Quorum(2, 2, 3, ("a", 1), 0, False)


def test_workers_that_cannot_abort_after_a_peers_death_are_killed() -> None:
    """While the communicator is made there is nothing yet to abort."""
    desk = started()
    desk.pass_by(1, "abc")
    desk.coordinator.mark_departed([2])
    seconds, said = drive(desk, "ab", aborts=False)
    assert seconds < 70
    assert [text.partition(" on ")[0] for text in said[-2:]] == ["worker 0", "worker 1"]
    desk.register("d", None)
    assert desk.members("d") == [0]


def test_a_peer_that_freezes_while_the_communicator_is_made_is_lost() -> None:
    desk = started()
    seconds, said = drive(desk, "ab", phase="joining")
    assert seconds < 36
    assert said[-1] == "worker 2 on node7 (process 42) has not moved for 34 s (joining, after step 0)"
    assert desk.members("ab") == [0, 1]


def test_a_worker_without_heartbeats_is_lost_in_any_phase() -> None:
    """As with `--stall-seconds 8`; the others, who are in the same phase, may wait for it."""
    for phase in ("starting", "joining", "validating", "saving", "exchanging", "loading"):
        desk = started()
        heartbeat = Heartbeat(phase, 0, 0.0, 80.0, heartbeat_limit=8.0)
        desk.heartbeat("abc", heartbeat)
        messages: list[str | None] = []
        for _ in range(12):
            desk.pass_by(1, "ac", Heartbeat("joining", 0, 1.0, 80.0, heartbeat_limit=8.0))
            messages += [
                desk.coordinator.describe_stall(),
                *(found.text for found in [desk.coordinator.find_hung_worker()] if found),
            ]
        waited, ended = filter(None, messages)
        assert waited == ("training stalls: 2 of 3 workers wait for worker 1 on node7 (process 42), "
                          "without a heartbeat for 8 s after step 0"), phase
        assert ended == f"worker 1 on node7 (process 42) has not moved for 12 s ({phase}, after step 0)", phase
        assert desk.coordinator.heartbeat("a", heartbeat).abort, phase


def test_a_silent_worker_for_which_no_other_waits_is_no_stall() -> None:
    """Its last heartbeat, from an exchange, does not make it a worker that waits for itself."""
    desk = started()
    desk.heartbeat("b")
    for _ in range(29):
        desk.pass_by(1, "ac", Heartbeat("loading", 3, 1.0, 30.0))
        assert desk.coordinator.describe_stall() is None


def test_a_silent_worker_is_shown_as_silent() -> None:
    desk = started()
    desk.heartbeat("b", Heartbeat("loading", 3, 9.0, 30.0))
    desk.pass_by(5, "ac")
    assert [(each.phase, each.seconds, each.waits) for each in desk.coordinator.worker_statuses()] == [
        ("exchanging", 1.0, True), ("silent", 5.0, False), ("exchanging", 1.0, True)]


def restarted(desk: Desk) -> dict[str, Quorum]:
    """Restart the coordinator. Returns the quorum of each member."""
    quorum = {name: found for name in "abc" if isinstance(found := desk.coordinator.quorum(name), Quorum)}
    desk.coordinator = Coordinator(3, lambda: desk.now, restarted=True)
    return quorum


def introduce(desk: Desk, name: str, quorum: Quorum) -> bool:
    """A heartbeat of a member that the coordinator may have no record of. Returns whether its generation goes on."""
    registration = Registration("abcdef".index(name), ELSEWHERE, (name, 1), None, EXCHANGING)
    return not desk.coordinator.heartbeat(name, EXCHANGING, (registration, quorum)).abort


def test_members_rejoin_a_restarted_coordinator_before_newcomers_form_a_group() -> None:
    desk = started()
    desk.register("abc", 4)
    quorum = {**dict.fromkeys("abc"), **restarted(desk)} if desk.members("abc") else {}
    desk.register("def", None)
    assert desk.members("def") == [None] * 3
    desk.pass_by(1, "def", JOINING)
    assert [introduce(desk, name, quorum[name]) for name in "abc"] == [True] * 3
    desk.pass_by(5, "abcdef")
    assert desk.members("def") == [None] * 3  # as ever: between two steps
    assert desk.heartbeat("abc") == [True] * 3
    desk.register("abc", 6)
    assert desk.quorum("d") == Quorum(3, 3, 6, ("a", 1), 0, True)


def test_workers_that_waited_at_a_restarted_coordinator_register_again() -> None:
    desk = started()
    desk.register("ab", 4)
    restarted(desk)
    assert [desk.coordinator.quorum(name) for name in "ab"] == ["unknown", "unknown"]
    desk.register("ab", 4)
    desk.pass_by(2, "ab")
    assert introduce(desk, "c", Quorum(1, 2, 3, ("a", 1), None, False))
    desk.pass_by(2, "abc")
    assert desk.members("abc") == [None, None, 2]
    desk.register("c", 4)
    assert desk.members("abc") == [0, 1, 2]


def test_a_generation_that_formed_beside_an_older_one_gives_way() -> None:
    """The older one's members were late: the newcomers' steps are dropped, and all continue together."""
    desk = started()
    desk.register("abc", 8)
    desk.members("abc")
    quorum = restarted(desk)
    desk.pass_by(4)
    desk.register("def", None)
    assert desk.members("def") == [0, 1, 2]
    beside = desk.coordinator.quorum("d")
    assert isinstance(beside, Quorum)
    assert [introduce(desk, name, quorum[name]) for name in "abc"] == [True] * 3
    assert not introduce(desk, "d", beside)
    desk.register("def", 2)
    assert desk.heartbeat("abc") == [True] * 3
    desk.register("abc", 9)
    assert desk.quorum("d") == Quorum(3, 3, 6, ("a", 1), 0, True)


def test_a_member_of_an_ended_generation_is_informed() -> None:
    desk = started()
    quorum = desk.coordinator.quorum("b")
    assert isinstance(quorum, Quorum)
    desk.register("ac", 5)
    desk.pass_by(4, "ac")
    assert desk.members("ac") == [0, 1]
    assert not introduce(desk, "b", quorum)
    assert desk.coordinator.worker_statuses()[-1].worker == 2
    desk.coordinator.mark_departed([0])
    assert desk.coordinator.heartbeat("a", EXCHANGING).abort  # it counts as departed


def test_a_stop_is_ordered_of_all_workers_until_they_have_left() -> None:
    desk = started()
    assert not desk.coordinator.stop()  # they have not trained yet: there is nothing to save
    assert [desk.coordinator.orders(name).stop for name in "abc"] == [True] * 3
    desk.pass_by(1, "abc")
    assert desk.coordinator.stop()
    desk.register("abc", 4)  # to regroup: their steps are still unsaved
    assert desk.coordinator.stop()
    desk.register("d", None)
    assert desk.coordinator.orders("d").stop
    for name in "abc":
        desk.coordinator.leave(name)
    assert not desk.coordinator.stop()


def test_a_restarted_coordinator_has_steps_to_save_until_it_knows_its_workers() -> None:
    desk = Desk()
    desk.coordinator = Coordinator(3, lambda: desk.now, restarted=True)
    assert desk.coordinator.stop()
    desk.now += 4.0
    assert not desk.coordinator.stop()


def test_a_stop_after_the_end_waits_for_no_worker() -> None:
    desk = started()
    desk.pass_by(1, "abc")
    desk.coordinator.end(ENDED)
    assert not desk.coordinator.stop()


def test_the_last_leaving_worker_has_to_save() -> None:
    desk = started("ab")
    desk.coordinator.let_leave("a")
    assert [desk.coordinator.orders(name)[:4] for name in "ab"] == [
        (False, False, True, True), (False, False, True, False)]  # stop, save, regroup, leave
    desk.coordinator.let_leave("b")
    assert [desk.coordinator.orders(name)[:4] for name in "ab"] == [(False, True, False, True)] * 2
