"""The page for a bug report: checks versions, devices, cluster and storage."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

import ray_yolo
from ray_yolo.config.model_facts import plugins
from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import RayYoloError
from ray_yolo.core.redact import redact
from ray_yolo.core.system import available_memory, cores
from ray_yolo.runs.folders import storage_folder, storage_probe
from ray_yolo.runtime.preflight import cluster_asked_for
from ray_yolo.sinks.mlflow_client import tracking_uri

LIBRARIES = ("torch", "torchvision", "ray", "mlflow", "numpy", "pydantic", "opencv-python-headless", "opencv-python",
             "pillow", "matplotlib", "tensorboard", "onnx", "onnxruntime", "safetensors", "obstore")


def describe(placement: Placement) -> tuple[list[str], list[str]]:
    """The page's lines, and the errors found in the requested cluster and in storage."""
    cluster, storage = _cluster(placement), _storage(placement)
    lines = [*_versions(), *_devices(), *cluster[0], *storage[0]]
    return lines, [*cluster[1], *storage[1]]


def _versions() -> Iterator[str]:
    versions = []
    for name in LIBRARIES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"{name} -")
    yield f"ray_yolo     {ray_yolo.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"libraries    {', '.join(versions)}"
    for each in plugins():
        yield f"plug-in      {each.package} {each.version}: {', '.join(each.models)}"


def _devices() -> Iterator[str]:
    yield (f"CPU          {cores()} cores, {available_memory() / 1e9:.1f} GB of memory free, "
           f"{torch.backends.cpu.get_cpu_capability()}")
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    yield f"GPU          {', '.join(names) or 'none that torch can use'} (torch built for CUDA {torch.version.cuda})"


def _cluster(placement: Placement) -> tuple[list[str], list[str]]:
    if not cluster_asked_for(placement):
        return ["cluster      none requested (--address, RAY_ADDRESS)"], []
    from ray_yolo.runtime.node_checks import describe_cluster

    try:
        lines, fit = describe_cluster(placement.address)
    except RayYoloError as error:
        return [f"cluster      {redact(str(error))}"], [str(error)]
    wrong = [] if fit else ["a node is not fit for training"]
    return [f"cluster      {line}" for line in lines], wrong


def _storage(placement: Placement) -> tuple[list[str], list[str]]:
    folder = storage_folder(placement)
    uri = tracking_uri(placement.mlflow_uri, folder)
    mlflow_line = f"mlflow       {redact(uri) if uri else 'off'}"
    is_object_store = "://" in placement.storage_path
    try:
        with storage_probe(placement) as place:
            line = f"storage      {placement.storage_path or folder}: writable"
            if not is_object_store:  # which has no limit to report
                line += f", {shutil.disk_usage(place).free / 1e9:.1f} GB free"
    except RayYoloError as error:
        return [f"storage      {redact(str(error))}", mlflow_line], [str(error)]
    return [line, mlflow_line], []
