"""Clip and averages as repeated launches: the same bits as written. A tape stands for a CUDA graph: it repeats the
operations of a function with the numbers and on the memory of its recording.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ray_yolo.config.placement import repeats_passes
from ray_yolo.engine import cuda_graphs, loop
from ray_yolo.engine import team as team_module
from ray_yolo.engine.collectives import Collectives, wrap_in_ddp
from ray_yolo.engine.cuda_graphs import PLAIN_USES, Recordings
from ray_yolo.engine.loss_graph import GraphedLoss
from ray_yolo.engine.spec import WorkerContext
from ray_yolo.engine.team import repeated_loss, repeated_update
from ray_yolo.engine.update import Update
from ray_yolo.engine.update_graph import GraphedUpdate
from ray_yolo.engine.worker_rows import Gathered, RowLayout
from tests.benchmarks.launch_counter import Counter
from tests.process.engine.test_network_graph import assert_equal
from tests.support.jobs import Training, build_training, make_spec
from tests.support.recorders import FailingRecorder, FunctionRecorder, UncountedRecorder, repeat_by
from tests.support.workers import run_workers

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIMISERS = {"SGD": 0.01, "AdamW": 0.001, "Adam": 0.001}
Kind = Literal["SGD", "AdamW", "Adam"]


class Tape(TorchDispatchMode):
    """The operations of a function, in order, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.entries.append((function, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def repeat(self) -> None:
        for function, args, kwargs, result in self.entries:
            for place, value in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)


class TapeRecorder:
    """Repeats a tape. The recording itself is the first repetition, because a function must not run twice."""

    def __init__(self) -> None:
        self.repeats = 0

    def warm_up(self, function: Callable[[], None]) -> None:
        raise AssertionError("a trial would change weights and averages")

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        has_run = False

        def repeat() -> None:
            nonlocal has_run
            self.repeats += 1
            if has_run:
                tape.repeat()
            has_run = True

        with Tape() as tape:
            function()
        return repeat


def training_of(folder: Path, model: str = "", skipped: int = -1, **recipe: Any) -> Training:
    """A training of two epochs of five steps, the last one smaller. Rates and momentum change in all steps of the first
    one, and the average's decay in all steps. The loss of step `skipped` is not finite."""
    spec = make_spec(folder, **{
        "batch_size": 8, "microbatch": 4, "epochs": 2,
        "schedule": {"warmup_epochs": 1, "warmup_min_batches": 0, "ema_ramp": 4}, **recipe})
    if model:
        spec = replace(spec, architecture=None, recipe=spec.recipe.model_copy(update={"model": model}))
    training = build_training(spec)
    criterion, state = training.team.criterion, training.learner.state
    terms = criterion.terms

    def planted(*arguments: Any) -> Tensor:
        found = terms(*arguments)
        return found * torch.nan if state.progress.step == skipped else found

    vars(criterion)["terms"] = planted
    return training


def with_graphs(training: Training, recorder: Any) -> Training:
    """The training whose passes and update are repeated."""
    team = training.team
    team.graphs = repeat_by(FunctionRecorder(), training.learner.model)
    team.update = GraphedUpdate(team.statistics, Recordings("update", recorder, team.complaints))
    return training


def train(training: Training) -> tuple[list[Tensor], list[bool]]:
    """Losses, norms, weights, averages and the optimiser's state after all steps; which steps were skipped."""
    learner, numbers, skipped = training.learner, list[Tensor](), list[bool]()

    def note(step: Any, rates: Any, result: loop.StepResult) -> None:
        numbers.extend((result.losses, torch.tensor(result.gradient_norm)))
        skipped.append(result.skipped)

    loop.train(*training, note, lambda epoch: not learner.state.close_epoch())
    state = [value for entry in learner.optimizer.state_dict()["state"].values() for value in entry.values()]
    tensors = [*numbers, *learner.model.state_dict().values(), *learner.ema.model.state_dict().values(), *state]
    return [value.nan_to_num(7.0) for value in tensors], skipped


@pytest.mark.parametrize(("model", "name"), [
    *(("", name) for name in OPTIMISERS), ("yolov5n", "SGD"), ("yolov8n", "AdamW"), ("yolo26n", "Adam"),
    *(pytest.param(model, name, marks=pytest.mark.slow) for model in ("yolov5n", "yolov8n", "yolo26n")
      for name in OPTIMISERS)])
def test_a_training_has_the_same_bits(tmp_path: Path, model: str, name: Kind) -> None:
    """With clipped gradients, a skipped step, warm-up, and the average's ramp."""
    recipe = {"optimizer": {"nominal_batch": 8, "clip_norm": 0.3, "name": name, "lr0": OPTIMISERS[name]}}
    plain, expected = train(training_of(tmp_path / "plain", model, skipped=7, **recipe))
    recorder = TapeRecorder()
    repeated, skipped = train(with_graphs(training_of(tmp_path / "graphs", model, skipped=7, **recipe), recorder))
    assert_equal(plain, repeated)
    assert skipped == expected == [number == 7 for number in range(10)]
    # The clips of eight steps of eight images, and the averages of all steps but the skipped one
    assert recorder.repeats == 8 - PLAIN_USES + 9 - PLAIN_USES


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_precisions_have_the_same_bits(tmp_path: Path, precision: str) -> None:
    """The scale of fp16 changes in place. Steps have one microbatch or two, because the accumulation warms up."""
    plain, expected = train(training_of(tmp_path / "plain", precision=precision))
    recorder = TapeRecorder()
    repeated, skipped = train(with_graphs(training_of(tmp_path / "graphs", precision=precision), recorder))
    assert_equal(plain, repeated)
    assert skipped == expected
    assert not any(skipped)
    assert recorder.repeats > 0


def test_settings_that_change_are_those_of_their_epoch(tmp_path: Path) -> None:
    """A new optimiser has the same weights. Its limit and the average's decay are not those of the recordings."""

    def bits(training: Training) -> list[Tensor]:
        learner, recipe = training.learner, training.learner.spec.recipe
        loop.train(*training, lambda *_: None, lambda epoch: not learner.state.close_epoch() or True)
        learner.change_settings(recipe.model_copy(update={
            "optimizer": recipe.optimizer.model_copy(update={"clip_norm": 0.1}),
            "schedule": recipe.schedule.model_copy(update={"ema_decay": 0.5})}))
        return train(training)[0]

    plain, graphs = (training_of(tmp_path / name, optimizer={"nominal_batch": 8, "clip_norm": 0.3})
                     for name in ("plain", "graphs"))
    recorder = TapeRecorder()
    assert_equal(bits(plain), bits(with_graphs(graphs, recorder)))
    assert recorder.repeats > 0


def test_a_weight_without_a_gradient_is_left_out_as_written(tmp_path: Path) -> None:
    learner, team = training_of(tmp_path)
    weights = list(learner.model.parameters())
    for weight in weights[1:]:
        weight.grad = torch.ones_like(weight)
    gathered = Gathered(torch.zeros(1, 9), torch.tensor(True))
    judged = GraphedUpdate(team.statistics, Recordings("update", TapeRecorder(), [])).judge(
        learner, gathered, RowLayout((1,), 3, has_parts=False), 1)
    assert weights[0].grad is None
    assert judged.found_inf == 0
    assert judged.numbers[0] == pytest.approx(sum(weight.numel() for weight in weights[1:]) ** 0.5)


def test_of_too_many_shapes_the_last_ones_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step of an epoch has fewer images, so there are six shapes."""
    monkeypatch.setattr(cuda_graphs, "PLAIN_USES", 0)
    monkeypatch.setattr(cuda_graphs, "MAX_RECORDINGS", 3)
    plain, _ = train(training_of(tmp_path / "plain"))
    training = with_graphs(training_of(tmp_path / "graphs"), TapeRecorder())
    assert_equal(plain, train(training)[0])
    assert len(training.team.update._recordings) == 3


def test_a_recording_that_fails_leaves_the_update_as_it_is(tmp_path: Path) -> None:
    plain, _ = train(training_of(tmp_path / "plain"))
    training = with_graphs(training_of(tmp_path / "graphs"), FailingRecorder())
    assert_equal(plain, train(training)[0])
    [complaint] = training.team.complaints
    assert complaint.startswith("no further shape of the update is recorded as a CUDA graph: CUDA out of memory.")


def test_few_launches_of_an_update_are_left_outside(tmp_path: Path) -> None:
    """The copies into memory of recordings, and one operation of the optimiser for each group of weights. The host
    waits for none."""

    def launches(training: Training) -> int:
        """Of the update of a step like all others before it."""
        learner, team = training
        count = 0
        for number, step in enumerate([learner.plan.steps(0)[0]] * (PLAIN_USES + 2)):
            batches = iter(team.loaders.train)
            team.loaders.sampler.start(0)
            summed = loop.sum_microbatches(learner, team, step, batches, number, loop.Orders)
            with Counter() as counter:
                launched = loop.update_weights(learner, team, summed, learner.plan.rates(step, 1))
                loop.finish_step(learner, team, launched)
            assert counter.waits == 0
            count = counter.count
        return count - 4  # the optimiser's marks for profilers

    assert launches(training_of(tmp_path / "plain")) == 45
    assert launches(with_graphs(training_of(tmp_path / "graphs"), UncountedRecorder())) == 9


def test_who_has_a_repeated_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One setting means the repetition of passes, loss and update."""
    monkeypatch.setattr(team_module, "CudaRecorder", lambda device: FunctionRecorder())
    learner, team = training_of(tmp_path)
    graphs = repeat_by(FunctionRecorder(), learner.model)
    for setting, repeated in (("on", (False, False)), ("loss", (True, False)), ("update", (True, True))):
        context = replace(WorkerContext(), cuda_graphs=setting)
        found = (isinstance(repeated_loss(learner, context, graphs, []), GraphedLoss),
                 isinstance(repeated_update(team.statistics, context, graphs, []), GraphedUpdate))
        assert found == repeated, setting
    assert repeats_passes("update", 2)
    assert type(repeated_update(team.statistics, WorkerContext(cuda_graphs="update"), None, [])) is Update


def worker_bits(collectives: Collectives, folder: Path) -> tuple[list[Tensor], int]:
    """The bits of a training whose update is repeated, and the number of repetitions."""
    recorder = TapeRecorder()
    context = WorkerContext(prepare_model=lambda model: wrap_in_ddp(model, torch.device("cpu")))
    spec = make_spec(folder / str(collectives.rank), batch_size=8, microbatch=4, epochs=2)
    return train(with_graphs(build_training(spec, context, collectives), recorder))[0], recorder.repeats


def test_two_workers_have_the_same_bits(tmp_path: Path) -> None:
    alone, _ = train(build_training(make_spec(tmp_path / "alone", batch_size=8, microbatch=4, epochs=2)))
    for bits, repeats in run_workers(2, worker_bits, tmp_path):
        assert_equal(alone, bits)
        assert repeats > 0
