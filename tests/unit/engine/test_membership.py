"""A worker's activity, and the fixed group."""

from __future__ import annotations

import time

from ray_yolo.core.structures import Progress
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.membership import Activity, Generation, Rendezvous


def test_how_long_a_phase_may_last() -> None:
    for asked, steps, phase, limit in [
        (0.0, [0.1, 0.2, 9.0], "loading", 30.0),  # ten times the median, but at least 30
        (0.0, [4.0, 5.0, 6.0], "exchanging", 50.0),
        (0.0, [4.0, 5.0, 6.0], "validating", 500.0),
        (0.0, [], "loading", 300.0),  # the first step takes its time
        (7.0, [4.0], "computing", 7.0),
        (7.0, [4.0], "saving", 607.0),  # the saver abandons a save after 600
        (0.0, [0.1], "saving", 630.0),
    ]:
        activity = Activity(asked)
        for number, seconds in enumerate(steps):
            activity.finished(number, seconds)
        activity.enter(phase)
        heartbeat_limit = asked or max([30.0, *(50.0 for _ in steps if steps[0] > 1)])
        assert (activity.limit, activity.heartbeat_limit) == (limit, heartbeat_limit), (asked, steps, phase)
        assert time.monotonic() - activity.since < 60, (asked, steps, phase)


def test_a_fixed_group_never_changes() -> None:
    collectives = Collectives(1, 2)
    members = Rendezvous(collectives)
    assert members.join(None) == members.join(Progress(1, 0, 5)) == Generation(
        collectives, None, False, members=(0, 1))
    assert members.lasting
    assert not members.must_regroup()
    assert not members.all_draining()
    assert not members.elect_saver()
