"""Released files yield their tensors and names; no other content of them is run."""

from __future__ import annotations

import copy
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_yolo.checkpoints.foreign import StubClass, read_weights
from ray_yolo.checkpoints.state_file import read_state, verify_manifest
from ray_yolo.core.errors import CheckpointError
from ray_yolo.core.versioned import FORMAT
from ray_yolo.inference.predictor import load_trained
from ray_yolo.models.detector import Detector
from ray_yolo.models.families import build_model
from tests.support.messages.weights import DEEDS, Canary, rewrite, write_activated
from tests.support.released import ULTRALYTICS, YOLOV5, write_released
from tests.support.weights import make_weights


@pytest.fixture(scope="module")
def detector() -> Detector:
    torch.manual_seed(0)
    model = build_model("yolov5n", 3)
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 2)
    model.head.anchors.mul_(1.5)  # not the table's
    return model.eval()


def rounded(detector: nn.Module) -> dict[str, Tensor]:
    """Its tensors after a way through half precision."""
    return copy.deepcopy(detector).half().float().state_dict()


def assert_equal(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in other)


def test_a_released_file_is_a_model_whose_forward_is_that_of_its_tensors(detector: Detector, tmp_path: Path) -> None:
    trained = load_trained(write_released(tmp_path / "yolov5n.pt", detector, ["a", "b", "c"]))
    expected, image = copy.deepcopy(detector).half().float(), torch.rand(1, 3, 64, 64)
    assert (trained.recipe.model, trained.names) == ("yolov5n", ("a", "b", "c"))
    assert torch.equal(trained.model.head.anchors, expected.head.anchors)
    with torch.no_grad():
        assert all(map(torch.equal, trained.model(image), expected(image)))


def test_names_that_do_not_fit_the_head_are_left_out(detector: Detector, tmp_path: Path) -> None:
    trained = load_trained(write_released(tmp_path / "x.pt", detector, ["a", "b"]))
    assert trained.names == ("class0", "class1", "class2")
    assert read_weights(write_released(tmp_path / "y.pt", detector, [1, 2, 3])).names == ("1", "2", "3")


def test_the_average_counts_where_a_file_has_both(detector: Detector, tmp_path: Path) -> None:
    path = write_released(tmp_path / "last.pt", detector, ["a"], ema={"w": torch.ones(2)})
    assert_equal(read_weights(path).tensors, {"w": torch.ones(2)})


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", None])
def test_state_dicts_are_taken_plain_or_under_their_usual_keys(tmp_path: Path, key: str | None) -> None:
    state = {"module.a": torch.ones(2).half(), "b": torch.tensor(3), "epoch": 4}
    torch.save({key: state, "epoch": 4} if key else state, tmp_path / "x.pt")
    assert_equal(read_weights(tmp_path / "x.pt").tensors, {"a": torch.ones(2), "b": torch.tensor(3)})


def test_our_own_checkpoints_have_their_meta(tmp_path: Path) -> None:
    weights = read_weights(make_weights(tmp_path))
    assert weights.meta is not None
    assert weights.names == tuple(weights.meta["names"]) == ("dark", "bright")


def test_weights_of_a_later_version_infer_as_before(tmp_path: Path) -> None:
    path = make_weights(tmp_path)
    before = load_trained(path)
    loss = json.loads(read_state(path)["meta"])["recipe"]["loss"]
    novel = {"novel": "x", "loss": loss | {"novel": 1.0}, "optimizer": {"name": "Novel"}}
    rewrite(path, recipe=novel, format=FORMAT + 1)
    after = load_trained(path)
    assert verify_manifest(path, path.with_suffix(".json")) is None
    assert (after.imgsz, after.names, after.recipe.loss) == (before.imgsz, before.names, before.recipe.loss)
    others = after.model.state_dict()
    assert all(torch.equal(value, others[name]) for name, value in before.model.state_dict().items())


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Identity])
def test_a_model_with_the_usual_activation_is_read(tmp_path: Path, activation: type[nn.Module]) -> None:
    write_activated(tmp_path / "x.pt", activation)
    assert read_weights(tmp_path / "x.pt").names == ("a", "b")


@pytest.mark.parametrize(("settings", "size"), [
    ({"train_args": {"imgsz": 1280}}, 1280), ({"train_args": {"imgsz": [480, 640]}}, 640),
    ({"opt": {"imgsz": 320}}, 320), ({"opt": {}}, None), ({"train_args": {"imgsz": "640"}}, None),
    ({"train_args": {"imgsz": True}}, None), ({}, None)])
def test_the_size_of_a_training_is_that_of_its_settings(
        tmp_path: Path, settings: dict[str, Any], size: int | None) -> None:
    torch.save({"model": {"a": torch.ones(2)}, **settings}, tmp_path / "x.pt")
    assert read_weights(tmp_path / "x.pt").imgsz == size


@pytest.mark.parametrize(("entries", "licence"), [
    ({"license": "AGPL-3.0 License (https://ultralytics.com/license)"},
     "AGPL-3.0 License (https://ultralytics.com/license)"),
    ({"license": "MIT\n\x1b[2J"}, "MIT\\n\\x1b[2J"), ({"license": "x" * 300}, "x" * 200),
    ({"license": 7}, ""), ({}, "")])
def test_the_licence_of_a_file_is_what_it_states(tmp_path: Path, entries: dict[str, Any], licence: str) -> None:
    torch.save({"model": {"a": torch.ones(2)}, **entries}, tmp_path / "x.pt")
    assert read_weights(tmp_path / "x.pt").licence == licence


def test_safetensors_are_read(detector: Detector, tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    torch_files.save_file(detector.state_dict(), tmp_path / "x.safetensors")
    assert_equal(read_weights(tmp_path / "x.safetensors").tensors, detector.state_dict())
    (tmp_path / "y.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError):
        read_weights(tmp_path / "y.safetensors")


@pytest.mark.parametrize("named", DEEDS)
def test_a_file_that_would_do_something_is_refused_and_does_nothing(
        detector: Detector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_released(Path("x.pt"), detector, ["a"], git=Canary(*DEEDS[named]))
    with pytest.raises(CheckpointError):
        read_weights(Path("x.pt"))
    assert os.listdir() == ["x.pt"]


def test_code_of_models_is_not_run_either(
        detector: Detector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sung = Canary(getattr, (Path("sung"), "touch"))
    path = write_released(Path("x.pt"), detector, ["a"], git=sung, opt=Canary(nn.Linear, (1 << 40, 1 << 40)))
    assert_equal(read_weights(path).tensors, rounded(detector))
    assert os.listdir() == ["x.pt"]


def test_stub_classes_do_nothing() -> None:
    one = StubClass("touch", "sung", anything=1)
    one.__setstate__((None, {"__class__": Path}))
    assert (type(one), one.attributes, one.part("_modules")) == (StubClass, {}, {})
    assert not hasattr(one, "__dict__")
    assert not callable(one)


def test_plain_tensors_in_the_format_of_before_torch_1_6_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "plain.pt", _use_new_zipfile_serialization=False)
    assert read_weights(tmp_path / "plain.pt").tensors["a"].tolist() == [1, 1]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_file_that_must_not_be_read_is_refused(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"mine.{suffix}"
    path.write_bytes(b"x")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError):
        read_weights(path)


def test_a_file_is_read_without_the_code_that_wrote_it(detector: Detector, tmp_path: Path) -> None:
    write_released(tmp_path / "x.pt", detector, ["a"])
    for dotted in (*YOLOV5.values(), *ULTRALYTICS.values()):
        with pytest.raises(ImportError):
            __import__(dotted.rpartition(".")[0])
