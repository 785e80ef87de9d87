"""The real commands with `--json`: stdout is one document, whatever is printed on the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import pytest

from ray_yolo.core.documents import (
    ChecksDocument,
    CompareDocument,
    Document,
    PredictDocument,
    StatusDocument,
    TrainDocument,
    ValDocument,
    VerifyDocument,
)

Answer = TypeVar("Answer", bound=Document)
TRAIN = ["--data", "shapes8", "--model", "yolov5n", "--imgsz", "64", "--epochs", "1", "--seed", "3", "--noplots",
         "--mlflow-uri", "off"]


def ask(kind: type[Answer], folder: Path, *words: str) -> Answer:
    """The document of a command that runs in a folder."""
    done = subprocess.run([sys.executable, "-m", f"ray_yolo.{words[0]}", *words[1:], "--json"], cwd=folder,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return kind.model_validate_json(done.stdout, strict=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("answers")


@pytest.fixture(scope="module")
def trained(folder: Path) -> TrainDocument:
    return ask(TrainDocument, folder, "train", *TRAIN, "--num-workers", "0")


def test_a_training_answers_with_its_result(trained: TrainDocument) -> None:
    assert (trained.state, trained.epochs, trained.best_epoch) == ("finished", 1, 1)
    assert Path(trained.best).is_file()
    assert set(trained.metrics) == {"precision", "recall", "mAP50", "mAP50-95"}


def test_a_validation_answers_with_the_numbers_of_the_training(folder: Path, trained: TrainDocument) -> None:
    answer = ask(ValDocument, folder, "val", "--weights", trained.best, "--data", "shapes8", "--imgsz", "64",
                 "--mlflow-uri", "off", "--noplots")
    assert [row.name for row in answer.per_class] == ["circle", "square", "triangle"]
    assert answer.metrics == pytest.approx(trained.metrics, abs=1e-3)


def test_a_prediction_answers_with_counts(folder: Path, trained: TrainDocument) -> None:
    (folder / "pictures").mkdir()
    (folder / "pictures" / "bad.jpg").write_bytes(b"no picture")
    good = Path.home() / ".cache/ray_yolo/shapes8-v2/images/val"
    for path in sorted(good.glob("*.jpg"))[:2]:
        (folder / "pictures" / path.name).write_bytes(path.read_bytes())
    answer = ask(PredictDocument, folder, "predict", "--weights", trained.best, "--source", "pictures", "--conf",
                 "0.001", "--nosave")
    assert (answer.pictures, list(answer.left_out)) == (2, ["bad.jpg"])
    assert answer.detections == sum(answer.per_class.values()) > 0


def test_the_files_of_a_training_answer_that_they_are_whole(folder: Path, trained: TrainDocument) -> None:
    verified = ask(VerifyDocument, folder, "verify", trained.run, trained.run)
    assert verified.equal is True
    assert [part.problem for part in verified.checks if part.problem] == []
    assert ask(StatusDocument, folder, "status", trained.run).best == pytest.approx(trained.metrics["mAP50-95"])


def test_a_data_set_answers_with_its_splits(folder: Path) -> None:
    answer = ask(ChecksDocument, folder, "checks", "--data", "shapes8")
    assert answer.names == ("circle", "square", "triangle")
    assert answer.splits is not None
    assert (answer.problems, answer.splits["train"].images) == ((), 8)


def test_a_comparison_answers_with_its_claim(folder: Path) -> None:
    answer = ask(CompareDocument, folder, "compare", "base", "lr0=0.02", *TRAIN, "--pairs", "4",
                 "--workers-per-training", "0")
    assert (answer.pairs, answer.metrics[0].name) == (4, "fitness")
    assert {row.pairs for row in answer.metrics} == {4}
