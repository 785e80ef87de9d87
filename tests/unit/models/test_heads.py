from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ray_yolo.models.heads import AnchorFree, Detect, decode_anchors, decode_distances, set_anchors, square_anchors

ANCHORS_PX = (((8, 16), (4, 4)), ((32, 16), (64, 48)))


def small_head(num_classes: int = 3) -> Detect:
    """Two levels of 8 and 16 pixels per cell, two anchors each."""
    head = Detect([4, 6], num_classes, num_anchors=2)
    head.calibrate((8, 16), ANCHORS_PX)
    return head


def raw(head: Detect) -> list[Tensor]:
    return [torch.zeros(1, 2, 2, 3, 5 + head.num_classes), torch.zeros(1, 2, 1, 2, 5 + head.num_classes)]


def test_predictions_have_one_row_per_anchor_and_cell() -> None:
    levels = small_head()(torch.zeros(2, 4, 8, 12), torch.zeros(2, 6, 4, 6))
    assert [tuple(level.shape) for level in levels] == [(2, 2, 8, 12, 8), (2, 2, 4, 6, 8)]


def test_channels_of_the_convolution_are_anchors_then_outputs() -> None:
    head, x = small_head(), torch.randn(1, 4, 2, 2)
    level = head(x, torch.zeros(1, 6, 1, 1))[0]
    convolved = head.m.get_submodule("0")(x)
    torch.testing.assert_close(level[0, 1, 0, 1, 3], convolved[0, 8 + 3, 0, 1])


def test_predictions_are_views_of_channels_last_memory() -> None:
    """A copy here would cost a pass over all predictions, forward and backward."""
    features = [torch.zeros(2, c, 4, 4).to(memory_format=torch.channels_last) for c in (4, 6)]
    for level in small_head().to(memory_format=torch.channels_last)(*features):
        assert level.permute(0, 2, 3, 1, 4).is_contiguous()


def test_raw_zeros_are_boxes_of_anchor_size_in_the_middle_of_their_cells() -> None:
    head = small_head()
    (rows,), (scores,) = decode_anchors(head, raw(head))
    assert (rows.shape, scores.shape) == ((2 * 2 * 3 + 2 * 1 * 2, 4), (16, 3))
    assert rows[0].tolist() == [0, -4, 8, 12]  # cell (0, 0), anchor 8 x 16
    assert scores.eq(0.25).all()  # half a chance of an object, and of each class
    assert rows[5, :4].tolist() == [16, 4, 24, 20]  # last cell of the first anchor: column 2, row 1
    assert rows[6, :4].tolist() == [2, 2, 6, 6]  # second anchor, 4 x 4
    assert rows[15, :4].tolist() == [24 - 32, 8 - 24, 24 + 32, 8 + 24]  # last cell, last anchor of stride 16


def test_a_decoded_box_worked_by_hand() -> None:
    head = small_head()
    levels = raw(head)
    levels[0][0, 0, 1, 2] = torch.tensor([math.log(3), -math.log(3), math.log(3), -math.log(3), 0, 9, 0, -9])
    boxes, scores = decode_anchors(head, levels)
    # sigmoid(ln 3) = 3/4: x = (2 * 3/4 - 0.5 + 2) * 8 = 24, y = (2 / 4 - 0.5 + 1) * 8 = 8,
    # w = (2 * 3/4)^2 * 8 = 18, h = (2 / 4)^2 * 16 = 4
    torch.testing.assert_close(boxes[0, 5], torch.tensor([24.0 - 9, 8 - 2, 24 + 9, 8 + 2]))
    torch.testing.assert_close(scores[0, 5], torch.tensor([9.0, 0, -9]).sigmoid() / 2)


def test_extreme_predictions_reach_the_stated_bounds() -> None:
    head = small_head()
    low, high = ([torch.full_like(level, value) for level in raw(head)] for value in (-99.0, 99.0))
    largest = torch.tensor([12.0 - 16, 12 - 32, 12 + 16, 12 + 32])
    torch.testing.assert_close(decode_anchors(head, high).boxes[0, 0], largest)
    torch.testing.assert_close(decode_anchors(head, low).boxes[0, 0], torch.tensor([-4.0, -4, -4, -4]))


def test_half_precision_predictions_decode_in_single_precision() -> None:
    head = small_head()
    levels = [torch.randn_like(level).bfloat16() for level in raw(head)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decoded = decode_anchors(head, levels)
    for part, single in zip(decoded, decode_anchors(head, [level.float() for level in levels]), strict=True):
        assert part.dtype == torch.float32
        torch.testing.assert_close(part, single, rtol=0, atol=0)


def test_no_images_no_predictions() -> None:
    head = small_head()
    boxes, scores = decode_anchors(head, [level[:0] for level in raw(head)])
    assert (boxes.shape, scores.shape) == ((0, 16, 4), (0, 16, 3))


@pytest.mark.parametrize("num_classes", [1, 3, 80])
def test_biases_start_at_eight_objects_an_image_and_six_in_ten_spread_over_classes(num_classes: int) -> None:
    torch.manual_seed(0)
    before = Detect([4, 6], num_classes, 2).state_dict()
    torch.manual_seed(0)
    after = small_head(num_classes).state_dict()
    for name, stride in (("m.0.bias", 8), ("m.1.bias", 16)):
        added = (after[name] - before[name]).view(2, -1)
        torch.testing.assert_close(added[:, :4], torch.zeros(2, 4))
        torch.testing.assert_close(added[:, 4].exp() * (640 / stride) ** 2, torch.full((2,), 8.0))
        expected = math.log(0.6 / (num_classes - 0.99999))
        torch.testing.assert_close(added[:, 5:], torch.full((2, num_classes), expected))


def test_anchors_are_stored_in_cells() -> None:
    assert small_head().anchors.tolist() == [[[1, 2], [0.5, 0.5]], [[2, 1], [4, 3]]]


def test_levels_of_anchors_follow_the_order_of_the_strides() -> None:
    head = small_head()
    expected = head.anchors.clone()
    set_anchors(head, ANCHORS_PX[::-1])
    assert torch.equal(head.anchors, expected)


def test_square_anchors_grow_with_the_stride() -> None:
    assert square_anchors((8, 16), 1) == [[(32.0, 32.0)], [(64.0, 64.0)]]
    (first, second), = square_anchors((8,), 2)
    assert 16 < first[0] < second[0] < 64


def test_the_anchors_are_saved_with_the_weights() -> None:
    assert "anchors" in small_head().state_dict()
    assert set(small_head().state_dict()) == {"anchors", "m.0.weight", "m.0.bias", "m.1.weight", "m.1.bias"}


def anchor_free_head(num_classes: int = 3) -> AnchorFree:
    """Two levels of 8 and 16 pixels per cell."""
    head = AnchorFree([8, 16], num_classes)
    head.calibrate((8, 16), None)
    return head


def test_a_side_is_the_expected_distance_from_the_middle_of_the_cell() -> None:
    levels = [torch.zeros(1, 64 + 3, 2, 3), torch.zeros(1, 64 + 3, 1, 2)]
    levels[0][0, :64] = -100.0
    for side, distance in enumerate((1, 0, 2, 15)):  # left, top, right, bottom
        levels[0][0, 16 * side + distance] = 100.0
    levels[0][0, 16 * 0 + 2] = 100.0  # left: half of 1, half of 2
    levels[0][0, 64:] = torch.tensor([0.0, math.log(3), -100.0])[:, None, None]
    boxes, scores = decode_distances(anchor_free_head(), levels)
    assert boxes.shape == (1, 2 * 3 + 2, 4)
    x, y = 2.5 * 8, 1.5 * 8  # the last cell of the first level: column 2, row 1
    torch.testing.assert_close(boxes[0, 5], torch.tensor([x - 1.5 * 8, y, x + 2 * 8, y + 15 * 8]))
    torch.testing.assert_close(scores[0, 5], torch.tensor([0.5, 0.75, 0.0]))
    torch.testing.assert_close(boxes[0, 7], torch.tensor([24.0, 8, 24, 8]) + 7.5 * 16 * torch.tensor([-1.0, -1, 1, 1]))


def test_training_starts_from_five_objects_an_image() -> None:
    head = anchor_free_head(4)
    for number, stride in enumerate((8, 16)):
        bias = head.state_dict()[f"cv3.{number}.2.bias"]
        torch.testing.assert_close(bias.exp() * 4 * (640 / stride) ** 2, torch.full((4,), 5.0))
        assert head.state_dict()[f"cv2.{number}.2.bias"].eq(1).all()


def test_the_constants_of_the_head_are_not_trained() -> None:
    frozen = [name for name, parameter in anchor_free_head().named_parameters() if not parameter.requires_grad]
    assert frozen == ["dfl.conv.weight"]
