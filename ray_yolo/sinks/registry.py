"""Registers the best weights of a finished run as an MLflow model, for `mlflow.pyfunc.load_model`.

The model is code, not a pickle: a copy of this package, a file that uses it, and the weights as plain tensors. It is
created only for a registered name; the weights are artifacts of the run in any case.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ray_yolo.checkpoints.state_file import read_state
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import EndEvent, Event, StartEvent
from ray_yolo.runs.event_log import last_of
from ray_yolo.sinks.mlflow_client import build_client, read_run_file
from ray_yolo.sinks.mlflow_errors import explained

if TYPE_CHECKING:
    from mlflow import MlflowClient

ALIAS = "best"

_MODEL_TAG = "ray_yolo.model_id"
_CODE = Path(__file__).with_name("pyfunc_model.py")
_PACKAGE = Path(__file__).parents[1]
_NEEDED = ("mlflow", "numpy", "opencv-python-headless", "pandas", "pillow", "pydantic", "pyyaml", "torch",
           "torchvision")


class Registry:
    """The best weights of a completed training as a registered model."""

    name, uses_time = "model registry", True

    def __init__(self, folder: Path, uri: str | None, registered_name: str) -> None:
        self._folder, self._uri, self._registered_name = folder, uri, registered_name
        self._is_registered = False

    def update(self, events: Sequence[Event], ended: bool) -> None:
        """Register the weights, once.

        Raises:
            InputError: without tracking.
            RecordError: if the server cannot be reached or refuses.
        """
        end = last_of(events, StartEvent, EndEvent)
        is_done = ended and isinstance(end, EndEvent) and end.status == "done"
        if not is_done or self._is_registered:
            return
        about = read_run_file(self._folder)
        if self._uri is None or about is None:
            raise InputError(f"--register {self._registered_name}: there is no MLflow run to register from")
        with explained(self._uri):
            log_model(self._folder, self._uri, about["run_id"], self._registered_name)
        self._is_registered = True


def log_model(run_dir: Path, uri: str, run_id: str, name: str) -> str:
    """Register the best (else the last) weights of a run folder as a model of its MLflow run, under a name. Returns the
    model's URI, for `mlflow.pyfunc.load_model`.

    The model becomes the newest version in the server's registry, with the alias `best`. A second call does not add a
    second model or version.

    Raises:
        CheckpointError: if there are no weights.
        mlflow.exceptions.MlflowException: if the server cannot be reached or refuses.
    """
    client = build_client(uri)
    model_id = client.get_run(run_id).data.tags.get(_MODEL_TAG) or _create_model(client, run_dir, run_id)
    _register(client, name, run_id, model_id)
    return f"models:/{model_id}"


def _create_model(client: MlflowClient, run_dir: Path, run_id: str) -> str:
    """Create the model as an output of its run. Returns its id."""
    from mlflow.entities import LoggedModelOutput

    experiment_id = client.get_run(run_id).info.experiment_id
    best = run_dir / "weights" / "best.pt"
    state = read_state(best if best.exists() else best.with_name("last.pt"))
    with tempfile.TemporaryDirectory() as temporary:
        folder, weights = Path(temporary) / "model", Path(temporary) / "weights.pt"
        torch.save({"meta": state["meta"], "ema": state["ema"]}, weights)  # without the state that only training needs
        model = client.create_logged_model(experiment_id, name=run_dir.resolve().name, source_run_id=run_id)
        _save(folder, weights, run_id=run_id, model_id=model.model_id)
        client.log_model_artifacts(model.model_id, str(folder))
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
    client.set_tag(run_id, _MODEL_TAG, model.model_id)
    return str(model.model_id)


def _save(folder: Path, weights: Path, **identity: Any) -> None:
    """Write an MLflow model folder with a weights file; `identity` has the ids of its run and model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # from type hints in MLflow itself
        import mlflow.pyfunc
    import pandas as pd
    from mlflow.models import Model, ModelSignature
    from mlflow.types.schema import AnyType, ColSpec, Schema

    picture = np.full((64, 64, 3), 114, np.uint8)
    numbers = [ColSpec("double", name) for name in ("x1", "y1", "x2", "y2", "score")]
    outputs = Schema([ColSpec("long", "image"), *numbers, ColSpec("long", "class"), ColSpec("string", "name")])
    inputs = Schema([ColSpec(AnyType(), "image")])  # paths or pixels: MLflow has no union type
    mlflow.pyfunc.save_model(
        folder, python_model=str(_CODE), artifacts={"weights": str(weights)}, code_paths=[str(_PACKAGE)],
        signature=ModelSignature(inputs, outputs), input_example=pd.DataFrame({"image": [picture.tolist()]}),
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in _NEEDED],
        mlflow_model=Model(**identity))


def _register(client: MlflowClient, name: str, run_id: str, model_id: str) -> None:
    """Point the alias of a registered name to a version with this model."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    # The location, not models:/ID: a database store looks that up on the default server of this process.
    source = client.get_logged_model(model_id).artifact_location
    versions = [version for version in client.search_model_versions(f"name = '{name}'") if version.source == source]
    versions = versions or [client.create_model_version(name, source, run_id, model_id=model_id)]
    client.set_registered_model_alias(name, ALIAS, versions[0].version)
