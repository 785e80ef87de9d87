"""What runs on every Ray Train worker: JSON becomes a job, Ray's helpers are handed in, the session is run."""

from __future__ import annotations

import os
import socket
import traceback
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.actor import ActorHandle
from ray.util import get_current_placement_group
from torch import nn

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.engine.build import Host, Job
from ray_yolo.engine.membership import Membership, Pulse
from ray_yolo.engine.replicas import Replicas, ddp_options, in_group
from ray_yolo.engine.session import run_session
from ray_yolo.events import Emit, FailureEvent, PlacementEvent, StacksEvent, Summary, WarningEvent, WorkerEvent
from ray_yolo.runlog.notices import warnings_told
from ray_yolo.runlog.recorder import await_recorder, emitter, flush_recorder
from ray_yolo.runtime.members import RosterMembers
from ray_yolo.runtime.roster import Roster
from ray_yolo.runtime.stopping import driver_asks


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
    await_recorder(config["recorder"])
    context = ray.train.get_context()
    placement, worker = Placement.model_validate(config["placement"]), context.get_world_rank()
    emit, group = emitter(config["recorder"]), get_current_placement_group()
    if group is not None and worker == 0:
        emit(PlacementEvent(group=group.id.hex()))
    emit(WorkerEvent(worker=worker, node=socket.gethostname(), pid=os.getpid()))
    stop_asked = driver_asks(config["recorder"]) if worker == 0 else lambda: False  # one asks for all

    def tell(text: str) -> None:
        emit(WarningEvent(message=text, worker=worker))

    pulse = Pulse(placement.stall_seconds)
    members = _members(config["roster"], placement, pulse, emit)
    try:
        with warnings_told(tell, placement.loader_processes) as init:
            host = Host(
                replicas=Replicas() if config["roster"] else Replicas(worker, context.get_world_size()),
                device=ray.train.torch.get_device(), prepare_model=_prepare_model,
                prepare_loader=ray.train.torch.prepare_data_loader, loader_processes=placement.loader_processes,
                loader_init=init, threads=placement.threads, cache=placement.image_cache, pulse=pulse)
            torch.set_num_threads(host.threads)
            return run_session(from_wire(config["job"]), host, placement, emit, members, stop_asked)
    except Exception:
        emit(FailureEvent(worker=worker, traceback=traceback.format_exc()))  # the driver tells the last line alone
        raise
    finally:
        if isinstance(members, RosterMembers):
            members.close()
        flush_recorder(config["recorder"])  # events are sent without waiting, and the process may end right after this


def _members(roster: ActorHandle[Roster] | None, placement: Placement, pulse: Pulse, emit: Emit) -> Membership | None:
    """This worker's way to the others: by the roster, or (None) as Ray has put them together."""
    if roster is None:
        return None
    worker = ray.train.get_context().get_world_rank()
    return RosterMembers(roster, worker, pulse, placement.timeout_seconds,
                         lambda stacks: emit(StacksEvent(worker=worker, stacks=stacks)))


def _prepare_model(model: nn.Module) -> nn.Module:
    """Ray's, which would wrap for as many workers as it has started."""
    return ray.train.torch.prepare_model(model, parallel_strategy="ddp" if in_group() else None,
                                         parallel_strategy_kwargs=ddp_options())
