"""A worker's activity, and the fixed group."""

from __future__ import annotations

import time

import pytest

from ray_yolo.core.structures import Orders, Progress
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.membership import Activity, Generation, Phase, Rendezvous, warns_without_progress


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


@pytest.mark.parametrize(("phase", "words"), [("loading", "storage of the images, or use --workers 0"),
                                              ("computing", "check the device"), ("starting", "")])
def test_a_stand_still_is_reported_once(phase: Phase, words: str) -> None:
    texts: list[str] = []
    activity = Activity(stall_seconds=0.05)
    with warns_without_progress(activity, texts.append, seconds=0.01):
        for _ in range(2):
            activity.finished(3, 0.01)
            activity.enter(phase)
            time.sleep(0.4)
    assert len(texts) == 2 * bool(words)
    assert all(f"while {phase}, after step 3" in text and words in text for text in texts)


def test_steady_progress_is_not_reported() -> None:
    texts: list[str] = []
    activity = Activity(stall_seconds=5.0)
    with warns_without_progress(activity, texts.append, seconds=0.01):
        for _ in range(20):
            activity.enter("loading")
            time.sleep(0.01)
    assert not texts


def test_a_fixed_group_never_changes() -> None:
    collectives = Collectives(1, 2)
    members = Rendezvous(collectives)
    assert members.join(None) == members.join(Progress(1, 0, 5)) == Generation(
        collectives, None, False, members=(0, 1))
    assert members.lasting
    assert members.orders == Orders()
    assert not members.may_regroup()
    assert not members.elect_saver()
    members.stop()
    assert members.orders == Orders(stop=True)
