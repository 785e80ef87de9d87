"""Registers the best weights of a finished run as an MLflow model, for `mlflow.pyfunc.load_model`.

The model is code, not a pickle: a copy of this package, a file that uses it, and the weights as plain tensors. It is
created only for a registered name; the weights are artifacts of the run in any case.
"""

from __future__ import annotations

import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ray_yolo.checkpoints.state_file import read_state
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import EndEvent, StartEvent
from ray_yolo.runs.event_log import last_of
from ray_yolo.sinks.base import Sink
from ray_yolo.sinks.mlflow_client import build_client, note_pending, read_run_file, sync_command

if TYPE_CHECKING:
    from mlflow import MlflowClient

ALIAS = "best"

_MODEL_TAG = "ray_yolo.model_id"
_CODE = Path(__file__).with_name("pyfunc_model.py")
_PACKAGE = Path(__file__).parents[1]
_NEEDED = ("mlflow", "numpy", "opencv-python-headless", "pandas", "pillow", "pydantic", "pyyaml", "torch",
           "torchvision")


class Registry(Sink):
    """Registers the best weights of a completed training. At a prompt, the registration is pending after 0.5 s."""

    name, needs, patience_seconds, prompt_seconds = "model registry", (StartEvent, EndEvent), 600.0, 0.5

    def __init__(self, run_dir: Path, uri: str | None, register: str) -> None:
        super().__init__()
        self._run_dir, self._uri, self._register = run_dir, uri, register
        self._error: Exception | None = None

    def update(self, last: bool = False) -> None:
        """Register the weights, once."""
        end = last_of(self.history, StartEvent, EndEvent)
        if not (last and isinstance(end, EndEvent) and end.status == "done"):
            return
        try:
            about = read_run_file(self._run_dir)
            if self._uri is None or about is None:
                raise InputError(f"--register {self._register}: there is no MLflow run to register from")
            log_model(self._run_dir, self._uri, about["run_id"], self._register)
        except Exception as error:  # `finish` raises it: a retry would hold up the end
            self._error = error

    def finish(self) -> None:
        """Report an error."""
        if self._error:
            raise self._error

    def abandon(self) -> str:
        """Leave a note on the pending registration."""
        if self._uri is None:
            return super().abandon()
        note_pending(self._run_dir, self._uri, registered_name=self._register)
        return (f"{self._register} is registered in the background. If it is not: "
                f"{sync_command(self._run_dir, self._uri)}")


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
    model_id = client.get_run(run_id).data.tags.get(_MODEL_TAG) or _log(client, run_dir, run_id)
    _register(client, name, run_id, model_id)
    return f"models:/{model_id}"


def _log(client: MlflowClient, run_dir: Path, run_id: str) -> str:
    """Create the model as an output of its run. Returns its id."""
    from mlflow.entities import LoggedModelOutput

    experiment_id = client.get_run(run_id).info.experiment_id
    best = run_dir / "weights" / "best.pt"
    state = read_state(best if best.exists() else best.with_name("last.pt"))
    with tempfile.TemporaryDirectory() as temporary:
        folder, weights = Path(temporary) / "model", Path(temporary) / "weights.pt"
        torch.save({"meta": state["meta"], "ema": state["ema"]}, weights)  # without the state that only training needs
        model = client.create_logged_model(experiment_id, name=run_dir.name, source_run_id=run_id)
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
