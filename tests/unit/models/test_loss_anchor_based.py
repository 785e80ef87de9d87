from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import complete_box_iou_loss, sigmoid_focal_loss

from ray_yolo.config.sections import LossConfig
from ray_yolo.models.criterion import LossSums
from ray_yolo.models.loss_anchor_based import AnchorLoss
from ray_yolo.ops.assign import Assignment

BOX, OBJ, CLS = 0, 1, 2
LN2 = math.log(2)


@dataclass
class Head:
    anchors: Tensor


def build(num_levels: int = 3, num_classes: int = 3, imgsz: int = 640, **gains: Any) -> AnchorLoss:
    """Levels of 8, 16, ... pixels per cell, two anchors of 1 x 1 and 2 x 3 cells on each."""
    anchors = torch.tensor([[1.0, 1.0], [2.0, 3.0]]).expand(num_levels, 2, 2)
    return AnchorLoss(Head(anchors), LossConfig(**gains), num_classes, imgsz)


def predict(num_images: int, num_classes: int = 3, size: tuple[int, int] = (32, 48), seed: int = 0) -> list[Tensor]:
    """Random raw predictions of three levels."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_images, 2, size[0] // s, size[1] // s, 5 + num_classes) for s in (8, 16, 32)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def random_targets(num: int, num_images: int = 2, size: tuple[int, int] = (32, 48), seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.rand(num, 6, generator=generator)
    targets[:, 0] = torch.randint(num_images, (num,), generator=generator)
    targets[:, 1] = torch.randint(3, (num,), generator=generator)
    limits = torch.tensor([size[1], size[0]])
    corners = torch.stack((targets[:, 2:4], targets[:, 4:6])) * limits
    targets[:, 2:4], targets[:, 4:6] = corners.amin(0), corners.amax(0) + 1
    return targets


def one_cell(num_classes: int = 3) -> tuple[AnchorLoss, Tensor, Tensor]:
    """One level, one anchor of 1 x 1 cells of 8 pixels; raw zeros, and the target in cell (1, 1) that they hit."""
    loss = AnchorLoss(Head(torch.ones(1, 1, 2)), LossConfig(), num_classes, 640)
    level = torch.zeros(1, 1, 3, 4, 5 + num_classes, requires_grad=True)
    return loss, level, torch.tensor([[0.0, 1, 8, 8, 16, 16]])


def gradient(value: Tensor, level: Tensor) -> Tensor:
    return torch.autograd.grad(value, level, retain_graph=True)[0]


def by_loops(
    levels: list[Tensor], targets: Tensor, anchors: Tensor, size: tuple[int, int], config: LossConfig
) -> Tensor:
    """Numerators by plain loops over targets, anchors and cells, straight from the formulas."""
    sums = torch.zeros(3, len(levels), dtype=torch.float64)
    for i, level in enumerate(levels):
        wanted = torch.zeros(level.shape[:4], dtype=torch.float64)
        for image, class_, x1, y1, x2, y2 in targets.tolist():
            height, width = level.shape[2:4]
            to_x, to_y = width / size[1], height / size[0]
            x, y, w, h = (x1 + x2) / 2 * to_x, (y1 + y2) / 2 * to_y, (x2 - x1) * to_x, (y2 - y1) * to_y
            cells = [(int(x), int(y))]
            cells += [(int(x) - 1, int(y))] if x % 1 < 0.5 and x > 1 else []
            cells += [(int(x), int(y) - 1)] if y % 1 < 0.5 and y > 1 else []
            cells += [(int(x) + 1, int(y))] if (width - x) % 1 < 0.5 and width - x > 1 else []
            cells += [(int(x), int(y) + 1)] if (height - y) % 1 < 0.5 and height - y > 1 else []
            for a, (aw, ah) in enumerate(anchors.tolist()):
                if max(w / aw, aw / w, h / ah, ah / h) >= config.anchor_t:
                    continue
                for column, row in cells:
                    column, row = min(column, width - 1), min(row, height - 1)
                    raw = level[int(image), a, row, column].double().detach()
                    s = raw.sigmoid()
                    px, py = 2 * s[0] - 0.5 + column, 2 * s[1] - 0.5 + row
                    pw, ph = (2 * s[2]) ** 2 * aw, (2 * s[3]) ** 2 * ah
                    mine = torch.stack((px - pw / 2, py - ph / 2, px + pw / 2, py + ph / 2))
                    theirs = torch.tensor((x - w / 2, y - h / 2, x + w / 2, y + h / 2), dtype=torch.float64)
                    miss = complete_box_iou_loss(mine[None], theirs[None])[0]
                    sums[BOX, i] += miss
                    best = wanted[int(image), a, row, column]
                    wanted[int(image), a, row, column] = max(float(best), float(1 - miss), 0.0)
                    hot = torch.full_like(raw[5:], config.label_smoothing / 2)
                    hot[int(class_)] = 1 - config.label_smoothing / 2
                    weight = torch.tensor(config.cls_pw, dtype=torch.float64)
                    sums[CLS, i] += F.binary_cross_entropy_with_logits(raw[5:], hot, pos_weight=weight, reduction="sum")
        weight = torch.tensor(config.obj_pw, dtype=torch.float64)
        raw = level[..., 4].double().detach()
        sums[OBJ, i] = F.binary_cross_entropy_with_logits(raw, wanted, pos_weight=weight, reduction="sum")
    return sums


@pytest.mark.parametrize("seed", range(5))
def test_numerators_equal_the_formulas_in_plain_loops(seed: int) -> None:
    gains: dict[str, Any] = {
        "label_smoothing": 0.1 * seed, "cls_pw": 1 + seed, "obj_pw": 1 + seed / 2, "anchor_t": 3 + seed / 2
    }
    loss, levels, targets = build(**gains), predict(2, seed=seed), random_targets(30, seed=seed)
    sums = loss.measure(levels, targets, (32, 48))
    expected = by_loops(levels, targets, loss.head.anchors[0], (32, 48), LossConfig(**gains))
    torch.testing.assert_close(sums.numerators, expected.float(), rtol=1e-4, atol=1e-3)


def test_a_perfect_box_worked_by_hand() -> None:
    loss, level, targets = one_cell()
    sums = loss.measure([level], targets, (24, 32))
    # box: CIoU 1; objectness: logit 0 costs ln 2 whatever the target, in 12 cells; classes: ln 2 for each of 3
    torch.testing.assert_close(sums.numerators, torch.tensor([[0.0], [12 * LN2], [3 * LN2]]), rtol=1e-5, atol=1e-5)
    assert sums.counts.tolist() == [[1], [12], [3]]
    # one level: its balance is 4, its gains are scaled by 3
    expected = torch.tensor([0.0, LN2 * 1.0 * 3 * 4, LN2 * 0.5 * 3 / 80 * 3])
    torch.testing.assert_close(loss.terms(*sums), expected, rtol=1e-5, atol=1e-5)


def test_objectness_is_the_overlap_where_assigned_and_zero_elsewhere() -> None:
    loss, level, targets = one_cell()
    targets[0, 4] = 24  # twice as wide: centre (2, 1.5), three cells assigned (column 2 twice)
    objectness = 0.5 - gradient(loss.measure([level], targets, (24, 32)).numerators[OBJ, 0], level)[0, 0, :, :, 4]
    # of column 1, whose centre is half a cell off: overlap 1/2 - (1/2)^2 / (2^2 + 1) - the aspect's share
    aspect = 4 / math.pi**2 * (math.atan(2) - math.atan(1)) ** 2
    overlap = 0.5 - 0.25 / 5 - aspect**2 / (0.5 + aspect)
    expected = torch.zeros(3, 4)
    expected[1, 1] = expected[1, 2] = overlap
    torch.testing.assert_close(objectness, expected, rtol=1e-4, atol=1e-5)


def test_no_overlap_is_an_objectness_of_zero_not_below() -> None:
    loss, level, targets = one_cell()
    with torch.no_grad():
        level[0, 0, 1, 1, 2:4] = -20  # the prediction is a point in the middle: CIoU below 0 by its aspect or just 0
        level[0, 0, 1, 1, 0] = 20  # and far to the right
    objectness = 0.5 - gradient(loss.measure([level], targets, (24, 32)).numerators[OBJ, 0], level)[..., 4]
    assert loss.measure([level], targets, (24, 32)).numerators[BOX, 0] > 1
    torch.testing.assert_close(objectness, torch.zeros_like(objectness))


def test_the_best_overlap_wins_a_cell_that_several_targets_claim() -> None:
    loss, level, good = one_cell()
    poor = torch.tensor([[0.0, 2, 6, 6, 18, 18]])
    for targets in (torch.cat((good, poor)), torch.cat((poor, good))):
        sums = loss.measure([level], targets, (24, 32))
        objectness = 0.5 - gradient(sums.numerators[OBJ, 0], level)[0, 0, 1, 1, 4]
        assert objectness.item() == pytest.approx(1, abs=1e-5)
        assert sums.counts[:, 0].tolist() == [2, 12, 6]


def test_objectness_does_not_pull_at_boxes() -> None:
    """The overlap is a target, not a path for gradients."""
    loss, levels = build(), predict(2)
    numerators = loss.measure(levels, random_targets(30), (32, 48)).numerators
    grad = gradient(numerators[OBJ].sum(), levels[0])
    assert grad[..., 4].abs().min() > 0
    assert grad[..., :4].eq(0).all()
    assert grad[..., 5:].eq(0).all()


def test_the_order_of_targets_does_not_matter() -> None:
    loss, levels, targets = build(), predict(2), random_targets(40)
    sums, reversed_ = (loss.measure(levels, t, (32, 48)) for t in (targets, targets.flip(0)))
    torch.testing.assert_close(sums.numerators, reversed_.numerators)
    assert torch.equal(sums.counts, reversed_.counts)


def test_sums_of_a_batch_are_the_sums_of_its_images() -> None:
    loss, levels, targets = build(), predict(3), random_targets(30, num_images=3)
    whole = loss.measure(levels, targets, (32, 48))
    parts = []
    for image in range(3):
        own = targets[targets[:, 0] == image].clone()
        own[:, 0] = 0
        parts.append(loss.measure([level[image : image + 1] for level in levels], own, (32, 48)))
    torch.testing.assert_close(whole.numerators, torch.stack([part.numerators for part in parts]).sum(0))
    assert torch.equal(whole.counts, torch.stack([part.counts for part in parts]).sum(0))


def test_counts_do_not_depend_on_predictions() -> None:
    loss, targets = build(), random_targets(30)
    counts = [loss.measure(predict(2, seed=seed), targets, (32, 48)).counts for seed in (0, 1)]
    assert torch.equal(*counts)
    assert counts[0].dtype == torch.float32
    assert counts[0][OBJ].tolist() == [2 * 2 * 4 * 6, 2 * 2 * 2 * 3, 2 * 2 * 1 * 1]
    assert torch.equal(counts[0][CLS], 3 * counts[0][BOX])


def test_same_input_same_bits() -> None:
    def run() -> list[Tensor]:
        levels = predict(2)
        loss = build()
        loss.terms(*loss.measure(levels, random_targets(40), (32, 48))).sum().backward()
        return [level.grad for level in levels if level.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_without_targets_only_objectness_is_left() -> None:
    loss, levels = build(), predict(2)
    sums = loss.measure(levels, torch.zeros(0, 6), (32, 48))
    assert sums.counts[[BOX, CLS]].eq(0).all()
    terms = loss.terms(*sums)
    assert terms[[BOX, CLS]].tolist() == [0, 0]
    terms.sum().backward()
    assert all(level.grad is not None and level.grad.isfinite().all() for level in levels)


def test_without_images_the_loss_is_zero_and_reaches_every_gradient() -> None:
    """A worker without images still takes part in the reduction of gradients."""
    loss, weight = build(), torch.ones(8, requires_grad=True)
    levels = [level * weight for level in predict(0)]
    sums = loss.measure(levels, torch.zeros(0, 6), (32, 48))
    assert sums.counts.eq(0).all()
    terms = loss.terms(*sums)
    terms.sum().backward()
    assert terms.tolist() == [0, 0, 0]
    assert weight.grad is not None
    assert weight.grad.tolist() == [0] * 8


def test_a_single_class_has_no_class_term() -> None:
    loss, level, targets = one_cell(num_classes=1)
    targets[0, 1] = 0
    sums = loss.measure([level], targets, (24, 32))
    assert (sums.numerators[CLS].item(), sums.counts[CLS].item(), loss.terms(*sums)[CLS].item()) == (0, 0, 0)


def test_smoothed_class_targets() -> None:
    _, level, targets = one_cell()
    loss = AnchorLoss(Head(torch.ones(1, 1, 2)), LossConfig(label_smoothing=0.2), 3, 640)
    wanted = 0.5 - gradient(loss.measure([level], targets, (24, 32)).numerators[CLS, 0], level)[0, 0, 1, 1, 5:]
    torch.testing.assert_close(wanted, torch.tensor([0.1, 0.9, 0.1]))


def test_weights_of_positive_targets() -> None:
    _, level, targets = one_cell()
    loss = AnchorLoss(Head(torch.ones(1, 1, 2)), LossConfig(cls_pw=3, obj_pw=5), 3, 640)
    numerators = loss.measure([level], targets, (24, 32)).numerators
    torch.testing.assert_close(gradient(numerators[CLS, 0], level)[0, 0, 1, 1, 5:], torch.tensor([0.5, -1.5, 0.5]))
    torch.testing.assert_close(gradient(numerators[OBJ, 0], level)[0, 0, 1, :2, 4], torch.tensor([0.5, -2.5]))


@pytest.mark.parametrize("gamma", [0.5, 1.5, 2.0])
def test_the_focal_option_is_torchvisions_focal_loss(gamma: float) -> None:
    loss, levels = build(fl_gamma=gamma), predict(2)
    numerators = loss.measure(levels, torch.zeros(0, 6), (32, 48)).numerators[OBJ]
    logits = [level[..., 4] for level in levels]
    expected = [sigmoid_focal_loss(x, torch.zeros_like(x), 0.25, gamma, "sum") for x in logits]
    torch.testing.assert_close(numerators, torch.stack(expected))


def test_the_focal_option_has_finite_gradients_at_certain_predictions() -> None:
    _, level, targets = one_cell()
    loss = AnchorLoss(Head(torch.ones(1, 1, 2)), LossConfig(fl_gamma=0.5), 3, 640)
    with torch.no_grad():
        level[..., 4] = -200
        level[0, 0, 1, 1, 4:] = torch.tensor([200.0, -200, 200, -200])
    assert gradient(loss.measure([level], targets, (24, 32)).numerators.sum(), level).isfinite().all()


def test_the_focal_option_weighs_classes_too() -> None:
    _, level, targets = one_cell()
    loss = AnchorLoss(Head(torch.ones(1, 1, 2)), LossConfig(fl_gamma=2.0), 3, 640)
    with torch.no_grad():
        level[0, 0, 1, 1, 5:] = torch.tensor([1.0, 2.0, -3.0])
    expected = sigmoid_focal_loss(torch.tensor([1.0, 2.0, -3.0]), torch.tensor([0.0, 1.0, 0.0]), 0.25, 2.0, "sum")
    torch.testing.assert_close(loss.measure([level], targets, (24, 32)).numerators[CLS, 0], expected)


def test_terms_are_weighted_means_summed_over_levels() -> None:
    numerators = torch.tensor([[2.0, 6, 0], [8, 8, 8], [3, 0, 9]])
    counts = torch.tensor([[2.0, 3, 0], [8, 4, 2], [3, 0, 3]])
    box, obj, cls = build(num_classes=20, imgsz=320, box=0.1, obj=2.0, cls=0.4).terms(numerators, counts).tolist()
    assert box == pytest.approx(0.1 * (1 + 2 + 0))
    assert obj == pytest.approx(2.0 * (320 / 640) ** 2 * (4.0 * 1 + 1.0 * 2 + 0.4 * 4))
    assert cls == pytest.approx(0.4 * 20 / 80 * (1 + 0 + 3))


@pytest.mark.parametrize(
    ("num_levels", "balance"), [(2, [4.0, 1.0]), (3, [4.0, 1.0, 0.4]), (4, [4.0, 1.0, 0.25, 0.06])]
)
def test_balance_of_objectness_and_gains_by_number_of_levels(num_levels: int, balance: list[float]) -> None:
    ones = torch.ones(3, num_levels)
    box, obj, cls = build(num_levels, num_classes=80, box=1, obj=1, cls=1).terms(ones, ones).tolist()
    assert obj == pytest.approx(sum(balance) * 3 / num_levels)
    assert (box, cls) == (pytest.approx(3), pytest.approx(3))


def test_counts_of_other_workers_thin_out_a_workers_terms() -> None:
    """Numerators are summed after the loss, counts may be summed before: the mean is then the global one."""
    loss, sums = build(), build().measure(predict(2), random_targets(20), (32, 48))
    torch.testing.assert_close(loss.terms(sums.numerators, 2 * sums.counts) * 2, loss.terms(*sums))


def test_half_precision_predictions_are_measured_in_single_precision() -> None:
    loss, targets = build(), random_targets(30)
    half = [level.detach().bfloat16() for level in predict(2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums: LossSums = loss.measure([level.requires_grad_() for level in half], targets, (32, 48))
    assert (sums.numerators.dtype, sums.counts.dtype) == (torch.float32, torch.float32)
    full = loss.measure([level.float() for level in half], targets, (32, 48))
    assert torch.equal(sums.numerators, full.numerators)


def test_memory_layout_does_not_matter() -> None:
    loss, levels, targets = build(), predict(2), random_targets(30)
    last = [level.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4) for level in levels]
    one, other = loss.measure(levels, targets, (32, 48)), loss.measure(last, targets, (32, 48))
    torch.testing.assert_close(one.numerators, other.numerators)


def test_candidates_that_are_not_valid_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they are kept and multiplied by 0, so that no operation waits for their number."""
    loss, targets = build(), random_targets(30)
    targets[3, 4:] = targets[3, 2:4]  # a target without area: never valid, must not spoil the sums
    results = []
    for _ in range(2):
        levels = predict(2)
        sums = loss.measure(levels, targets, (32, 48))
        loss.terms(*sums).sum().backward()
        results.append([*sums, *(level.grad for level in levels)])
        monkeypatch.setattr(Assignment, "kept", lambda self: self)
    for kept, masked in zip(*results, strict=True):
        torch.testing.assert_close(kept, masked)
