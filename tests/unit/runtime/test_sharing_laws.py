"""Laws of shared clusters that hold in any of them, on a simulated clock."""

from __future__ import annotations

import os
import random
from itertools import combinations

import pytest

from ray_yolo.runtime.sharing import CALM_SECONDS, Bundle
from tests.support.sharing_world import Job, Kind, World

KINDS = [Kind({"CPU": 8.0, "memory": 32.0}), Kind({"CPU": 4.0, "memory": 16.0}, {"market": "spot"}),
         Kind({"CPU": 16.0, "GPU": 4.0, "memory": 64.0, "accelerator_type:A100": 1.0}, {"type": "A100"}),
         Kind({"CPU": 8.0, "GPU": 4.0, "memory": 32.0, "accelerator_type:L4": 1.0}, {"type": "L4"})]
PLACES = [Bundle({"CPU": 1.0}), Bundle({"CPU": 2.0}), Bundle({"CPU": 1.0, "GPU": 1.0}),
          Bundle({"CPU": 1.0, "GPU": 1.0, "accelerator_type:A100": 0.001}),
          Bundle({"CPU": 1.0, "GPU": 2.0, "accelerator_type:L4": 0.001}),
          Bundle({"CPU": 1.0}, labels={"market": "spot"}),
          Bundle({"CPU": 1.0}, labels={"type": "!A100"})]
FOREIGN = [*PLACES, Bundle({"CPU": 1.0, "memory": 1e4}), Bundle({"GPU": 8.0}), Bundle({"CPU": 4.0, "memory": 8.0}),
           Bundle({"GPU": 4.0}), Bundle({"CPU": 1.0}, labels={"type": "in(A100, H100)"})]
HOURS, REST = 6.0, 2 * 3600.0


def draw_job(draws: random.Random, number: int) -> Job:
    kind = draws.choice(["fixed", "range", "range", "sweep", "comparison", "serve", "foreign"])
    name, priority = f"j{number}", draws.choice([0, 0, 0, 1, -1])
    if kind == "fixed":
        workers = draws.randint(1, 4)
        return Job(name, draws.choice(PLACES), workers, workers, strategy=draws.choice(["PACK", "SPREAD"]))
    least = draws.randint(1, 3)
    if kind == "range":
        return Job(name, draws.choice(PLACES), least, least + draws.choice([1, 4, 31]), priority,
                   draws.choice(["PACK", "SPREAD"]))
    if kind == "sweep":
        return Job(name, draws.choice(PLACES), least, least + draws.randint(0, 8), priority, grows=True)
    if kind == "comparison":
        return Job(name, draws.choice(PLACES), 1, draws.randint(2, 16), priority, grows=True)
    if kind == "serve":
        return Job(name, draws.choice(PLACES), least, least, apart=True)
    strategy = draws.choice(["PACK", "STRICT_PACK", "STRICT_SPREAD"])
    return Job(name, draws.choice(FOREIGN), least, least, strategy=strategy)


def play(seed: int, hours: float) -> World:
    """So many hours with ten jobs that start and end, nodes that come and go, and actors; then two hours of rest."""
    draws = random.Random(seed)
    world = World([draws.choice(KINDS) for _ in range(draws.randint(2, 5))], seed, lag=draws.choice([0.0, 1.0, 3.0]),
                  delay=draws.choice([0.0, 1.0, 3.0]))
    events = [(draws.uniform(0, 3600 * hours), "start") for _ in range(10)]
    events += [(draws.uniform(0, 3600 * hours), draws.choice(["end", "join", "leave", "actor", "actor ends"]))
               for _ in range(14)]
    jobs = 0
    for at, what in sorted(events):
        world.run(max(0.0, at - world.now))
        if what == "start":
            world.start(draw_job(draws, jobs))
            jobs += 1
        elif what == "end" and world.jobs:
            world.end(draws.choice(sorted(world.jobs)))
        elif what == "join":
            world.join(draws.choice(KINDS))
        elif what == "leave" and len(world.nodes) > 2:
            world.lose_node(draws.choice(sorted(world.nodes)))
        elif what == "actor":
            free = world.free()
            if fitting := [name for name in sorted(free) if free[name]["CPU"] >= 1]:
                world.take(draws.choice(fitting), {"CPU": 1.0})
        elif what == "actor ends" and world.taken:
            world.end_actor()
    world.run(REST / 2)
    return world


def check(world: World) -> None:
    assert world.faults == []
    moves, requests = len(world.moves), world.requested
    world.run(REST / 2)
    assert world.faults == []
    assert len(world.moves) == moves, "it oscillates"
    assert world.requested == requests, "places are requested again and again"
    last: dict[tuple[str, int], float] = {}
    for at, job, number in world.moves:
        assert at - last.get((job, number), -CALM_SECONDS) >= CALM_SECONDS
        last[job, number] = at
    extras = world.extras()
    for one, other in combinations([job for job in world.jobs.values() if job.driver], 2):
        if (one.priority, one.place) == (other.priority, other.place):
            fewer, more = sorted((one, other), key=lambda job: extras[job.name])
            wants = extras[fewer.name] < fewer.size - fewer.least
            assert not wants or extras[more.name] - extras[fewer.name] <= 1, (fewer, more, extras)
    for waits in world.waiting():
        room = world.free()
        for extra in (group for group in world.groups if group.kind == "extra" and group.is_placed):
            if waits.kind != "extra" and extra.priority <= waits.priority and extra.job != waits.job:
                room[extra.bundles[0].node].update(extra.bundles[0].needs)
        assert not world.could_hold(waits, room), f"{waits} could have places"


@pytest.mark.parametrize("seed", range(12))
def test_any_cluster_is_shared(seed: int) -> None:
    check(play(seed, hours=1.0))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_thousand_clusters_are_shared_for_six_hours() -> None:
    first = int(os.environ.get("FIRST_CLUSTER", "0"))
    for seed in range(first, 1000):
        check(play(seed, HOURS))
