"""The code of every worker: it rebuilds the training from the payload, connects to recorder and peers, and trains."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
import traceback
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from ray_yolo.core.garbage import uncollected

with uncollected():  # a pool's process imports torch and most of this package with this module
    import ray
    import ray.exceptions
    import torch
    from ray.util import get_current_placement_group
    from torch import nn

    from ray_yolo.config.placement import Placement
    from ray_yolo.core.errors import RayYoloError, WorkerLeftError, release_frames
    from ray_yolo.core.events import FailureEvent, PlacementEvent, StacksEvent, Summary, WarningEvent, WorkerEvent
    from ray_yolo.core.redact import without_secrets
    from ray_yolo.core.system import Process, own_process, undo_niceness
    from ray_yolo.data.remote import localize
    from ray_yolo.engine.callbacks import Hooks, TrainingCallbacks
    from ray_yolo.engine.collectives import ddp_options, is_distributed, wrap_in_ddp
    from ray_yolo.engine.membership import Activity
    from ray_yolo.engine.session import run_session
    from ray_yolo.engine.spec import TrainSpec, WorkerContext
    from ray_yolo.runs.recorder import RecorderClient
    from ray_yolo.runs.remote_run import worker_copy
    from ray_yolo.runs.warnings import forward_warnings
    from ray_yolo.runs.worker_lock import hold_folder
    from ray_yolo.runtime.workers.client import JobClient, answer
    from ray_yolo.runtime.workers.job_queue import JobAssignment, PoolWorker
    from ray_yolo.runtime.workers.rendezvous import RendezvousClient
    from ray_yolo.sinks.callbacks import load_callbacks

_RECORDER_SECONDS = 60.0  # the recorder may take this long to reply
MARKET_TYPE = "ray.io/market-type"
"""Ray's label of a node, `spot` or `on-demand`. Ray sets it from the environment variable RAY_NODE_MARKET_TYPE."""
_INDEX_SECONDS = 600.0  # the labels of a large data set may take this long to arrive from the driver's node

_sigterms: SimpleQueue[int] = SimpleQueue()  # this process received them; put() may be called in a signal handler


def to_payload(spec: TrainSpec) -> dict[str, Any]:
    """The fields of a training, with references to its two label indices, each of which is stored once per node."""
    return {**vars(spec), "train": ray.put(spec.train), "val": ray.put(spec.val)}


def from_payload(payload: dict[str, Any]) -> TrainSpec:
    """The inverse of `to_payload`."""
    train, val = ray.get([payload["train"], payload["val"]], timeout=_INDEX_SECONDS)
    return TrainSpec(**{**payload, "train": localize(train), "val": localize(val)})


def train_worker(payload: dict[str, Any]) -> Summary | None:
    """Ray Train's train function. Returns the session's summary."""
    import ray.train  # here, as below: it takes seconds, and workers of a pool do not need it

    worker, group = ray.train.get_context().get_world_rank(), get_current_placement_group()
    if group is not None and worker == 0:
        payload["recorder"].emit(PlacementEvent(group=group.id.hex()))
    summary = train_job(payload, worker, payload["coordinator"])
    if summary is None and received_sigterm():
        raise WorkerLeftError("received SIGTERM, and left after a step")  # otherwise Ray Train would not replace it
    return summary


def pool_worker(config: dict[str, Any], bundle: int) -> bool:
    """The task of a pool's worker: train one job after another. Returns whether there is no more work for any worker.

    After an error of a job that this process may have caused, it ends, and a new process replaces it.
    """
    prepare_process()
    queue, uid = config["queue"], uuid.uuid4().hex
    worker = PoolWorker(bundle, ray.get_runtime_context().get_node_id(), own_process())
    while not received_sigterm():
        orders, task, ask_again = answer(queue.next_task.remote(uid, worker))
        if orders.stop or orders.leave:
            return bool(orders.stop)
        if task is None:
            time.sleep(ask_again)
            continue
        result = _train_assignment(uid, worker, task)
        gc.collect()  # loaders, their processes and DDP are in reference cycles
        torch.cuda.empty_cache()  # the next job may measure what is free; without a GPU this does nothing
        answer(queue.ended.remote(uid, worker, task[:2], result))
        if isinstance(result, Exception) and not isinstance(result, (RayYoloError, ray.exceptions.RayError)):
            return False
    return False


def _train_assignment(uid: str, worker: PoolWorker, assignment: JobAssignment) -> Summary | Exception | None:
    """Train a job to its end, or until this worker has to leave it. Returns how it ended for this worker."""
    try:
        payload = answer(assignment.config[0])
        return train_job(payload, assignment.number, payload["coordinator"].of_worker(uid, worker, assignment))
    except Exception as error:
        release_frames(error)
        return error


def prepare_process() -> None:
    """Prepare a process to train one or more jobs. Called once, before the first job, in the main thread.

    The process then records SIGTERM, which by default ends a Ray process at once. What it has imported so far is no
    longer scanned for garbage: collections, which each group and each job request, then take a tenth as long. A job
    must not freeze again: the objects of earlier jobs that still await their collection would stay for ever.
    """
    signal.signal(signal.SIGTERM, lambda number, _: _sigterms.put(number))
    gc.collect()
    gc.freeze()


def received_sigterm() -> bool:
    """Whether this process has to leave its training, because its node will be removed."""
    return not _sigterms.empty()


def train_job(payload: dict[str, Any], worker: int, coordinator: JobClient) -> Summary | None:
    """Train as one of a job's workers. Returns the session's summary; None if this worker had to leave before the end.

    Args:
        worker: its number in the job.
        coordinator: of the job.
    """
    recorder: RecorderClient = payload["recorder"]
    recorder.wait(_RECORDER_SECONDS)
    placement: Placement = payload["placement"]
    emit, activity = recorder.emit, Activity(placement.stall_seconds)
    labels = ray.get_runtime_context().get_node_labels()
    emit(WorkerEvent(worker=worker, node=socket.gethostname(), pid=os.getpid(),
                     market_type=labels.get(MARKET_TYPE, "")))

    def notify(text: str) -> None:
        emit(WarningEvent(message=text, worker=worker))

    if not undo_niceness() and worker == 0:
        notify("Ray runs its workers at a lower priority than other programs, which slow training down; start Ray with "
               "RAY_worker_niceness=0")
    members = None
    try:
        context = _assigned_context(payload["on_pool"])
        members = RendezvousClient(coordinator, worker, activity, context.device, placement.timeout_seconds,
                                   lambda stacks: emit(StacksEvent(worker=worker, stacks=stacks)), received_sigterm,
                                   partial(_is_orphan, payload["driver"], recorder),
                                   alone=worker == 0 and placement.min_workers == 1,
                                   max_failures=placement.max_failures)
        with forward_warnings(notify, placement.loader_processes) as init, ExitStack() as stack:
            spec, stored = from_payload(payload["spec"]), None
            if payload["stored"]:
                folder, stored = stack.enter_context(worker_copy(payload["stored"]))
                spec = replace(spec, run_dir=folder)
            else:  # in a bucket, the attempt number in each key keeps out a second driver
                stack.enter_context(hold_folder(spec.run_dir))
            context = replace(
                context, loader_processes=placement.loader_processes, loader_init=init, threads=placement.threads,
                cache=placement.image_cache, cuda_graphs=placement.cuda_graphs, activity=activity,
                colour_kernel=placement.colour_kernel, stored=stored,
                callbacks=TrainingCallbacks(_received_callbacks(*payload["callbacks"]), notify))
            torch.set_num_threads(context.threads)
            summary = run_session(spec, context, placement, emit, members)
            recorder.flush()  # before this worker leaves: the driver then kills those that have left
            return summary
    except Exception as error:
        emit(FailureEvent(worker=worker, traceback=traceback.format_exc()))  # the driver reports only the last line
        raise without_secrets(error) from None  # Ray writes it, and its cause, into its own logs
    finally:
        if members:
            members.close()
        recorder.flush()  # events are sent without waiting, and the process may end now


def _received_callbacks(path: str, sent: Mapping[str, bytes]) -> Hooks:
    """The user's functions, as of `run.worker_callbacks`."""
    return load_callbacks(path) | {name: ray.cloudpickle.loads(function) for name, function in sent.items()}


def _is_orphan(driver: Process, recorder: RecorderClient) -> bool:
    """Whether the training's driver has ended. On another node this shows by its recorder, which ends with it."""
    if driver.is_here:
        return driver.has_ended  # Ray takes a driver for alive that was killed and not reaped
    return recorder.is_gone()


def _assigned_context(on_pool: bool) -> WorkerContext:
    """The context with the device that Ray has assigned. Workers form their process groups themselves."""
    if on_pool:  # a worker of a pool sees no other GPU
        gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        device = torch.device("cuda", 0) if gpus else torch.device("cpu")
        return WorkerContext(device=device, prepare_model=partial(wrap_in_ddp, device=device))
    from ray.train import torch as ray_torch

    def prepare_model(model: nn.Module) -> nn.Module:
        """A replacement for Ray's `prepare_model`, which would wrap by the number of workers that Ray has started."""
        return ray_torch.prepare_model(model, parallel_strategy="ddp" if is_distributed() else None,
                                       parallel_strategy_kwargs=ddp_options())

    # Ray places no batch: the loop copies them on a stream of its own while the step before is computed. Ray keeps the
    # sampler too, as it is a DistributedSampler: the plan says which images a worker takes, not rank and world size
    prepare_loader = partial(ray_torch.prepare_data_loader, move_to_device=False)
    return WorkerContext(device=ray_torch.get_device(), prepare_model=prepare_model, prepare_loader=prepare_loader)
