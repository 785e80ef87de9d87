"""Registers the best weights of a finished run as an MLflow model, for `mlflow.pyfunc.load_model`.

Each training is a version of the registered name. The alias `best` moves to a version only if its fitness is higher on
the same validation set. Both are taken from the versions' MLflow runs.

The model is code, not a pickle: a copy of this package, a file that uses it, and the weights as plain tensors. It is
created only for a registered name; the weights are artifacts of the run in any case.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ray_yolo.checkpoints.state_file import read_state
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import EndEvent, Event, StartEvent
from ray_yolo.runs.event_log import last_of
from ray_yolo.sinks.base import Tell, ignore
from ray_yolo.sinks.metric_names import FITNESS
from ray_yolo.sinks.mlflow_client import build_client, read_run_file
from ray_yolo.sinks.mlflow_errors import explained
from ray_yolo.sinks.mlflow_plan import CONTEXT_TAG, VALIDATION

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

ALIAS = "best"

_MODEL_TAG, _EPOCH_TAG = "ray_yolo.model_id", "ray_yolo.epoch"
_CODE = Path(__file__).with_name("pyfunc_model.py")
_PACKAGE = Path(__file__).parents[1]
_NEEDED = ("mlflow", "numpy", "opencv-python-headless", "pandas", "pillow", "pydantic", "pyyaml", "torch",
           "torchvision")


class Registry:
    """The best weights of a completed training as a registered model.

    Args:
        tell: receives a line for the user: which version this is, and which one is the best.
    """

    name, uses_time = "model registry", True

    def __init__(self, folder: Path, uri: str | None, registered_name: str, tell: Tell = ignore) -> None:
        self._folder, self._uri, self._registered_name, self._tell = folder, uri, registered_name, tell
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
            registered = log_model(self._folder, self._uri, about["run_id"], self._registered_name)
        self._tell(registered.line)
        self._is_registered = True


class Registered(NamedTuple):
    """A model that has been registered."""

    uri: str
    """For `mlflow.pyfunc.load_model`."""
    line: str
    """For the user: the version, and which one the alias names."""


def log_model(run_dir: Path, uri: str, run_id: str, name: str) -> Registered:
    """Register the best (else the last) weights of a run folder as a model of its MLflow run, under a name.

    The model becomes a version in the server's registry, and the alias `best` moves to it if it is better. A second
    call does not add a second model or version.

    Raises:
        CheckpointError: if there are no weights.
        mlflow.exceptions.MlflowException: if the server cannot be reached or refuses.
    """
    client = build_client(uri)
    model_id = client.get_run(run_id).data.tags.get(_MODEL_TAG) or _create_model(client, run_dir, run_id)
    version = _version_of(client, name, run_id, model_id)
    return Registered(f"models:/{model_id}", f"model        models:/{name}/{version.version} ({version.description}); "
                                             f"{_move_alias(client, name, version)}")


def _create_model(client: MlflowClient, run_dir: Path, run_id: str) -> str:
    """Create the model as an output of its run, named after the run and the epoch of its weights. Returns its id."""
    from mlflow.entities import LoggedModelOutput

    experiment_id = client.get_run(run_id).info.experiment_id
    best = run_dir / "weights" / "best.pt"
    state = read_state(best if best.exists() else best.with_name("last.pt"))
    meta = json.loads(state["meta"])
    epoch = meta["best_epoch"] + 1 if best.exists() else max(meta["progress"][0], 1)  # counted from 1
    with tempfile.TemporaryDirectory() as temporary:
        folder, weights = Path(temporary) / "model", Path(temporary) / "weights.pt"
        torch.save({"meta": state["meta"], "ema": state["ema"]}, weights)  # without the state that only training needs
        model = client.create_logged_model(experiment_id, name=f"{run_dir.resolve().name}-epoch{epoch}",
                                           source_run_id=run_id, tags={_EPOCH_TAG: str(epoch)})
        _save(folder, weights, run_id=run_id, model_id=model.model_id)
        client.log_model_artifacts(model.model_id, str(folder))
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=epoch)])
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


def _version_of(client: MlflowClient, name: str, run_id: str, model_id: str) -> ModelVersion:
    """The version of a registered name that has this model; it is created if there is none."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    model = client.get_logged_model(model_id)
    # The location, not models:/ID: a database store looks that up on the default server of this process.
    source = model.artifact_location
    versions = [version for version in client.search_model_versions(f"name = '{name}'") if version.source == source]
    if versions:
        return versions[0]
    epoch = model.tags.get(_EPOCH_TAG)  # earlier versions of this package have not noted it
    return client.create_model_version(name, source, run_id, model_id=model_id, description=(
        f"{client.get_run(run_id).info.run_name}" + (f", weights of epoch {epoch}" if epoch else "")))


class _Measured(NamedTuple):
    """The best fitness of a training, and the digest of its validation set; None: unknown, or several."""

    fitness: float | None
    digest: str | None


def _measured(client: MlflowClient, run_id: str) -> _Measured:
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return _Measured(None, None)  # it was removed for good
    digests = [each.dataset.digest for each in (run.inputs.dataset_inputs if run.inputs else ()) for tag in each.tags
               if tag.key == CONTEXT_TAG and VALIDATION in tag.value.split(", ")]
    return _Measured(run.data.metrics.get(FITNESS), digests[0] if len(digests) == 1 else None)


def _move_alias(client: MlflowClient, name: str, version: ModelVersion) -> str:
    """Move the alias to a version if no other one is as good. Returns what it names, in words."""
    number = client.get_registered_model(name).aliases.get(ALIAS)
    if number is None:
        client.set_registered_model_alias(name, ALIAS, version.version)
        return f"it is the first with the alias {ALIAS}"
    if str(number) == str(version.version):
        return f"it has the alias {ALIAS}"
    other = client.get_model_version(name, number)
    new, old = _measured(client, version.run_id), _measured(client, other.run_id)
    stays = f"{ALIAS} stays version {number}"
    if new.fitness is None or old.fitness is None:
        return f"{stays}, because the fitness of one of the two is not known"
    if new.digest != old.digest or new.digest is None:
        return f"{stays}, because the two were not validated on the same data"
    if new.fitness <= old.fitness:
        return f"{stays}, because its fitness is {old.fitness:.5g}, and this one's {new.fitness:.5g}"
    client.set_registered_model_alias(name, ALIAS, version.version)
    return f"{ALIAS} moves here from version {number}: fitness {new.fitness:.5g}, before {old.fitness:.5g}"
