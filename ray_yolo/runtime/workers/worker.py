"""What runs on every worker: JSON becomes a job, what surrounds it is handed in, the session is run."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import traceback
import uuid
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import ray
import torch
from ray.util import get_current_placement_group
from torch import nn

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import WorkerLeftError
from ray_yolo.core.events import FailureEvent, PlacementEvent, StacksEvent, Summary, WarningEvent, WorkerEvent
from ray_yolo.core.redact import without_secrets
from ray_yolo.data.remote import localize
from ray_yolo.engine.build import TrainSpec, WorkerContext
from ray_yolo.engine.collectives import Collectives, ddp_options, is_distributed, wrap_in_ddp
from ray_yolo.engine.membership import Activity
from ray_yolo.engine.session import run_session
from ray_yolo.runs.recorder import await_recorder, emitter, flush_recorder
from ray_yolo.runs.remote_run import working_copy_of
from ray_yolo.runs.warnings import forward_warnings
from ray_yolo.runtime.graceful_stop import poll_stop_request
from ray_yolo.runtime.workers.rendezvous import RendezvousClient

_INDEX_SECONDS = 600.0  # for the labels of a large data set to come from the driver's node

_SIGTERM_SECONDS = 0.2  # until a SIGTERM is heard
_sigterms: SimpleQueue[int] = SimpleQueue()  # of this process; its put() may be called in a signal handler


def to_payload(spec: TrainSpec) -> dict[str, Any]:
    """A job as plain values and two references to label indices, each held once per node."""
    return {**vars(spec), "recipe": spec.recipe.model_dump(mode="json"), "run_dir": str(spec.run_dir),
            "train": ray.put(spec.train), "val": ray.put(spec.val)}


def from_payload(payload: dict[str, Any]) -> TrainSpec:
    """The job that `to_wire` sent."""
    train, val = ray.get([payload["train"], payload["val"]], timeout=_INDEX_SECONDS)
    recipe, run_dir = Recipe.model_validate(payload["recipe"]), Path(payload["run_dir"])
    return TrainSpec(**{**payload, "recipe": recipe, "run_dir": run_dir,
                        "train": localize(train), "val": localize(val)})


def train_worker(config: dict[str, Any]) -> Summary | None:
    """Ray Train's train function. Returns the session's summary."""
    import ray.train  # here, as below: it takes seconds, and workers in places of their own need none

    placement, worker = Placement.model_validate(config["placement"]), ray.train.get_context().get_world_rank()
    group = get_current_placement_group()
    if group is not None and worker == 0:
        emitter(config["recorder"])(PlacementEvent(group=group.id.hex()))
    summary = _train_until_sigterm(config, placement, worker)
    if summary is None and received_sigterm():
        raise WorkerLeftError("it has received SIGTERM, and left after a step")  # or Ray Train would not replace it
    return summary


def train_on_pool_worker(config: dict[str, Any], worker: int) -> Summary | None:
    """What a worker does in a place of its own. Returns the session's summary; None: it was told to leave before."""
    note_sigterm()
    return _train_until_sigterm(config, Placement.model_validate(config["placement"]), worker)


def note_sigterm() -> None:
    """Have this process note SIGTERM, which ends a process of Ray at once otherwise. For the main thread."""
    signal.signal(signal.SIGTERM, lambda number, _: _sigterms.put(number))


def received_sigterm() -> bool:
    """Whether this process is to leave its training, because its node will be taken away."""
    return not _sigterms.empty()


def _train_until_sigterm(config: dict[str, Any], placement: Placement, worker: int) -> Summary | None:
    """`train_job` of a worker that leaves after the step in hand once it receives SIGTERM, if there is a roster."""
    uid, over = uuid.uuid4().hex, threading.Event()

    def leave_on_sigterm() -> None:
        while not over.wait(_SIGTERM_SECONDS):
            if received_sigterm():
                config["coordinator"].drain.remote(uid)
                return

    if config["coordinator"]:
        threading.Thread(target=leave_on_sigterm, name="ray_yolo sigterm", daemon=True).start()
    try:
        return train_job(config, placement, worker, Activity(placement.stall_seconds), uid)
    finally:
        over.set()


def train_job(
    config: dict[str, Any], placement: Placement, worker: int, activity: Activity, uid: str
) -> Summary | None:
    """Train a job as one of its workers. Returns the session's summary.

    Args:
        worker: its number among those that Ray, or a crew, has given the job.
        uid: what the job's roster knows this worker by.
    """
    gc.freeze()  # what is there stays: collections, of which each group and each job asks for one, take a tenth as long
    await_recorder(config["recorder"])
    emit, coordinator = emitter(config["recorder"]), config["coordinator"]
    emit(WorkerEvent(worker=worker, node=socket.gethostname(), pid=os.getpid()))

    def notify(text: str) -> None:
        emit(WarningEvent(message=text, worker=worker))

    def tell_stacks(stacks: str) -> None:
        emit(StacksEvent(worker=worker, stacks=stacks))

    on_pool, members = config.get("on_pool", False), None
    try:
        device = _device(on_pool)
        if coordinator:
            members = RendezvousClient(
                coordinator,
                worker,
                activity,
                device,
                placement.timeout_seconds,
                tell_stacks,
                uid,
                alone=worker == 0 and placement.min_workers == 1,
            )
        with forward_warnings(notify, placement.loader_processes) as init, ExitStack() as stack:
            spec, stored = from_payload(config["spec"]), None
            if config["stored"]:
                folder, stored = stack.enter_context(working_copy_of(config["stored"]))
                spec = replace(spec, run_dir=folder)
            context = replace(
                WorkerContext(device=device, prepare_model=partial(wrap_in_ddp, device=device)) if on_pool else
                _train_context(worker, device, coordinator is not None),
                loader_processes=placement.loader_processes, loader_init=init, threads=placement.threads,
                cache=placement.image_cache, activity=activity, stored=stored)
            torch.set_num_threads(context.threads)
            return run_session(spec, context, placement, emit, members,
                               poll_stop_request(config["recorder"], worker, placement.max_workers))
    except Exception as error:
        emit(FailureEvent(worker=worker, traceback=traceback.format_exc()))  # the driver tells the last line alone
        raise without_secrets(error) from None  # Ray writes it, and what it came from, into its own logs
    finally:
        if members:
            members.close()
        flush_recorder(config["recorder"])  # events are sent without waiting, and the process may end right after this


def _device(on_pool: bool) -> torch.device:
    """What Ray has given this worker; in a place of its own it sees no other GPU."""
    if on_pool:
        gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return torch.device("cuda", 0) if gpus else torch.device("cpu")
    from ray.train.torch import get_device

    return get_device()


def _train_context(worker: int, device: torch.device, comes_and_goes: bool) -> WorkerContext:
    """What Ray Train surrounds a worker with, whose group is its own business where it comes and goes."""
    import ray.train.torch

    def prepare_model(model: nn.Module) -> nn.Module:
        """Ray's, which would wrap for as many workers as it has started."""
        return ray.train.torch.prepare_model(model, parallel_strategy="ddp" if is_distributed() else None,
                                             parallel_strategy_kwargs=ddp_options())

    collectives = Collectives() if comes_and_goes else Collectives(worker, ray.train.get_context().get_world_size())
    # The loop copies batches itself; those of Ray before 2.60 could be overwritten on the GPU
    prepare_loader = partial(ray.train.torch.prepare_data_loader, move_to_device=False)
    return WorkerContext(collectives, device, prepare_model, prepare_loader)
