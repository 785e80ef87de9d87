"""What runs on every worker: JSON becomes a job, what surrounds it is handed in, the session is run."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util import get_current_placement_group

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.engine.build import Host, Job
from ray_yolo.engine.membership import Membership, Pulse
from ray_yolo.engine.replicas import Replicas, ddp_options, wrapped
from ray_yolo.engine.session import run_session
from ray_yolo.events import FailureEvent, PlacementEvent, StacksEvent, Summary, WarningEvent, WorkerEvent
from ray_yolo.runlog.notices import warnings_told
from ray_yolo.runlog.recorder import await_recorder, emitter, flush_recorder
from ray_yolo.runtime.members import RosterMembers
from ray_yolo.runtime.stopping import StopAsked, driver_asks


def to_wire(job: Job) -> dict[str, Any]:
    """A job as plain values and two references to label indices, each held once per node."""
    return {**vars(job), "recipe": job.recipe.model_dump(mode="json"), "run_dir": str(job.run_dir),
            "train": ray.put(job.train), "val": ray.put(job.val)}


def from_wire(wire: dict[str, Any]) -> Job:
    """The job that `to_wire` sent."""
    train, val = ray.get([wire["train"], wire["val"]])
    recipe, run_dir = Recipe.model_validate(wire["recipe"]), Path(wire["run_dir"])
    return Job(**{**wire, "recipe": recipe, "run_dir": run_dir, "train": train, "val": val})


def train_worker(config: dict[str, Any]) -> Summary | None:
    """Ray Train's train function. Returns the session's summary."""
    import ray.train.torch  # here: takes a second, which workers in places need not

    context = ray.train.get_context()
    worker, group = context.get_world_rank(), get_current_placement_group()
    if group is not None and worker == 0:
        emitter(config["recorder"])(PlacementEvent(group=group.id.hex()))
    prepare_model = partial(ray.train.torch.prepare_model, parallel_strategy_kwargs=ddp_options())
    host = Host(Replicas(worker, context.get_world_size()), ray.train.torch.get_device(), prepare_model,
                ray.train.torch.prepare_data_loader)
    stop_asked = driver_asks(config["recorder"]) if worker == 0 else lambda: False  # one asks for all
    return _train(config, worker, host, None, stop_asked)


def train_in_place(config: dict[str, Any], worker: int) -> Summary | None:
    """What a worker of a roster does; see `Places`. Returns the session's summary; None: it was told to leave before."""
    placement, emit = Placement.model_validate(config["placement"]), emitter(config["recorder"])
    host, asks = Host(prepare_model=wrapped, pulse=Pulse(placement.stall_seconds)), driver_asks(config["recorder"])
    members = RosterMembers(config["roster"], worker, host.pulse, placement.timeout_seconds,
                            lambda stacks: emit(StacksEvent(worker=worker, stacks=stacks)))
    signal.signal(signal.SIGTERM, lambda *_: members.part())  # the node is going to be taken away
    try:
        return _train(config, worker, host, members, lambda: members.first and asks())
    finally:
        members.close()


def _train(config: dict[str, Any], worker: int, host: Host, members: Membership | None, stop_asked: StopAsked
           ) -> Summary | None:
    """The session, with what it tells."""
    await_recorder(config["recorder"])
    placement, emit = Placement.model_validate(config["placement"]), emitter(config["recorder"])
    emit(WorkerEvent(worker=worker, node=socket.gethostname(), pid=os.getpid()))

    def tell(text: str) -> None:
        emit(WarningEvent(message=text, worker=worker))

    try:
        with warnings_told(tell, placement.loader_processes) as init:
            host = replace(host, loader_processes=placement.loader_processes, loader_init=init,
                           threads=placement.threads, cache=placement.image_cache)
            torch.set_num_threads(host.threads)
            return run_session(from_wire(config["job"]), host, placement, emit, members, stop_asked)
    except Exception:
        emit(FailureEvent(worker=worker, traceback=traceback.format_exc()))  # the driver tells the last line alone
        raise
    finally:
        flush_recorder(config["recorder"])  # events are sent without waiting, and the process may end right after this
