"""The job queue alone, on the test's clock: assignments of workers to jobs."""

from __future__ import annotations

import subprocess

from ray_yolo.core.system import process_of
from ray_yolo.runtime.workers.job_queue import (
    REASON_SECONDS,
)
from tests.unit.runtime.workers.test_job_queue import DIED, Desk


def test_the_reason_of_an_ended_process_is_the_drivers_and_is_not_waited_for_long() -> None:
    desk = Desk()
    desk.submit("1", wanted=3)
    with subprocess.Popen(["sleep", "60"]) as process:
        for name in "ab":
            desk.queue.next_task(name, desk.place(name)._replace(process=process_of(process.pid)))
        process.kill()
    desk.queue.next_task("c", desk.place("c"))
    desk.now += 1.0
    assert desk.failures("1") == []  # both have ended
    assert desk.queue.present() == 1
    assert desk.queue.mark_departed({1: DIED}) == []
    assert desk.failures("1") == [(1, "out of memory")]
    desk.now += REASON_SECONDS + 0.5
    assert desk.failures("1") == [(0, "lost")]
