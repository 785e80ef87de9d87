from __future__ import annotations

import numpy as np
import pytest
import torch

from ray_yolo.config.model_facts import MODELS
from ray_yolo.config.sections import LossConfig
from ray_yolo.core.errors import CheckpointError
from ray_yolo.models.detector import Detector
from ray_yolo.models.families import FAMILIES, GivenClasses, build_model, find_family, load_weights

SMALL = {
    "anchors": [[8, 8]],
    "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 3, 2]]],
    "head": [[-1, 1, "Detect", ["nc", "anchors"]]],
}


def small(seed: int, num_classes: int = 2, anchors: list[list[tuple[float, float]]] | None = None) -> Detector:
    torch.manual_seed(seed)
    return build_model(SMALL, num_classes, anchors)


def test_known_models() -> None:
    assert {name: facts.family for name, facts in MODELS.items()} == {
        name: key for key, family in FAMILIES.items() for name in family.models}


def test_facts_agree_with_the_model_that_is_built() -> None:
    for name in ("yolov5n", "yolov5n6", "yolov3-tiny", "yolov8n", "yolov5n6u", "yolo11n", "yolo26n"):
        with torch.device("meta"):
            assert build_model(name, 3).grid == MODELS[name].grid, name


@pytest.mark.parametrize(("name", "terms", "boxes_per_cell"), [
    ("yolov5n", ("box", "obj", "cls"), 3), ("yolov5nu", ("box", "cls", "dfl"), 1),
    ("yolov8n", ("box", "cls", "dfl"), 1), ("yolo11n", ("box", "cls", "dfl"), 1), ("yolo12n", ("box", "cls", "dfl"), 1),
    ("yolo26n", ("box", "cls", "l1"), 1)])
def test_a_family_trains_and_decodes_what_it_builds(name: str, terms: tuple[str, ...], boxes_per_cell: int) -> None:
    family, model = find_family(name), build_model(name, 3)
    levels = model(torch.rand(2, 3, 64, 64))
    loss = family.build_loss(model.head, LossConfig(), 3, 64)
    targets = torch.tensor([[0.0, 1, 8, 8, 40, 40], [1, 2, 20, 20, 50, 30]])
    assert loss.names == terms
    loss.terms(*loss.measure(levels, targets, (64, 64))).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    boxes, scores = family.decode(model.head, levels)
    assert boxes.shape == (2, boxes_per_cell * (64 + 16 + 4), 4)
    assert scores.shape == (2, boxes_per_cell * (64 + 16 + 4), 3)


def test_heads_without_anchors_are_fitted_to_nothing() -> None:
    sizes = np.random.default_rng(0).uniform(2, 6, (200, 2)).astype(np.float32)  # far below all anchors
    assert find_family("yolov5n").fit(build_model("yolov5n", 3).head, sizes, LossConfig(), 0) is not None
    assert find_family("yolov5nu").fit(build_model("yolov5nu", 3).head, sizes, LossConfig(), 0) is None


def test_a_yaml_mapping_has_a_family_too() -> None:
    assert find_family(SMALL) in FAMILIES.values()
    assert build_model(SMALL, 5).num_classes == 5


def test_given_anchors_reach_the_head() -> None:
    assert build_model(SMALL, 2, anchors=[[(4, 8), (8, 4)]]).head.anchors.tolist() == [[[1, 2], [2, 1]]]


@pytest.mark.parametrize("prefix", ["", "module."])
def test_weights_are_copied_by_name(prefix: str) -> None:
    source, model = small(1), small(2)
    report = load_weights(model, {prefix + name: tensor.half() for name, tensor in source.state_dict().items()})
    assert (report.matched, report.total, report.left_out) == (15, 15, ())
    for name, tensor in source.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor.half().to(tensor.dtype))


def test_tensors_of_another_shape_keep_their_initial_values() -> None:
    source, model = small(1, num_classes=4), small(2)
    before = model.state_dict()["model.2.m.0.weight"].clone()
    report = load_weights(model, source.state_dict())
    assert report.left_out == ("model.2.m.0.weight", "model.2.m.0.bias")
    assert report.matched == report.total - 2
    assert torch.equal(model.state_dict()["model.2.m.0.weight"], before)
    assert torch.equal(model.state_dict()["model.0.conv.weight"], source.state_dict()["model.0.conv.weight"])


def test_the_users_own_anchors_stay() -> None:
    source, model = small(1), small(2, anchors=[[(20, 24)]])
    assert load_weights(model, source.state_dict(), keep_anchors=True).left_out == ("model.2.anchors",)
    assert model.head.anchors.tolist() == [[[5, 6]]]
    load_weights(model, source.state_dict())
    assert model.head.anchors.tolist() == [[[2, 2]]]


@pytest.mark.parametrize("state", [{}, {"epoch": 3, "model": {"model.0.conv.weight": 1}}, {"a": torch.zeros(1)}])
def test_weights_of_something_else_are_refused(state: dict[str, object]) -> None:
    with pytest.raises(CheckpointError):
        load_weights(small(1), state)


def test_copied_weights_are_no_longer_those_of_the_source() -> None:
    source, model = small(1), small(2)
    load_weights(model, source.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert source.state_dict()["model.0.conv.weight"].abs().sum() > 0


@pytest.mark.parametrize("name", ["yolov5n", "yolov8n", "yolo26n"])
def test_rows_of_known_classes_are_copied_into_a_larger_or_smaller_class_layer(name: str) -> None:
    old = build_model(name, 2)
    state = {key: torch.randn_like(value) if value.is_floating_point() else value
             for key, value in old.state_dict().items()}
    for rows in ((1, None, 0), (None,)):
        model = build_model(name, len(rows))
        drawn = {key: value.clone() for key, value in model.state_dict().items()}
        transfer = load_weights(model, state, given=GivenClasses(rows, 2))
        assert transfer.left_out == ()
        head = f"model.{len(model.model) - 1}"
        for layer in model.head.class_layers():
            for kind in ("weight", "bias"):
                loaded = model.state_dict()[f"{head}.{layer}.{kind}"]
                for number, row in enumerate(rows):
                    own = model.head.class_outputs([number])
                    given = old.head.class_outputs([0 if row is None else row])
                    expected = state[f"{head}.{layer}.{kind}"][given]
                    if row is None:  # box and objectness come from the file, the class does not
                        is_class = torch.tensor([output not in model.head.class_outputs([]) for output in own])
                        expected[is_class] = drawn[f"{head}.{layer}.{kind}"][own][is_class]
                    assert torch.equal(loaded[own], expected)
