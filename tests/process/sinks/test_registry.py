"""A finished run's model in MLflow: loads in a process of its own, without pickle, and detects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag

from ray_yolo.checkpoints.state_file import read_state
from ray_yolo.config.commands import DetectConfig
from ray_yolo.core.errors import CheckpointError
from ray_yolo.data.images import read_image
from ray_yolo.inference.predictor import build_predictor, load_trained
from ray_yolo.sinks.registry import log_model
from tests.support.weights import make_weights

FRESH = """
import json, os, sys, warnings
import mlflow.pyfunc, numpy as np, pandas as pd
warnings.simplefilter("error", UserWarning)
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/shapes@best")
import ray_yolo
first, second = sys.argv[2:]
one = model.predict(pd.DataFrame({"image": [first]}))
pixels = np.load(second)
forms = [pd.DataFrame({"image": [first, first]}), {"image": [first, first]}, {"image": [pixels, pixels]},
         {"image": np.stack([pixels, pixels])}, {"image": [pixels.tolist(), pixels.tolist()]},
         {"image": [pixels, pixels[:40].copy()]}, [{"image": first}, {"image": first}]]
counts = [model.predict(form)["image"].value_counts().sort_index().tolist() for form in forms]
nothing = model.predict({"image": [np.zeros((20, 20, 3), np.uint8)] })
print(json.dumps({"package": ray_yolo.__file__, "ray": "ray" in sys.modules, "rows": one.values.tolist(),
                  "columns": list(one.columns), "counts": counts, "types": [str(t) for t in nothing.dtypes],
                  "schema": model.metadata.signature.to_dict()}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("registry")


@pytest.fixture(scope="module")
def weights(folder: Path) -> Path:
    return make_weights(folder)


@pytest.fixture(scope="module")
def uri(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


@pytest.fixture(scope="module")
def client(uri: str) -> MlflowClient:
    return MlflowClient(tracking_uri=uri)


@pytest.fixture(scope="module")
def run_id(client: MlflowClient, folder: Path) -> str:
    experiment = client.create_experiment("train", artifact_location=(folder / "artifacts").as_uri())
    return str(client.create_run(experiment).info.run_id)


@pytest.fixture(scope="module")
def model_uri(weights: Path, uri: str, run_id: str) -> str:
    return log_model(weights.parents[1], uri, run_id, "shapes").uri


@pytest.fixture(scope="module")
def fresh(model_uri: str, uri: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process that knows nothing of the run gets from the registered model."""
    picture = folder / "val" / "000.png"
    np.save(folder / "pixels.npy", read_image(str(picture)))
    place = tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run([sys.executable, "-c", FRESH, uri, str(picture),
                           str(folder / "pixels.npy")], cwd=place, capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def files(folder: Path) -> list[Path]:
    return [path for path in (folder / "artifacts").rglob("*") if path.is_file()]


def test_the_model_is_code_and_tensors(model_uri: str, folder: Path) -> None:
    names = {path.name for path in files(folder)}
    assert {"MLmodel", "pyfunc_model.py", "weights.pt", "input_example.json", "requirements.txt"} <= names
    assert {path.suffix for path in files(folder)} <= {".py", ".typed", ".pt", ".json", ".txt", ".yaml", ""}
    assert not [path for path in files(folder) if path.suffix in (".pkl", ".pyc")]
    (path,) = (path for path in files(folder) if path.name == "weights.pt")
    assert torch.load(path, weights_only=True).keys() == {"meta", "ema"}


def test_a_fresh_process_detects_what_we_detect(fresh: dict[str, Any], weights: Path, folder: Path) -> None:
    detect = build_predictor(load_trained(weights), DetectConfig())
    expected = detect(read_image(str(folder / "val" / "000.png"))).tolist()
    assert len(expected) > 5
    assert fresh["columns"] == ["image", "x1", "y1", "x2", "y2", "score", "class", "name"]
    for row, found in zip(fresh["rows"], expected, strict=True):
        assert row[1:6] == pytest.approx(found[:5], abs=1e-3)
        assert (row[0], row[6], row[7]) == (0, found[5], ("dark", "bright")[int(found[5])])


def test_paths_and_pixels_come_in_many_forms(fresh: dict[str, Any]) -> None:
    each = len(fresh["rows"])
    counts = fresh["counts"]
    assert counts[:5] == [[each, each]] * 5
    assert counts[5][0] == each
    assert len(counts[5]) == 2
    assert counts[6] == [each, each]


def test_the_signature_holds_for_the_output(fresh: dict[str, Any]) -> None:
    numbers = ["float64"] * 5
    assert fresh["types"] == ["int64", *numbers, "int64", "object"]
    outputs = json.loads(fresh["schema"]["outputs"])
    assert [(column["name"], column["type"]) for column in outputs] == [
        ("image", "long"), *[(name, "double") for name in ("x1", "y1", "x2", "y2", "score")], ("class", "long"),
        ("name", "string")]


def test_the_models_own_code_is_used_and_needs_no_ray(fresh: dict[str, Any], folder: Path) -> None:
    assert Path(fresh["package"]).is_relative_to(folder / "artifacts")
    assert not fresh["ray"]


def test_a_second_call_adds_nothing(
        model_uri: str, weights: Path, uri: str, run_id: str, client: MlflowClient, folder: Path) -> None:
    before = len(files(folder))
    assert log_model(weights.parents[1], uri, run_id, "shapes").uri == model_uri
    assert len(files(folder)) == before
    (only,) = client.search_model_versions("name = 'shapes'")
    assert only.run_id == run_id
    assert client.get_model_version_by_alias("shapes", "best").version == only.version


def test_the_model_belongs_to_its_run(model_uri: str, run_id: str, client: MlflowClient) -> None:
    run = client.get_run(run_id)
    assert [f"models:/{model.model_id}" for model in run.outputs.model_outputs] == [model_uri]
    assert client.get_logged_model(model_uri.removeprefix("models:/")).status == "READY"
    assert run.info.status == "RUNNING"  # as it was


def trained(client: MlflowClient, folder: Path, fitness: float | None, digest: str) -> str:
    """An MLflow run with a best fitness, measured on the validation set with this digest."""
    experiment = client.get_experiment_by_name("train")
    run_id = str(client.create_run(experiment.experiment_id, run_name="other").info.run_id)
    if fitness is not None:
        client.log_metric(run_id, "metrics/fitness", fitness)
    for context, each in (("training", "t"), ("validation", digest)):
        client.log_inputs(run_id, [DatasetInput(Dataset("data", each, "local", "{}"),
                                                [InputTag("mlflow.data.context", context)])])
    return run_id


def test_the_alias_moves_to_a_higher_fitness_on_the_same_data_only(
        weights: Path, uri: str, client: MlflowClient, folder: Path, model_uri: str) -> None:
    for fitness, digest, best, why in [
        (0.00055, "v", 1, "first with the alias best"), (0.0, "v", 1, "best stays version 1, because its fitness is"),
        (0.00055, "v", 1, "best stays version 1"), (0.9, "w", 1, "not validated on the same data"),
        (None, "v", 1, "not known"), (0.5, "v", 6, "moves here from version 1: fitness 0.5, before 0.00055"),
        (0.4, "v", 6, "best stays version 6"),
    ]:
        run_id = trained(client, folder, fitness, digest)
        registered = log_model(weights.parents[1], uri, run_id, "birds")
        assert why in registered.line, registered.line
        assert int(client.get_model_version_by_alias("birds", "best").version) == best
    assert "best stays version 6" in log_model(weights.parents[1], uri, run_id, "birds").line  # a second call
    assert len(client.search_model_versions("name = 'birds'")) == 7


def test_the_version_and_its_source_name_the_epoch_of_the_weights(
        weights: Path, uri: str, client: MlflowClient, folder: Path, model_uri: str) -> None:
    run_id = trained(client, folder, 0.5, "v")
    registered = log_model(weights.parents[1], uri, run_id, "fish")
    epoch = json.loads(read_state(weights)["meta"])["best_epoch"] + 1
    model_id = registered.uri.removeprefix("models:/")
    assert client.get_logged_model(model_id).name.endswith(f"-epoch{epoch}")
    [output] = client.get_run(run_id).outputs.model_outputs
    assert (output.model_id, output.step) == (model_id, epoch)
    assert f"weights of epoch {epoch}" in registered.line
    [version] = client.search_model_versions("name = 'fish'")
    assert version.description == f"other, weights of epoch {epoch}"


def test_a_run_without_weights_is_refused(uri: str, run_id: str, client: MlflowClient, tmp_path: Path) -> None:
    other = client.create_run(client.get_run(run_id).info.experiment_id).info.run_id
    with pytest.raises(CheckpointError, match="no such weights"):
        log_model(tmp_path, uri, other, "shapes")
