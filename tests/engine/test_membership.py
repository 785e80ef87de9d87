"""What a worker says of itself, and the group that never changes."""

from __future__ import annotations

import time

import pytest

from ray_yolo.core.structures import Progress
from ray_yolo.engine.collectives import Replicas
from ray_yolo.engine.membership import FixedMembers, Generation, Pulse


@pytest.mark.parametrize(("asked", "steps", "phase", "limit"), [
    (0.0, [0.1, 0.2, 9.0], "loading", 30.0),  # ten times the median, but at least 30
    (0.0, [4.0, 5.0, 6.0], "exchanging", 50.0),
    (0.0, [4.0, 5.0, 6.0], "validating", 500.0),
    (0.0, [], "loading", 300.0),  # the first step takes its time
    (7.0, [4.0], "computing", 7.0),
    (7.0, [4.0], "saving", 607.0),  # the saver gives a save up after 600
    (0.0, [0.1], "saving", 630.0),
])
def test_how_long_a_phase_may_last(asked: float, steps: list[float], phase: str, limit: float) -> None:
    pulse = Pulse(asked)
    for number, seconds in enumerate(steps):
        pulse.finished(number, seconds)
    pulse.enter(phase)
    assert pulse.limit == limit
    assert pulse.heartbeat_limit == (asked or max([30.0, *(50.0 for _ in steps if steps[0] > 1)]))
    assert time.monotonic() - pulse.since < 60


def test_a_fixed_group_is_what_it_was_given_and_has_no_next_one() -> None:
    replicas = Replicas(1, 2)
    members = FixedMembers(replicas)
    assert members.join(None) == members.join(Progress(1, 0, 5)) == Generation(replicas, None, False)
    assert members.lasting
    assert not members.regroups()
    assert not members.nobody_stays()
    assert not members.rescues()
