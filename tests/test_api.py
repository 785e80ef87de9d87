"""`YOLO` with trained weights: the commands' own calls, with their settings by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo import YOLO
from ray_yolo.errors import InputError
from tests.support.pictures import smooth_picture, write_image
from tests.support.weights import make_weights


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(tmp_path_factory.mktemp("weights"))


def test_predict_gives_what_was_found(weights: Path, tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", smooth_picture(48, 64))
    result = YOLO(str(weights)).predict(str(tmp_path / "a.png"), confidence=0.3, project=str(tmp_path), name="x")
    (found,) = result.predictions
    assert (result.folder, result.names, found.image) == (tmp_path / "x", ("dark", "bright"), "a.png")
    assert len(found.detections)
    assert (found.detections[:, 4] > 0.3).all()


def test_export_gives_a_checked_file(weights: Path) -> None:
    result = YOLO(str(weights)).export(format="torchscript", imgsz=96)
    assert result.path == weights.with_suffix(".torchscript")
    assert result.path.exists()
    assert result.metadata["imgsz"] == "[96, 96]"


def test_settings_of_the_commands_are_checked(weights: Path) -> None:
    with pytest.raises(InputError, match=r"^confidence=: got 2"):
        YOLO(str(weights)).predict("a.png", confidence=2)
    with pytest.raises(InputError, match="unknown setting 'opsets'; did you mean opset"):
        YOLO(str(weights)).export(opsets=3)


@pytest.mark.parametrize("call", ["val", "predict", "export"])
def test_a_model_without_weights_says_so(call: str) -> None:
    model = YOLO("yolov5n", nc=2)
    arguments = ["a.png"] if call == "predict" else []
    with pytest.raises(InputError, match=f"^{call}: this model has no weights yet"):
        getattr(model, call)(*arguments)
