"""The loss as repeated passes: the same gradients to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ray_yolo.config.recipe import Recipe
from ray_yolo.engine.cuda_graphs import MAX_RECORDINGS, PLAIN_USES, Recordings
from ray_yolo.engine.loss_graph import ROWS, GraphedLoss
from ray_yolo.models import loss_anchor_based, loss_anchor_free
from ray_yolo.models.criterion import Criterion
from ray_yolo.models.detector import Detector
from ray_yolo.models.families import build_model, find_family
from ray_yolo.ops import assign
from ray_yolo.ops.assign import padded_targets
from tests.benchmarks.launch_counter import Counter
from tests.support.recorders import FailingRecorder, FunctionRecorder, UncountedRecorder, repeat_by

pytestmark = pytest.mark.usefixtures("one_thread", "as_on_a_gpu")

MODELS = ("yolov5n", "yolov8n", "yolo26n")
SIDE, CLASSES = 64, 3


@pytest.fixture
def as_on_a_gpu() -> Iterator[None]:
    """Nothing is selected by a mask, whose number of values the host would wait for."""
    with patch.object(assign, "selects_pairs", lambda device: False), \
            patch.object(loss_anchor_based, "selects_pairs", lambda device: False), \
            patch.object(loss_anchor_free, "selects_pairs", lambda device: False):
        yield


def make(model: str) -> tuple[Detector, Criterion]:
    torch.manual_seed(0)
    network = build_model(model, CLASSES).to(memory_format=torch.channels_last).train()
    return network, find_family(model).build_loss(network.head, Recipe(data="unused").loss, CLASSES, SIDE)


def drawn(number: int, count: int) -> tuple[Tensor, Tensor]:
    """Two images, and targets of both; some are smaller than a cell, some near the upper left corner."""
    draw = torch.Generator().manual_seed(number)
    images = torch.rand(2, 3, SIDE, SIDE, generator=draw).contiguous(memory_format=torch.channels_last)
    corner = torch.rand(count, 2, generator=draw) * torch.rand(count, 1, generator=draw) * 40
    side = 1 + 22 * torch.rand(count, 2, generator=draw)
    image = torch.arange(count)[:, None] % 2
    kinds = torch.randint(CLASSES, (count, 1), generator=draw)
    return images, torch.cat((image, kinds, corner, corner + side), 1)


def gradients(network: Detector, loss: Criterion, images: Tensor, targets: Tensor) -> tuple[list[Tensor], Tensor]:
    """Those of all weights, and the terms."""
    sums = loss.measure(network(images), targets, (SIDE, SIDE))
    terms = loss.terms(sums.numerators, sums.counts, 0.5)
    terms.sum().backward()
    found = [weight.grad.clone() for weight in network.parameters() if weight.grad is not None]
    network.zero_grad()
    return found, torch.cat((terms.detach(), sums.counts.flatten()))


@pytest.mark.parametrize("count", [0, 1, 30])
@pytest.mark.parametrize("model", MODELS)
def test_added_rows_leave_the_gradients_bits_equal(model: str, count: int) -> None:
    network, loss = make(model)
    images, targets = drawn(1, count)
    padded = padded_targets(targets, ROWS)
    assert len(padded) == ROWS
    (found, found_terms), (expected, terms) = (gradients(network, loss, images, each) for each in (padded, targets))
    assert len(found) == len(expected) > 50
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.allclose(found_terms, terms, rtol=1e-6)


def test_rows_are_added_to_the_next_multiple_and_to_none_of_one() -> None:
    for count, expected in ((0, 4), (1, 4), (4, 4), (5, 8)):
        assert len(padded_targets(torch.rand(count, 6), 4)) == expected


def test_rows_of_zeros_would_take_points_from_labels() -> None:
    """Where small sides count as a stride, an empty box in the corner takes a point near it. Then all labels compete
    for that point, and it goes to one that has not taken it.
    """
    boxes = torch.tensor([[[1.0, 1.0, 10.5, 10.5], [3.0, 3.0, 9.0, 9.0]]])
    scores = torch.tensor([[[0.01], [1.0]]])
    points = torch.tensor([[4.0, 4.0], [5.0, 5.0]])
    labels = torch.tensor([[0, 0, 0, 0, 12, 12], [0, 0, 2, 2, 10, 10]], dtype=torch.float32)
    rule = assign.AlignRule(top=1, floor=16.0)
    alone, padded, zeros = (assign.align(boxes, scores, points, rows, rule).label.tolist() for rows in (
        labels, padded_targets(labels, 5), torch.cat((labels, torch.zeros(3, 6)))))
    assert alone == padded == [[0, 1]]
    assert zeros == [[1, 1]]


@pytest.mark.parametrize("model", MODELS)
def test_repeated_passes_have_the_gradients_of_the_loss_as_written(model: str) -> None:
    """Beside repeated passes of the network, with other numbers of labels in each microbatch."""
    batches = [drawn(number, (number * 7) % 40) for number in range(PLAIN_USES + 3)]
    network, loss = make(model)
    expected = [gradients(network, loss, *batch) for batch in batches]
    network, loss = make(model)
    recorder, of_network = FunctionRecorder(), FunctionRecorder()
    repeat_by(of_network, network)
    graphed = GraphedLoss(loss, Recordings("loss", recorder, []))
    found = [gradients(network, graphed, *batch) for batch in batches]
    for (ours, terms), (theirs, their_terms) in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        assert torch.allclose(terms, their_terms, rtol=1e-6)
    assert (recorder.repeats, of_network.repeats) == (6, 6)  # three forward and three backward passes


@pytest.mark.parametrize("model", MODELS)
def test_few_launches_are_left_outside(model: str) -> None:
    """Those of the copies into and out of a recording's memory, and of the rows that are added."""
    network, loss = make(model)
    levels = [level.detach().requires_grad_() for level in network(drawn(0, 1)[0])]
    _, targets = drawn(1, 9)

    def launches(criterion: Criterion) -> int:
        with Counter() as counter:
            sums = criterion.measure(levels, targets, (SIDE, SIDE))
            torch.autograd.grad(sums.numerators, levels, torch.ones_like(sums.numerators))
        return counter.count

    as_written = launches(loss)
    graphed = GraphedLoss(loss, Recordings("loss", UncountedRecorder(), []))
    for _ in range(PLAIN_USES + 1):
        launches(graphed)
    assert launches(graphed) <= 8 + len(levels)
    assert as_written > 90


def test_a_recording_that_fails_leaves_the_loss_as_written() -> None:
    network, loss = make("yolov5n")
    complaints: list[str] = []
    graphed = GraphedLoss(loss, Recordings("loss", FailingRecorder(), complaints))
    images, targets = drawn(1, 9)
    results = [gradients(network, graphed, images, targets) for _ in range(PLAIN_USES + 2)]
    assert all(torch.equal(one, other) for one, other in zip(results[0][0], results[-1][0], strict=True))
    [complaint] = complaints
    assert complaint.startswith("no further shape of the loss is recorded as a CUDA graph: CUDA out of")


def test_evaluation_and_further_shapes_run_as_written() -> None:
    network, loss = make("yolov8n")
    recorder = FunctionRecorder()
    recordings: Recordings[Any] = Recordings("loss", recorder, [])
    graphed = GraphedLoss(loss, recordings)
    images, targets = drawn(1, 9)
    with torch.no_grad():
        levels = network(images)
        for _ in range(PLAIN_USES + 2):
            graphed.measure(levels, targets, (SIDE, SIDE))
    assert recorder.repeats == len(recordings) == 0
    for number in range(MAX_RECORDINGS + 2):
        rows = targets.repeat(1 + number * ROWS // 9, 1)
        for _ in range(PLAIN_USES + 1):
            gradients(network, graphed, images, rows)
    assert len(recordings) == MAX_RECORDINGS
