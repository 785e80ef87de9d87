"""Ray itself: connecting to a cluster or starting one, and what workers are given there."""

from __future__ import annotations

import logging
import math
import os
import time
import uuid

import ray

from ray_yolo.config import Placement
from ray_yolo.errors import ResourcesError

# Large blocks are kept and reused instead of being returned to the system after each layer; huge pages spare page
# faults. Read by glibc when a process starts, so they are given to Ray's workers. Measured gain on CPU: see
# tests/benchmarks/README.md.
MALLOC = ("glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=17179869184:glibc.malloc.trim_threshold=17179869184:"
          "glibc.malloc.top_pad=268435456")

# Read by the driver before Ray starts; what the user has set stands.
DRIVER_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # how soon a report or a dead worker is seen (Ray: 2 s)
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "120",  # a frozen worker counts as dead (Ray: 600 s)
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one process and one error line less at each start
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # keep CUDA_VISIBLE_DEVICES where no GPU is asked for
}


def connect(placement: Placement) -> float:
    """Connect to the cluster, or start one on this machine. Returns the GPUs that each worker gets."""
    for name, value in DRIVER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not ray.is_initialized():
        ray.init(address=placement.address or None, log_to_driver=False, logging_level=logging.ERROR)
    if placement.gpus_per_worker != "auto":
        return float(placement.gpus_per_worker)
    return 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0


def wait_for_room(placement: Placement, gpus: float) -> None:
    """Wait until the cluster could hold the fewest workers that were asked for, if everything else left it.

    Raises:
        ResourcesError: saying what is missing, after `wait_for_resources` seconds.
    """
    fewest = placement.num_workers[0] if isinstance(placement.num_workers, tuple) else placement.num_workers
    needed = {"CPU": placement.cpus_per_worker * fewest, "GPU": gpus * fewest}
    deadline = time.monotonic() + placement.wait_for_resources
    while True:
        there = ray.cluster_resources()
        missing = {kind: amount for kind, amount in needed.items() if amount > there.get(kind, 0) + 1e-9}
        if not missing:
            return
        if time.monotonic() >= deadline:
            raise ResourcesError("; ".join(
                f"{fewest} workers need {amount:g} {kind}, the cluster has {there.get(kind, 0):g}"
                for kind, amount in missing.items()) + _advice(missing, there))
        time.sleep(0.5)


def _advice(missing: dict[str, float], there: dict[str, float]) -> str:
    if "GPU" in missing:
        return "; use fewer --num-workers, --gpus-per-worker 0, or add nodes"
    room = math.floor(there.get("CPU", 0))
    return f"; use --num-workers {room}, a smaller --cpus-per-worker, or add nodes (--wait-for-resources waits longer)"


def worker_environment(placement: Placement) -> dict[str, str]:
    """Environment of worker processes."""
    threads = str(max(1, int(placement.cpus_per_worker)))
    return {"GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", MALLOC), "OMP_NUM_THREADS": threads,
            "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5"}


def unique_name(run: str) -> str:
    """A Ray run name that was never used: Ray continues its own checkpoints under a name it knows."""
    return f"{run}-{uuid.uuid4().hex[:8]}"
