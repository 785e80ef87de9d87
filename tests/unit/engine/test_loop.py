"""The loop, worked by hand, on a line y = w x + b whose loss is the mean of y.

The gradient of a step is then (sum of x, number of images) for any weights. A norm beside it only records its input.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_yolo.core.errors import DivergedError
from ray_yolo.core.structures import Orders, Progress
from ray_yolo.engine import collectives, loop
from ray_yolo.engine.balance import SpeedReport
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.learner import TrainState, build_learner, build_optimizer
from ray_yolo.engine.plan import ShardSampler
from ray_yolo.engine.spec import WorkerContext
from ray_yolo.engine.team import form_team, image_stores
from ray_yolo.engine.worker_rows import Gathered, RowLayout, read_rows, write_row
from ray_yolo.models.batch_norm import BatchNorm
from ray_yolo.models.criterion import LossSums
from ray_yolo.ops.ema import Ema
from tests.support.jobs import Training, make_spec

CPU = torch.device("cpu")
W, B = 2.0, 0.5  # the weights before the first step
GREYS = (51, 153, 255, 102, 0, 204, 102, 153)  # pixel values of images 0..7: x is a fifth of 1, 3, 5, 2, 0, 4, 2, 3
X = [grey / 255 for grey in GREYS]


class Line(nn.Module):
    """y = w x + b of an image's grey."""

    grid = 32

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Conv2d(1, 1, 1), BatchNorm(1)
        nn.init.constant_(self.line.weight, W)
        nn.init.constant_(self.line.bias, B)
        self.norm.requires_grad_(False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        x = images[:, :1]
        return (self.line(x) + 0 * self.norm(x),)


class MeanLoss:
    """The box term is the mean of y over a microbatch's images, the others are 0."""

    names = ("box", "obj", "cls")

    def measure(self, levels: tuple[Tensor, ...], targets: Tensor, image_size: tuple[int, int]) -> LossSums:
        y = levels[0].flatten()
        return LossSums(torch.stack([y.sum(), 0 * y.sum(), 0 * y.sum()])[:, None], torch.full((3, 1), float(len(y))))

    def terms(self, numerators: Tensor, counts: Tensor, trained: float = 0.0) -> Tensor:
        return (numerators / counts.clamp(min=1)).sum(1)


class Loader:
    """Batches of the greys at the sampler's positions, one for each microbatch."""

    def __init__(self, sampler: ShardSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for microbatch in self.sampler:
            greys = [GREYS[key.position % len(GREYS)] for key in microbatch.keys]
            part = torch.tensor(greys, dtype=torch.uint8)
            yield {"images": part[:, None, None, None].expand(-1, 3, 1, 1).clone(), "targets": torch.zeros(0, 6)}


def make_line(folder: Path, num_images: int = 8, *, optimizer: dict[str, Any] | None = None,
              schedule: dict[str, Any] | None = None, **recipe: Any) -> Training:
    """By default two steps of two microbatches an epoch, plain SGD at a rate of 0.1."""
    fields: dict[str, Any] = {"batch_size": 4, "microbatch": 2, "epochs": 1, **recipe}
    fields["optimizer"] = {"lr0": 0.1, "momentum": 0.0, "weight_decay": 0.0, "nominal_batch": 4, "clip_norm": 1e6,
                           **(optimizer or {})}
    fields["schedule"] = {"warmup_epochs": 0, "lrf": 1.0, **(schedule or {})}
    spec, context = make_spec(folder, num_images, **fields), WorkerContext()
    model: Any = Line()
    learner = dataclasses.replace(
        build_learner(spec, context), model=model, criterion=MeanLoss(), optimizer=build_optimizer(model, spec.recipe),
        ema=Ema(model, spec.recipe.schedule.ema_decay, spec.recipe.schedule.ema_ramp))
    team = form_team(learner, context, Collectives(), image_stores(spec, context))
    team.loaders = team.loaders._replace(train=Loader(team.loaders.sampler))
    return Training(learner, team)


@pytest.fixture(autouse=True, params=["at once", "ahead"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every law holds in both orders: a step is read when it is launched, or after the next step's backward."""
    monkeypatch.setattr(loop, "runs_ahead", lambda device: request.param == "ahead")


Hook = Callable[[Any, Any, loop.StepResult], None]


def train(
    line: Training,
    after_step: Hook = lambda *_: None,
    state: TrainState | None = None,
    ends: list[tuple[float, ...]] | None = None,
    poll_orders: loop.PollOrders = loop.Orders,
) -> TrainState:
    """Appends the mean losses of each epoch to `ends`."""
    line.learner.state, ends = state or TrainState(), [] if ends is None else ends
    state = line.learner.state
    loop.train(*line, after_step, lambda _: bool(ends.append(state.close_epoch())), poll_orders)
    return state


def weights(model: nn.Module) -> tuple[float, float]:
    return model.line.weight.item(), model.line.bias.item()


def recorded(line: Training, look: Callable[[], Any]) -> list[Any]:
    """The results of `look` after each step of a complete training."""
    seen: list[Any] = []
    train(line, lambda *_: seen.append(look()))
    return seen


def test_a_step_descends_the_sum_of_its_images_gradients(tmp_path: Path) -> None:
    line = make_line(tmp_path)
    first, second = recorded(line, lambda: weights(line.learner.model))
    w, b = W - 0.1 * sum(X[:4]), B - 0.1 * 4  # of four images, not of their mean
    assert first == pytest.approx((w, b))
    assert second == pytest.approx((w - 0.1 * sum(X[4:]), b - 0.1 * 4))


def test_momentum_looks_ahead_and_decay_pulls_at_weights_only(tmp_path: Path) -> None:
    line = make_line(tmp_path, optimizer={"momentum": 0.5, "weight_decay": 0.02, "nominal_batch": 4})
    first, second = recorded(line, lambda: weights(line.learner.model))
    gradient = sum(X[:4]) + 0.02 * W
    w, b = W - 0.1 * 1.5 * gradient, B - 0.1 * 1.5 * 4  # Nesterov: the gradient, and half of the momentum that it makes
    assert first == pytest.approx((w, b))
    later = sum(X[4:]) + 0.02 * w
    speed, speed_b = 0.5 * gradient + later, 0.5 * 4 + 4
    assert second == pytest.approx((w - 0.1 * (later + 0.5 * speed), b - 0.1 * (4 + 0.5 * speed_b)))


def test_losses_are_means_over_the_steps_images(tmp_path: Path) -> None:
    """Not over its microbatches, which here have four and two images."""
    line, seen, ends = make_line(tmp_path, 6, batch_size=8, microbatch=4, optimizer={"nominal_batch": 8}), [], []
    train(line, lambda step, rates, result: seen.append((result.losses.tolist(), result.images)), ends=ends)
    mean = sum(W * x + B for x in X[:6]) / 6
    assert seen == [(pytest.approx([mean, 0, 0]), 6)]
    assert ends == [pytest.approx((mean, 0, 0))]


@pytest.mark.parametrize("microbatch", [2, 4])
def test_microbatches_and_batches_that_accumulate_make_the_same_step(
        tmp_path: Path, microbatch: int) -> None:
    small = make_line(tmp_path, batch_size=4, microbatch=microbatch, optimizer={"nominal_batch": 8})
    large = make_line(tmp_path, batch_size=8, microbatch=8, optimizer={"nominal_batch": 8})
    [accumulated], [whole] = (
        recorded(line, lambda line=line: weights(line.learner.model)) for line in (small, large)
    )
    assert accumulated == pytest.approx(whole)
    assert accumulated == pytest.approx((W - 0.1 * sum(X), B - 0.1 * 8))


def test_a_gradient_longer_than_the_limit_is_scaled_to_it_and_its_norm_reported_before(tmp_path: Path) -> None:
    line, norms = make_line(tmp_path, 4, optimizer={"clip_norm": 0.5}), []
    train(line, lambda step, rates, result: norms.append(result.gradient_norm))
    norm = math.hypot(sum(X[:4]), 4)
    assert norms == [pytest.approx(norm)]
    assert weights(line.learner.model) == pytest.approx((W - 0.1 * 0.5 * sum(X[:4]) / norm, B - 0.1 * 0.5 * 4 / norm))


@pytest.mark.parametrize(("factor", "updated"), [(1.0, 16.0), (math.inf, 4.0)])
def test_an_incomplete_step_leaves_the_scale_as_it_was(factor: float, updated: float) -> None:
    """Whether its gradient would have raised the scale or lowered it."""
    for complete in (False, True):
        scaler, parameter = torch.amp.GradScaler("cpu", 8.0, growth_interval=1), torch.ones(1)
        parameter.grad = scaler.scale(torch.full((1,), factor))
        scaler.unscale_(torch.optim.SGD([parameter]))
        loop.update_scale(scaler, torch.tensor(complete))
        assert scaler.get_scale() == (updated if complete else 8.0)


def test_the_average_follows_the_weights_from_the_first_step_on(tmp_path: Path) -> None:
    """e <- d(n) e + (1 - d(n)) w with n = 1 at the first step; statistics are averaged like weights."""
    line = make_line(tmp_path, epochs=2, schedule={"ema_decay": 0.8, "ema_ramp": 2.0})
    w, running, model, average = W, 0.0, line.learner.model, line.learner.ema.model
    seen = recorded(line, lambda: (weights(model)[0], model.norm.running_mean.item(), weights(average)[0],
                                   average.norm.running_mean.item()))
    for number, (now, mean, averaged, averaged_mean) in enumerate(seen, 1):
        decay = 0.8 * (1 - math.exp(-number / 2.0))
        w, running = decay * w + (1 - decay) * now, decay * running + (1 - decay) * mean
        assert (averaged, averaged_mean) == pytest.approx((w, running))
    assert number == 4


def test_every_microbatch_moves_the_statistics_in_order(tmp_path: Path) -> None:
    line = make_line(tmp_path, 4)
    train(line)
    mean, var = 0.0, 1.0
    for pair_mean, pair_var in ((0.4, 0.08), (0.7, 0.18)):  # of (0.2, 0.6) and (1.0, 0.4); variances unbiased
        mean, var = 0.97 * mean + 0.03 * pair_mean, 0.97 * var + 0.03 * pair_var
    norm = line.learner.model.norm
    assert (norm.running_mean.item(), norm.running_var.item()) == pytest.approx((mean, var))
    assert norm.num_batches_tracked.item() == 2


def test_in_warm_up_a_step_has_the_rates_of_its_last_batch(tmp_path: Path) -> None:
    """Eight batches of warm-up in which steps grow from one batch to four: they end with batches 0, 1, 3, 6, 10, 11."""
    line = make_line(tmp_path, 48, optimizer={"nominal_batch": 16, "momentum": 0.9}, schedule={
        "warmup_epochs": 8 / 12, "warmup_min_batches": 8, "warmup_bias_lr": 0.5, "warmup_momentum": 0.1})
    seen = recorded(
        line, lambda: [(group["lr"], group["momentum"]) for group in line.learner.optimizer.param_groups]
    )
    risen = [0, 1 / 8, 3 / 8, 6 / 8, 1, 1]
    assert [group[0] for group in seen] == [pytest.approx((0.5 - 0.4 * r, 0.1 + 0.8 * r)) for r in risen]  # biases
    for place in (1, 2):  # weights and norms
        assert [group[place] for group in seen] == [pytest.approx((0.1 * r, 0.1 + 0.8 * r)) for r in risen]


def everything(line: Training) -> dict[str, Any]:
    """A copy of everything that a step may change."""
    return copy.deepcopy({"model": line.learner.model.state_dict(), "average": line.learner.ema.model.state_dict(),
                          "optimizer": line.learner.optimizer.state_dict()["state"]})


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            assert_equal(value, other[name])
        else:
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("broken", ["loss", "loss alone", "gradient"])
def test_a_step_that_is_not_finite_leaves_everything_as_it_was(tmp_path: Path, broken: str) -> None:
    """In the last microbatch of the second of three steps. The third is unaffected."""
    line = make_line(tmp_path, 12, optimizer={"momentum": 0.5, "weight_decay": 0.01})
    measure, calls = line.learner.criterion.measure, []

    def spoiled(*args: Any) -> LossSums:
        sums = measure(*args)
        calls.append(None)
        if len(calls) != 4:
            return sums
        if broken == "gradient":  # infinite at 0, where the value is 0
            return sums._replace(numerators=sums.numerators + (sums.numerators - sums.numerators.detach()).sqrt())
        if broken == "loss alone":
            return sums._replace(numerators=sums.numerators + math.inf)
        return sums._replace(numerators=sums.numerators * math.nan)

    line.learner.criterion.measure = spoiled
    states, results, ends = [], [], []
    state = train(
        line,
        lambda step, rates, result: (states.append(everything(line)), results.append(result)),
        ends=ends,
    )
    assert [result.skipped for result in results] == [False, True, False]
    assert_equal(states[1], states[0])
    assert states[2]["model"]["line.bias"] < states[1]["model"]["line.bias"]
    assert states[2]["model"]["norm.num_batches_tracked"] == 4
    assert state.skipped_in_row == 0
    losses = [result.losses[0].item() for result in results]
    assert ends[0][0] == pytest.approx((losses[0] + losses[2]) / 2)  # the skipped step's images do not count


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_skipped_first_step_changes_nothing(tmp_path: Path, name: str) -> None:
    """Its momentum does not start from uninitialised memory."""
    settings = {"name": name, "momentum": 0.5, "weight_decay": 0.01}
    uninterrupted, broken = (make_line(tmp_path / folder, 8, optimizer=settings) for folder in "ab")
    terms, calls = broken.learner.criterion.terms, []
    criterion = broken.learner.criterion
    criterion.terms = lambda *args: terms(*args) * (math.inf if calls.append(None) or len(calls) <= 2 else 1)
    second_step = TrainState(Progress(0, 4, 1))
    train(uninterrupted, state=second_step)
    train(broken)
    assert_equal(everything(broken), everything(uninterrupted))


def test_ten_steps_in_a_row_that_are_not_finite_end_the_training(tmp_path: Path) -> None:
    line, results = make_line(tmp_path, 48), []
    terms = line.learner.criterion.terms
    line.learner.criterion.terms = lambda *args: terms(*args) * math.inf
    before = everything(line)
    with pytest.raises(DivergedError):
        train(line, lambda step, rates, result: results.append(result.skipped))
    assert results == [True] * 10
    assert_equal(everything(line), before)


def test_a_training_continues_from_the_step_and_inside_the_epoch_where_it_stopped(tmp_path: Path) -> None:
    uninterrupted, stopped = (make_line(tmp_path / name, epochs=2, optimizer={"momentum": 0.9}) for name in "ab")
    train(uninterrupted)
    state, asked = TrainState(), []
    train(stopped, state=state, poll_orders=lambda: loop.Orders(stop=len(asked.append(None) or asked) == 3))
    assert state.progress == (1, 4, 3)
    train(stopped, state=state)
    assert state.progress == (2, 0, 4)
    assert_equal(everything(stopped), everything(uninterrupted))


def test_training_ends_when_the_epoch_hook_returns_true(tmp_path: Path) -> None:
    line, epochs = make_line(tmp_path, epochs=5), []
    state = line.learner.state
    loop.train(*line, lambda *_: None, lambda epoch: bool(state.close_epoch() and epochs.append(epoch))
               or epoch == 2)
    assert epochs == [0, 1, 2]
    assert state.progress == (3, 0, 6)


@pytest.mark.parametrize(("image_weights", "until", "expected"), [
    (False, None, ["load 0 to 2", "close 0", "close 1", "close 2"]),
    (True, None, ["load 0 to 0", "close 0", "load 1 to 1", "close 1", "load 2 to 2", "close 2"]),  # draws follow it
    (False, 2, ["load 0 to 1", "close 0", "close 1"]),  # then it pauses
])
def test_loaders_go_on_into_the_next_epoch_before_the_validation(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image_weights: bool, until: int | None, expected: list[str]
) -> None:
    line = make_line(tmp_path, epochs=3, image_weights=image_weights)
    state = line.learner.state
    order: list[str] = []
    start = line.team.loaders.sampler.start

    def note_start(epoch: int, images_done: int, weights: Any, last: int) -> None:
        order.append(f"load {epoch} to {last}")
        start(epoch, images_done, weights, last)

    def close(epoch: int) -> bool:
        order.append(f"close {epoch}")
        state.close_epoch()
        return epoch + 1 == until

    monkeypatch.setattr(line.team.loaders.sampler, "start", note_start)
    loop.train(*line, lambda *_: None, close, until=until)
    assert order == expected


@pytest.mark.parametrize("aborted", [[], [0], [1], [0, 1]])
def test_a_step_is_incomplete_if_any_workers_group_was_aborted_before_its_gather(
        monkeypatch: pytest.MonkeyPatch, aborted: list[int]) -> None:
    """That worker may have passed on garbage gradients, although the rows of all have arrived."""
    sent, layout = list[Tensor](), RowLayout((1, 1), 3, has_parts=False)

    def gather(received: Tensor, own: Tensor) -> None:
        sent.append(own.clone())
        received.copy_(torch.cat([sent[0], sent[-1]]))

    monkeypatch.setattr(collectives.dist, "all_gather_into_tensor", gather)
    for worker in range(2):
        monkeypatch.setattr(collectives, "_group", collectives._Group(cut=torch.tensor(float(worker in aborted))))
        of_worker = Collectives(worker, 2)
        row = write_row(Orders(), SpeedReport(worker + 0.5, 3.0), of_worker.was_cut(CPU),
                        [torch.full((3,), worker + 1.0)], layout)
        gathered = Gathered(*of_worker.gather_step(row, 5))
    losses, reports, complete, _ = read_rows(gathered, layout)
    assert reports.tolist() == [[0.5, 3.0], [1.5, 3.0]]
    assert losses.tolist() == [[1.0] * 3, [2.0] * 3]
    assert bool(complete) is (not aborted)


def test_boxes_are_resized_with_their_images() -> None:
    """To a long side of `size`, each side rounded up to the grid of 32: a white part stays where its box is."""
    for size, shape in ((None, (64, 96)), (96, (64, 96)), (144, (96, 160)), (64, (64, 64))):
        images = torch.zeros(1, 3, 64, 96, dtype=torch.uint8)
        images[:, :, 16:48, 24:72] = 255
        batch = {"images": images, "targets": torch.tensor([[0.0, 1, 24, 16, 72, 48]])}
        resized, targets = loop.to_network_input(batch, CPU, size, 32)
        assert resized.shape[2:] == shape, size
        assert resized.max() == 1, size
        assert targets[0, :2].tolist() == [0, 1], size
        rows, columns = torch.where(resized[0, 0] > 0.5)
        seen = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert targets[0, 2:].tolist() == pytest.approx([float(edge) for edge in seen], abs=1), size
