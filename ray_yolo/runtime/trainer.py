"""One training from start to end: Placement -> Ray -> workers, with the run's records kept on the driver.

`fit` is what `python -m ray_yolo.train` and `YOLO.train` call. With `num_workers` 0 the same session runs in this
process, without Ray, and keeps the same records and checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer

from ray_yolo.config import Placement, RunConfig, resolve
from ray_yolo.engine.build import Host, Job
from ray_yolo.engine.runs import Run, open_run
from ray_yolo.engine.session import run_session
from ray_yolo.errors import RayYoloError, TrainingError
from ray_yolo.runtime import cluster
from ray_yolo.runtime.prepare import first_start, job_of, read_dataset
from ray_yolo.runtime.records import Records
from ray_yolo.runtime.worker import to_wire, train_worker


@dataclass(frozen=True)
class TrainResult:
    """What a training leaves behind."""

    run_dir: Path
    best: Path  # weights of the best epoch
    last: Path  # weights of the last epoch
    epochs: int  # trained in all
    best_epoch: int  # counted from 0
    best_fitness: float  # 0.1 mAP50 + 0.9 mAP50-95
    metrics: dict[str, float]  # precision, recall, mAP50, mAP50-95 of the last epoch


def fit(config: RunConfig, *, quiet: bool = False, link: Mapping[str, Any] | None = None) -> TrainResult:
    """Train as configured, or continue the run that the same configuration began.

    Args:
        quiet: print nothing.
        link: `parent_run_id` and `tags` for MLflow, for the trial of a sweep.

    Raises:
        InputError: for anything the user can get wrong, before any cluster work (exit 2).
        ResourcesError: if the cluster can never hold the workers (exit 4).
        TrainingError: if training fails for good (exit 3).
    """
    placement = config.placement
    check_early(config)
    _, train, val = read_dataset(config.recipe)
    run = open_run(config.recipe, placement)
    try:
        local = placement.num_workers == 0
        gpus = _local_gpus(placement) if local else cluster.connect(placement)
        if run.is_new:
            first_start(run, config, placement.max_workers, train, gpu=gpus > 0)
        job = job_of(run, placement.max_workers, train, val)
        records = Records(run, job, placement, local=local, quiet=quiet, link=dict(link or {}))
        try:
            summary = _fit_here(job, placement, gpus, records) if local else _fit_on_ray(job, placement, gpus, records)
        except BaseException as error:
            failed = isinstance(error, Exception)
            records.close("failed" if failed else "stopped", str(error) or type(error).__name__, lambda _: None)
            raise
        run.finish()
        records.close("done", "", lambda run_dir: draw_plots(run_dir, job, placement))
    finally:
        run.release()
    return _result(run, summary)


def check_early(config: RunConfig) -> None:
    """Refuse batch sizes and worker counts that do not fit before anything is started."""
    if (config.recipe.batch_size or 0) >= 0 and not config.placement.resume:
        resolve(config.recipe, config.placement.max_workers, gpu=False)


def scaling_config(placement: Placement, gpus: float | None = None) -> ray.train.ScalingConfig:
    """What Ray is asked for. Without `gpus`, an `auto` is shown as none."""
    if gpus is None:
        gpus = 0.0 if placement.gpus_per_worker == "auto" else float(placement.gpus_per_worker)
    resources = {"CPU": placement.cpus_per_worker, **({"GPU": gpus} if gpus else {})}
    return ray.train.ScalingConfig(
        num_workers=placement.num_workers, use_gpu=gpus > 0, resources_per_worker=resources,
        placement_strategy=placement.placement_strategy, accelerator_type=placement.accelerator_type or None)


def _fit_here(job: Job, placement: Placement, gpus: float, records: Records) -> dict[str, Any]:
    """The session in this process."""
    host = Host(device=torch.device("cuda" if gpus else "cpu"), loader_processes=placement.loader_processes,
                threads=max(1, int(placement.cpus_per_worker)), cache=placement.cache)
    if gpus:
        host = _on_gpu(host)
    return run_session(job, host, placement, records.emit, lambda _: None)


def _on_gpu(host: Host) -> Host:
    from dataclasses import replace

    return replace(host, prepare_model=lambda model: model.to(host.device))


def _fit_on_ray(job: Job, placement: Placement, gpus: float, records: Records) -> dict[str, Any]:
    """The session on Ray Train workers, restarted after failures that Ray itself does not retry.

    Ray restarts worker groups (`max_failures`); a dead controller or a failed process-group setup it does not. Each
    attempt is a Ray run of its own, because our checkpoints, not Ray's, say where to continue.
    """
    cluster.wait_for_room(placement, gpus)
    config = {"job": to_wire(job), "placement": placement.model_dump(mode="json"), "recorder": records.recorder}
    attempts = placement.max_failures
    while True:
        trainer = TorchTrainer(
            train_worker, train_loop_config=config, scaling_config=scaling_config(placement, gpus),
            torch_config=TorchConfig(timeout_s=int(placement.timeout_seconds)),
            run_config=ray.train.RunConfig(
                name=cluster.unique_name(job.run_dir.name), storage_path=str(job.run_dir / "ray"),
                failure_config=ray.train.FailureConfig(max_failures=placement.max_failures),
                worker_runtime_env={"env_vars": cluster.worker_environment(placement)},
                logging_config=ray.train.LoggingConfig(log_level="ERROR")))
        try:
            return trainer.fit().return_value
        except ray.train.WorkerGroupError as error:
            raise _cause(error) from error
        except (ray.train.ControllerError, ray.exceptions.ActorDiedError) as error:
            if attempts == 0:
                raise TrainingError(f"Ray could not run the training: {error}") from error
            attempts -= 1
            records.warn(f"Ray's controller failed and is started again: {str(error).strip().splitlines()[-1]}")


def _cause(error: ray.train.WorkerGroupError) -> RayYoloError:
    """One worker's error: ours where there is one, because the others only lost their connection to it."""
    failures = sorted(error.worker_failures.items())
    for _, failure in failures:
        cause = getattr(failure, "cause", failure)
        if isinstance(cause, RayYoloError):
            return cause
    number, failure = failures[0]
    return TrainingError(f"worker {number} failed: {failure}")


def _local_gpus(placement: Placement) -> float:
    """GPUs that in-process training uses: one if there is one and it was not refused."""
    return float(torch.cuda.is_available() and placement.gpus_per_worker != 0)


def draw_plots(run_dir: Path, job: Job, placement: Placement) -> None:
    """Draw the run's pictures from its events and arrays."""


def _result(run: Run, summary: dict[str, Any]) -> TrainResult:
    weights = run.folder / "weights"
    last = summary["last_epoch"] or {}
    return TrainResult(run_dir=run.folder, best=weights / "best.pt", last=weights / "last.pt",
                       epochs=summary["epoch"] + 1, best_epoch=summary["best_epoch"],
                       best_fitness=summary["best_fitness"], metrics=last.get("metrics") or {})
