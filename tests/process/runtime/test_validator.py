"""Validation: what it says of the data, what it refuses, what the weights decide, and the numbers of COCO's own files.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from mlflow import MlflowClient
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ray_yolo.config.commands import ValConfig
from ray_yolo.config.settings import config_fields
from ray_yolo.core.errors import CheckpointError, DatasetError, InputError
from ray_yolo.core.events import EpochEvent
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.index import read_index
from ray_yolo.engine.evaluate import Evaluation, twelve_numbers
from ray_yolo.inference.output import coco_ids, coco_results
from ray_yolo.labels.description import describe
from ray_yolo.labels.label_files import LabelSources
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.runtime import cluster
from ray_yolo.runtime.trainer import fit
from ray_yolo.runtime.validator import ValResult, check, validate
from ray_yolo.sinks.metric_names import FITNESS, metrics, terms_of
from tests.support import run_log
from tests.support.jobs import make_config, make_dataset
from tests.support.label_cases import place
from tests.support.pictures import smooth_picture, write_image
from tests.support.servers import BrokenServer
from tests.support.weights import make_weights

HEIGHT, WIDTH = 300, 400


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "user-cache"))


def coco_file(root: Path, seed: int) -> Path:
    """Six pictures with crowds, and with areas far below those of the boxes. Returns the annotation file."""
    rng = np.random.default_rng(seed)
    images, rows = [], []
    for number in range(6):
        write_image(root / "images" / f"{number}.png", smooth_picture(HEIGHT, WIDTH, number))
        images.append({"id": 10 * number, "file_name": f"{number}.png", "height": HEIGHT, "width": WIDTH})
        for _ in range(rng.integers(2, 7)):
            width, height = np.exp(rng.normal(4.2, 0.7, 2)).clip(8, 250).round(2).tolist()
            x, y = rng.uniform(0, WIDTH - width), rng.uniform(0, HEIGHT - height)
            rows.append({"id": len(rows) + 1, "image_id": 10 * number, "category_id": int(rng.choice([3, 7])),
                         "bbox": [round(x, 2), round(y, 2), width, height], "iscrowd": int(rng.random() < 0.25),
                         "area": round(width * height * float(rng.uniform(0.1, 1.0)), 4)})
    file = root / "instances_val.json"
    file.write_text(json.dumps({"info": {}, "images": images, "annotations": rows, "categories": [
        {"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}]}))
    return file


def detections(index: AnnotationIndex, seed: int) -> np.ndarray:
    """Rows as `Evaluation` has them: boxes near labels and inside of crowds, and some anywhere."""
    rng = np.random.default_rng(seed)
    rows = []
    for image in range(len(index)):
        crowds = index.crowds[index.crowds[:, 0] == image]
        for kind, box in (*zip(index[image].classes, index[image].boxes, strict=True),
                          *((row[1], row[2:6]) for row in crowds for _ in range(3))):
            sides = np.tile(box[2:] - box[:2], 2)
            near = box + rng.normal(0, 0.06, 4) * sides
            rows.append([image, *near, rng.random(), kind, 0])
        rows.append([image, 20, 20, 20 + 60 * rng.random(), 80, rng.random(), 0, 0])
    return np.array(rows, np.float32).astype(np.float64)


def reference(file: Path, index: AnnotationIndex, found: np.ndarray) -> list[float]:
    """pycocotools on the file itself."""
    guessed = [{"image_id": 10 * int(Path(index.paths[int(row[0])]).stem), "category_id": (3, 7)[int(row[6])],
                "bbox": [row[1], row[2], row[3] - row[1], row[4] - row[2]], "score": row[5]} for row in found.tolist()]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints
        known: Any = COCO(str(file))
        evaluation: Any = COCOeval(known, known.loadRes(guessed), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return cast(list[float], evaluation.stats[:12].tolist())


@pytest.mark.parametrize("seed", range(5))
def test_a_coco_file_with_crowds_and_areas_scores_as_pycocotools_has_it(tmp_path: Path, seed: int) -> None:
    file = coco_file(tmp_path, seed)
    description = describe({"val": "instances_val.json", "names": ["cat", "dog"]}, tmp_path / "data.yaml")
    for _ in range(2):  # from the file, and from the kept copy
        index = read_index(description, "val")
        found = detections(index, seed)
        numbers = twelve_numbers(cast(Evaluation, SimpleNamespace(detections=found)), index)
        assert list(numbers.values()) == pytest.approx(reference(file, index, found), abs=1e-9)
    assert len(index.crowds) > 2
    assert (numbers["ap_medium"], numbers["ap_large"]) != (-1, -1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short training, its data set in data/."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_YOLO_CACHE", str(folder / "user-cache"))
        fit(make_config(folder, 0, epochs=1), quiet=True)
    return folder


def settings(trained: Path, folder: Path, **changes: Any) -> ValConfig:
    return ValConfig.model_validate({
        "weights": str(trained / "runs" / "train" / "exp" / "weights" / "last.pt"),
        "placement": {"storage_path": str(folder), "gpus_per_worker": 0}, **changes})


def test_validation_tells_what_the_split_holds_and_what_was_left_out(
        trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.yaml"
    data.write_text(f"path: {trained / 'data'}\nval: images/val\nnames: [dark, dark]\ndownload: bash get.sh\n")
    result = validate(settings(trained, tmp_path, data=str(data), allow_names=True))
    messages = capsys.readouterr().out.splitlines()
    assert messages[1].split()[:3] == ["val", "11", str(sum(row["labels"] for row in result.per_class))]
    assert any(line.startswith(f"labels of val: looked for in {trained}/data/labels/val/*.txt") for line in messages)
    (warning,) = [line for line in messages if line.startswith("WARNING: ")]
    assert "found 3 things and left 0 out" in warning
    findings = (result.folder / "findings.txt").read_text()
    assert "download: contains code, which is never run" in findings
    assert "'dark' is the name of 2 classes" in findings
    assert "data/data.yaml: names class 1 'bright', but " in findings  # of the set itself


def test_a_split_without_a_box_is_validated_only_where_that_is_meant(trained: Path, tmp_path: Path) -> None:
    images = trained / "data" / "images" / "val"
    (tmp_path / "bare").symlink_to(images)
    data = tmp_path / "data.yaml"
    data.write_text("val: bare\nnames: [dark, bright]\n")
    with pytest.raises(DatasetError, match=rf"none of its 11 images has a box; looked for labels in {tmp_path}/bare/"):
        validate(settings(trained, tmp_path, data=str(data)))
    assert not (tmp_path / "runs").exists()
    assert validate(settings(trained, tmp_path, data=str(data), allow_empty=True), quiet=True).metrics["mAP50"] == 0


def test_labels_are_read_as_in_training_or_as_the_validation_asks(trained: Path, tmp_path: Path) -> None:
    """Rows with a confidence are left out unless one of the two accepts them."""
    shutil.copytree(trained / "data" / "images" / "val", tmp_path / "images")
    for file in (trained / "data" / "labels" / "val").iterdir():
        rows = [f"{line} 0.9" for line in file.read_text().splitlines()]
        place(tmp_path / "labels" / file.name, "\n".join(rows).encode())
    data = place(tmp_path / "data.yaml", b"val: images\nnames: [dark, bright]\n")
    asked = settings(trained, tmp_path, data=str(data))
    with pytest.raises(DatasetError, match="none of its images can be used"):
        check(asked)
    accepted = check(asked.model_copy(update={"labels_with_confidence": True})).labels
    trained_so = make_weights(tmp_path / "run", labels_with_confidence=True)
    assert check(asked.model_copy(update={"weights": str(trained_so)})).labels.digest == accepted.digest
    assert not accepted.findings


def found_in(folder: Path, **settings: Any) -> ValResult:
    """A validation of `folder`/run/weights/best.pt on the data set in `folder`."""
    return validate(ValConfig.model_validate({
        "weights": str(folder / "run" / "weights" / "best.pt"), "data": str(folder / "data" / "data.yaml"),
        "evaluate": {"batch_size": 2}, **settings,
        "placement": {"project": str(folder / "val"), **settings.get("placement", {})}}), quiet=True)


def test_validation_writes_the_pictures_of_training_and_the_requested_files(
        trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = validate(settings(trained, tmp_path, save_txt=True, save_conf=True, save_json=True))
    written = {path.name for path in result.folder.iterdir()}
    assert written == {"results.json", "detections.json", "labels", "PR_curve.png", "F1_curve.png", "P_curve.png",
                       "R_curve.png", "confusion_matrix.png", "confusion_matrix_normalized.png", "val_batch0_pred.jpg",
                       "val_batch1_pred.jpg"}
    assert result.speed.keys() == {"preprocess", "inference", "postprocess"}
    assert min(result.speed.values()) > 0
    assert re.search(r"^ms per image: preprocess \d+\.\d\d, inference ", capsys.readouterr().out, re.MULTILINE)
    rows = json.loads((result.folder / "detections.json").read_text())
    assert {row["image_id"] for row in rows} <= set(range(11))
    texts = {int(path.stem): path.read_text().splitlines() for path in (result.folder / "labels").iterdir()}
    assert sum(map(len, texts.values())) == len(rows)
    for row in rows[:20]:
        x, y, width, height = row["bbox"]
        shares = (x + width / 2) / 64, (y + height / 2) / 48, width / 64, height / 48
        lines = [list(map(float, line.split())) for line in texts[row["image_id"]]]
        assert any(np.allclose(line, [row["category_id"], *shares, row["score"]], atol=1e-4) for line in lines)


def test_the_worst_images_and_the_doubtful_labels_are_listed_and_drawn(tmp_path: Path) -> None:
    make_weights(tmp_path)
    make_dataset(tmp_path / "data")
    [image, *_] = (tmp_path / "data" / "images" / "val").iterdir()
    before = found_in(tmp_path, worst=4)
    rows = list(csv.DictReader((before.folder / "worst.csv").read_text().splitlines()))
    images = [row for row in rows if row["kind"] == "image"]
    assert len(images) == 4
    values = [float(row["value"]) for row in images]
    assert values == sorted(values, reverse=True)
    for row in images:
        parts = [float(row[f"{term}_loss"]) for term in ("box", "obj", "cls")]
        assert sum(parts) == pytest.approx(float(row["value"]), rel=1e-3)
    labels = [row for row in rows if row["kind"] != "image"]
    assert 0 < len(labels) <= 4
    assert {row["kind"] for row in labels} <= {"missing label", "denied label", "wrong class"}
    assert all(Path(row["file"]).parent == image.parent for row in rows)
    assert {path.name for path in before.folder.glob("worst*")} == {"worst.csv", "worst_images0.jpg",
                                                                  "worst_labels0.jpg"}
    everything = found_in(tmp_path, worst=99, placement={"noplots": True})
    assert {path.name for path in everything.folder.iterdir()} == {"results.json", "worst.csv"}
    table = list(csv.DictReader((everything.folder / "worst.csv").read_text().splitlines()))
    losses = [float(row["value"]) for row in table if row["kind"] == "image"]
    assert len(losses) == 11
    assert sum(losses) / 11 == pytest.approx(sum(everything.losses.values()), rel=1e-3)
    assert everything.losses == before.losses
    assert not list(found_in(tmp_path).folder.glob("worst*"))


def test_results_for_coco_have_the_ids_of_the_file(tmp_path: Path) -> None:
    file = coco_file(tmp_path, 0)
    description = describe({"val": "instances_val.json", "names": ["cat", "dog"]}, tmp_path / "data.yaml")
    index = read_index(description, "val")
    found = detections(index, 0)
    ids = coco_ids(index, LabelSources(description, "val"))
    with contextlib.redirect_stdout(io.StringIO()):
        known: Any = COCO(str(file))
        evaluation: Any = COCOeval(known, known.loadRes(coco_results(found, ids)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    assert evaluation.stats[:12].tolist() == pytest.approx(reference(file, index, found), abs=2e-3)
    assert evaluation.stats[0] > 0.2


def test_an_annotation_with_the_id_0_is_reported(trained: Path, tmp_path: Path) -> None:
    """pycocotools takes a detection of it for a false one, so its numbers are lower than with ids from 1."""
    file = coco_file(tmp_path, 0)
    description = describe({"val": "instances_val.json", "names": ["cat", "dog"]}, tmp_path / "data.yaml")
    index = read_index(description, "val")
    found = detections(index, 0)
    from_1 = reference(file, index, found)
    content = json.loads(file.read_text())
    content["annotations"] = [{**row, "id": row["id"] - 1} for row in content["annotations"]]
    file.write_text(json.dumps(content))
    assert reference(file, index, found)[0] < from_1[0] - 0.01
    data = tmp_path / "data.yaml"
    data.write_text("train: instances_val.json\nval: instances_val.json\nnames: [dark, bright]\n")
    for name in ("dark", "bright"):
        file.write_text(file.read_text().replace({"dark": '"cat"', "bright": '"dog"'}[name], f'"{name}"'))
    notes = [check(settings(trained, tmp_path, data=str(data), **more)).note
             for more in ({}, {"coco": True}, {"save_json": True})]
    assert notes[0] == ""
    assert all("instances_val.json has an annotation with the id 0: here it counts" in note for note in notes[1:])


def test_classes_that_are_left_out_count_for_nothing(trained: Path, tmp_path: Path) -> None:
    everything = validate(settings(trained, tmp_path, placement={"storage_path": str(tmp_path), "noplots": True}),
                          quiet=True)
    one = validate(settings(trained, tmp_path, classes=1, save_json=True), quiet=True)
    assert [row["name"] for row in one.per_class] == ["bright"]
    assert one.per_class[0]["mAP50"] == one.metrics["mAP50"] == everything.per_class[1]["mAP50"]
    assert {row["category_id"] for row in json.loads((one.folder / "detections.json").read_text())} == {1}
    assert {path.name for path in everything.folder.iterdir()} == {"results.json"}
    with pytest.raises(InputError, match=r"^classes: 2 is none"):
        validate(settings(trained, tmp_path, classes=2), quiet=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precision_left_out_is_that_of_the_training_as_help_says(tmp_path: Path, precision: str) -> None:
    make_weights(tmp_path, precision=precision)
    make_dataset(tmp_path / "data")
    found = {asked: found_in(tmp_path, precision=asked).losses for asked in ("auto", "fp32", "bf16")}
    assert found["auto"] == found[precision]
    assert found["fp32"] != found["bf16"]
    assert "auto: as in training" in str(config_fields(ValConfig)["precision"].info.description)


def test_validation_repeats_the_trainings_to_the_bit(tmp_path: Path) -> None:
    """Of 11 images: torch has another convolution for fewer than 16."""
    config = make_config(tmp_path, 0, epochs=1, noval=False, model="yolov5n", imgsz=160)
    trained = fit(config, quiet=True)
    [epoch] = run_log.only(EpochEvent, read_events(trained.run_dir / EVENTS_FILE))
    one_thread = {"storage_path": str(tmp_path), "gpus_per_worker": 0, "cpus_per_worker": 1}
    found = validate(settings(tmp_path, tmp_path, placement=one_thread), quiet=True)
    assert found.losses == epoch.val
    assert found.metrics == epoch.metrics


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_workers_error_is_reported_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights(tmp_path)
    make_dataset(tmp_path / "data")
    monkeypatch.setattr(cluster, "wait_for_room", lambda *_: weights.unlink())
    with pytest.raises(CheckpointError, match=r"^worker 0: .*best\.pt: no such weights file"):
        found_in(tmp_path, placement={"num_workers": 1, "gpus_per_worker": 0})


def test_a_validation_is_an_mlflow_run_on_request_with_the_names_of_a_trainings(
        trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = {"storage_path": str(tmp_path), "gpus_per_worker": 0, "noplots": True, "project": "runs/check"}
    run_dir, uri = trained / "runs" / "train" / "exp", f"sqlite:///{tmp_path}/mlflow.db"
    (run_dir / "mlflow.json").write_text(json.dumps({"run_id": "of-training", "experiment_id": "1", "uri": uri}))
    result = validate(settings(trained, tmp_path, placement=place | {"mlflow_uri": uri}))
    assert "mlflow run " in capsys.readouterr().out
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("check")
    [run] = client.search_runs([experiment.experiment_id])
    last = run_log.events_of(run_dir, EpochEvent)[-1]
    said = {metric.name: metric.of(last.model_copy(update=outcome)) for metric in metrics(terms_of([last]))
            for outcome in [{"metrics": result.metrics, "val": result.losses}]}
    assert {name: value for name, value in run.data.metrics.items() if not name.startswith("ms_per_image/")} == {
        name: value for name, value in said.items() if name.startswith(("metrics/", "val/")) and name != FITNESS}
    assert (run.info.run_name, run.info.status, run.data.params["split"]) == ("exp", "FINISHED", "val")
    assert run.data.tags["ray_yolo.training_run_id"] == "of-training"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["results.json"]


def test_a_server_that_is_away_is_a_warning_and_the_results_are_there(
        trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = {"storage_path": str(tmp_path), "gpus_per_worker": 0, "noplots": True}
    with BrokenServer() as server:
        result = validate(settings(trained, tmp_path, placement=place | {"mlflow_uri": server.uri}))
    assert "WARNING: not logged: MLflow at " in capsys.readouterr().out
    assert (result.folder / "results.json").exists()
    assert not (tmp_path / "mlflow.db").exists()
