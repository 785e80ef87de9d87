from __future__ import annotations

import re
import weakref

import pytest
import torch
from torch import Tensor, nn

from ray_yolo.models.blocks import C3, Concat, Conv, Upsample
from ray_yolo.models.detector import Architecture, fuse, gflops
from ray_yolo.models.heads import Detect
from ray_yolo.models.rows import row
from ray_yolo.models.zoo import YOLOV5

SMALL = Architecture(
    (
        row(Conv, 8, kernel=3, stride=2),
        row(Conv, 8, kernel=3, stride=2),
        row(C3, 16, repeats=3),
        row(Upsample),
        row(Concat, source=(-1, 0)),
        row(Conv, 8),
        row(Detect, source=(5, 2)),
    ),
    anchors_px=(((4, 4),), ((8, 8),)),
)


def test_training_and_evaluation_give_the_same_form() -> None:
    model, images = YOLOV5["yolov5n"].build(3), torch.rand(2, 3, 64, 96)
    shapes = [(2, 3, 8, 12, 8), (2, 3, 4, 6, 8), (2, 3, 2, 3, 8)]
    assert [tuple(level.shape) for level in model(images)] == shapes
    with torch.no_grad():
        assert [tuple(level.shape) for level in model.eval()(images)] == shapes


def test_building_leaves_the_norms_untouched_and_training() -> None:
    model = SMALL.build(2)
    state = model.state_dict()
    assert all(layer.training for layer in model.modules())
    assert all(tensor.eq(0).all() for name, tensor in state.items() if name.endswith(("running_mean", "tracked")))
    assert all(tensor.eq(1).all() for name, tensor in state.items() if name.endswith("running_var"))


def test_building_twice_from_one_seed_gives_the_same_weights() -> None:
    torch.manual_seed(5)
    first = SMALL.build(2).state_dict()
    torch.manual_seed(5)
    second = SMALL.build(2).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_memory_layout_does_not_change_predictions() -> None:
    model, images = SMALL.build(2).eval(), torch.rand(2, 3, 32, 32)
    expected = model(images)
    last = model.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    for level, other in zip(expected, last, strict=True):
        torch.testing.assert_close(level, other)


def test_only_outputs_that_are_needed_later_are_kept() -> None:
    model = SMALL.build(2).eval()
    outputs: dict[int, weakref.ref[Tensor]] = {}
    alive: set[int] = set()

    def remember(index: int, output: Tensor) -> None:
        outputs[index] = weakref.ref(output)

    for index, layer in enumerate(model.model[:-1]):
        layer.register_forward_hook(lambda _layer, _inputs, output, index=index: remember(index, output))
    model.head.register_forward_pre_hook(lambda *_: alive.update(i for i, output in outputs.items()
                                                                    if output() is not None))
    with torch.no_grad():
        model(torch.rand(1, 3, 32, 32))
    assert alive == {0, 2, 5}


def test_an_empty_batch_passes_and_its_gradients_are_zero() -> None:
    model = SMALL.build(2).eval()
    sum(level.sum() for level in model(torch.zeros(0, 3, 32, 32))).backward()
    assert all(p.grad is not None and p.grad.eq(0).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("depth", "width", "channels", "repeats"), [(0.33, 0.5, 8, 1), (1.0, 1.0, 16, 3), (1.33, 1.25, 24, 4)]
)
def test_multiples_scale_repeats_and_channels_up_to_eights(
    depth: float, width: float, channels: int, repeats: int
) -> None:
    assert row(C3, 16, repeats=3).scaled(depth, width) == row(C3, channels, repeats=repeats)


def test_single_rows_are_never_repeated_or_removed_by_the_depth() -> None:
    assert row(Conv, 8).scaled(3.0, 1.0).repeats == 1
    assert row(C3, 8, repeats=2).scaled(0.1, 1.0).repeats == 1


def test_a_number_of_anchors_makes_squares() -> None:
    head = Architecture(SMALL.rows, anchors_px=2).build(3).head
    assert head.anchors.shape == (2, 2, 2)
    assert torch.equal(head.anchors[..., 0], head.anchors[..., 1])
    assert head.anchors.gt(0).all()


def test_given_anchors_replace_those_of_the_table() -> None:
    head = SMALL.build(3, anchors_px=[[(2, 4), (4, 2)], [(8, 4), (4, 8)]]).head
    assert head.anchors.tolist() == [[[1, 2], [2, 1]], [[2, 1], [1, 2]]]


def test_fusing_changes_cost_and_not_outputs() -> None:
    torch.manual_seed(0)
    model = YOLOV5["yolov5n"].build(3)
    for name, tensor in model.state_dict().items():
        if re.search(r"bn\.(weight|running_var)", name):
            nn.init.uniform_(tensor, 0.5, 1.5)
        if re.search(r"bn\.(bias|running_mean)", name):
            nn.init.normal_(tensor, std=0.1)
    fused, images = fuse(model), torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        for level, other in zip(model.eval()(images), fused(images), strict=True):
            torch.testing.assert_close(level, other, rtol=1e-3, atol=1e-4)
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in fused.modules())
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    assert fused.head.strides == (8, 16, 32)


def test_cost_grows_with_the_area() -> None:
    model = SMALL.build(2)
    assert gflops(model, 64) == pytest.approx(4 * gflops(model, 32))
    assert model.training
