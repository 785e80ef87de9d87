"""Work for a standing crew: the driver keeps it, a sweep's trial offers its training, workers train what they get."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ray
import ray.exceptions
import ray.train
from ray.actor import ActorHandle

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import most_workers
from ray_yolo.engine.build import Job
from ray_yolo.engine.membership import Pulse
from ray_yolo.errors import LostWorkersError, RayYoloError
from ray_yolo.events import Summary
from ray_yolo.runtime.crew import Crew, Lease, News
from ray_yolo.runtime.members import answer, start_here
from ray_yolo.runtime.ray_train import build_trainer
from ray_yolo.runtime.restarts import Judge, Restarts
from ray_yolo.runtime.roster import own_process
from ray_yolo.runtime.worker import train_job

_ASK_SECONDS = 0.1
_BEAT_SECONDS = 1.0
_END_SECONDS = 10.0  # in which a crew that has no more work ends by itself

CrewHandle: TypeAlias = "ActorHandle[Crew]"


# The driver's side


@contextlib.contextmanager
def standing_crew(placement: Placement, folder: Path) -> Iterator[CrewHandle]:
    """Context in which the workers of a placement are there, on CPUs, and train what is offered to them."""
    crew = start_here(Crew)
    keeper = threading.Thread(target=_keep, args=(crew, placement, folder), name="ray_yolo crew", daemon=True)
    keeper.start()
    try:
        yield crew
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            answer(crew.close.remote("the sweep has ended"))
        keeper.join(_END_SECONDS)


def _keep(crew: CrewHandle, placement: Placement, folder: Path) -> None:
    """Have Ray start the workers, and again when all are lost, as long as anybody gets on in between."""
    restarts = Restarts(placement.max_failures)
    config = {"crew": crew, "roster": None}
    while True:
        try:
            trainer = build_trainer(crew_worker, config, placement, 0.0, folder,
                                    _CrewJudge(crew, placement.max_failures), in_place=True)
            trainer.fit()
            return
        except Exception as error:  # Ray's own kinds: its controller gives up when two workers are lost at once
            with contextlib.suppress(ray.exceptions.RayError):
                if not restarts.allow(answer(crew.steps.remote())):
                    answer(crew.close.remote(f"the sweep's workers could not be kept: {error}"))
                    return


class _CrewJudge(ray.train.UserCallback):
    """Lets Ray replace workers as long as any of the crew gets on: who has offered a job judges what became of it."""

    def __init__(self, crew: CrewHandle, max_failures: int) -> None:
        self._crew, self._restarts = crew, Restarts(max_failures)

    def after_exception(self, run_context: object, worker_exceptions: object) -> None:
        """Called by Ray, which knows it by these names."""
        if not self._restarts.allow(answer(self._crew.steps.remote())):
            raise LostWorkersError(f"given up after {self._restarts.limit} restarts in which nothing was trained")


# A trial's side


def train(crew: CrewHandle, config: dict[str, Any], placement: Placement, job: Job) -> Summary:
    """Have a crew train a job, as `config` tells its workers. Returns how it ended.

    Raises:
        RayYoloError: as the `Judge` says of workers that have failed.
        LostWorkersError: if there is no crew any more.
    """
    name, wanted = uuid.uuid4().hex, placement.max_workers
    reference = [ray.put(config)]  # in a list: the crew itself has no need to open it
    judge = Judge(job.run_dir, placement.max_failures, config["recorder"])
    try:
        while True:
            news: News | str | None = answer(crew.news.remote(name))
            if isinstance(news, str):
                raise LostWorkersError(news)
            if news is None:
                answer(crew.offer.remote(name, str(job.run_dir), wanted, most_workers(job.recipe), reference))
            elif news.failures:
                lost = {number: error or ray.exceptions.WorkerCrashedError() for number, error in news.failures}
                judge.decide(lost, others_go_on=len(lost) < wanted)
            elif news.summary:
                return news.summary
            time.sleep(_ASK_SECONDS)
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            answer(crew.withdraw.remote(name))


# A worker's side


def crew_worker(config: dict[str, Any]) -> None:
    """Ray Train's train function: trains job after job, until there are no more.

    Raises:
        Exception: what a job has ended by, if that may lie in this process: another one takes its place.
    """
    crew, uid = config["crew"], uuid.uuid4().hex
    while (lease := answer(crew.ask.remote(uid, own_process()))) != "over":
        if lease is None:
            time.sleep(_ASK_SECONDS)
            continue
        outcome: Summary | Exception | None
        try:
            outcome = _work(crew, uid, lease)
        except Exception as error:
            outcome = error
        gc.collect()  # loaders, their processes and DDP are parts of circles
        answer(crew.ended.remote(uid, own_process(), lease[:2], outcome))
        if isinstance(outcome, Exception) and not isinstance(outcome, (RayYoloError, ray.exceptions.RayError)):
            raise outcome


def _work(crew: CrewHandle, uid: str, lease: Lease) -> Summary | None:
    """Train a job to its end, or until this worker is told to leave it."""
    config = answer(lease.config[0])
    placement, over = Placement.model_validate(config["placement"]), threading.Event()
    pulse, member = Pulse(placement.stall_seconds), uuid.uuid4().hex  # another one each time, who may come back

    def beat() -> None:
        step = 0
        while not over.wait(_BEAT_SECONDS):
            moved, step = pulse.step > step, pulse.step
            with contextlib.suppress(ray.exceptions.RayError):
                if answer(crew.beat.remote(uid, own_process(), lease[:2], moved)):
                    config["roster"].part.remote(member)

    threading.Thread(target=beat, name="ray_yolo lease", daemon=True).start()
    try:
        return train_job(config, placement, lease.number, pulse, member)
    finally:
        over.set()
