"""Interrupted trainings end with the bits of an uninterrupted one, whichever workers continue them."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ray_yolo.checkpoints import local as checkpoint
from ray_yolo.checkpoints import writer
from ray_yolo.config.model_facts import MODELS
from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import CheckpointError, PeerDepartedError, TrainingError, WrongWeightsError, release_frames
from ray_yolo.core.events import (
    CheckpointEvent,
    EndEvent,
    EpochEvent,
    Event,
    ShardEvent,
    StartEvent,
    StepEvent,
    Summary,
    WarningEvent,
    parse_event,
)
from ray_yolo.core.structures import Orders, Progress
from ray_yolo.engine import collectives as module
from ray_yolo.engine import keeper, loop, session
from ray_yolo.engine import state as state_module
from ray_yolo.engine import team as team_module
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.devices import gpus_held
from ray_yolo.engine.evaluate import DETECTIONS_FILE, Evaluation
from ray_yolo.engine.keeper import Keeper
from ray_yolo.engine.learner import build_learner
from ray_yolo.engine.membership import Activity, Generation, Rendezvous
from ray_yolo.engine.plan import Plan
from ray_yolo.engine.session import run_session
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.state import resume
from ray_yolo.engine.team import Team
from ray_yolo.models.detector import Detector
from ray_yolo.ops.recolour import recoloured_input
from tests.support import run_log
from tests.support.jobs import TINY, make_spec
from tests.support.workers import Ordered, run_workers, wrap_model

EXACT = {"exact": True, "noval": False, "epochs": 4, "optimizer": {"nominal_batch": 32, "clip_norm": 0.3}}
STEPS = 8  # two in each epoch
BY_EPOCH = Placement(save_seconds=0)  # a machine under load takes minutes for some steps
EVERY_STEP = Placement(save_steps=1, keep_checkpoints=3)


class Killed(BaseException):
    """Simulates kill -9: the code under test does not catch it."""


def train(collectives: Collectives, spec: TrainSpec, placement: Placement, die_at: int = -1, stop_at: int = -1,
          asked_worker: int = -1) -> dict[str, Any]:
    """Train `spec`, or die right after step `die_at`, or ask worker `asked_worker` (-1: the last one) to stop at the
    `stop_at`-th step from here.

    Returns the content of the last checkpoint, and the events.
    """
    events: list[Event] = []

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, StepEvent) and event.step == die_at:
            raise Killed

    context = WorkerContext(prepare_model=lambda model: wrap_model(model, collectives))

    def stop_at_step() -> Orders:
        asked = collectives.rank == asked_worker % collectives.num_workers and context.activity.phase != "validating"
        return Orders(stop=asked and len(calls.append(None) or calls) == stop_at)

    calls: list[None] = []
    with contextlib.suppress(Killed):
        run_session(spec, context, placement, emit, Ordered(collectives, stop_at_step))
    return {"state": last_state(spec), "events": [event.model_dump_json() for event in events]}


def last_state(spec: TrainSpec) -> dict[str, Any]:
    path = spec.run_dir / "weights" / "last.pt"
    return torch.load(path, weights_only=True) if path.exists() else {}


def steps(result: dict[str, Any]) -> list[int]:
    return [event.step for event in events_of(result, StepEvent)]


def events_of(result: dict[str, Any], kind: type[run_log.Kind]) -> list[run_log.Kind]:
    events = (parse_event(line.encode()) for line in result["events"])
    return run_log.only(kind, filter(None, events))


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Every tensor has the same bits, and progress, best epoch and results are the same."""
    for part in ("model", "ema", "optimizer"):
        for (name, a), (_, b) in zip(flat(one[part]), flat(other[part]), strict=True):
            assert torch.equal(a, b), (part, name)
    metas = [json.loads(state["meta"]) for state in (one, other)]
    for key in ("progress", "best_fitness", "best_epoch", "class_maps", "recipe"):
        assert metas[0][key] == metas[1][key]
    rows = [{key: meta["last_epoch"][key] for key in ("train", "val", "metrics", "fitness", "lr")} for meta in metas]
    assert rows[0] == rows[1]


def flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Tensor]]:
    return [pair for name, value in sorted(tree.items())
            for pair in (flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)])]


def test_a_stop_in_a_validation_saves_the_last_step_at_once(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: dict[str, Any]) -> None:
    """The command ends the process if the validation takes longer than it waits."""
    spec = make_spec(tmp_path, **EXACT)
    evaluate = session.evaluate
    validations: list[int] = []

    def killed_in_the_second(*arguments: Any) -> Any:
        validations.append(1)
        if len(validations) < 2:
            return evaluate(*arguments)
        next(iter(arguments[3]))
        raise Killed

    monkeypatch.setattr(session, "evaluate", killed_in_the_second)
    context = WorkerContext()
    with pytest.raises(Killed):
        run_session(spec, context, BY_EPOCH, lambda event: None,
                    Ordered(Collectives(), lambda: Orders(stop=len(validations) == 2)))
    monkeypatch.undo()
    progress = Progress(*json.loads(last_state(spec)["meta"])["progress"])
    assert (progress.epoch, progress.step) == (1, 4)  # the second epoch is not closed
    result = train(Collectives(), spec, BY_EPOCH)
    assert steps(result)[0] == 5
    assert_same(result["state"], uninterrupted["state"])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(Collectives(), make_spec(tmp_path_factory.mktemp("uninterrupted"), **EXACT), Placement())


def test_a_start_says_who_trains_and_on_how_many_gpus(uninterrupted: dict[str, Any]) -> None:
    [start] = events_of(uninterrupted, StartEvent)
    assert (start.num_workers, start.members, start.gpus) == (1, (0,), 0)
    held = [gpus_held(torch.device("cuda", 0), gpus) for gpus in ("auto", 2, 0.5)]
    assert held == [1, 2, 0.5]


def test_killed_after_every_step_of_the_training_it_ends_with_the_same_bits(
        uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    spec, done = make_spec(tmp_path, **EXACT), []
    total = steps(uninterrupted)[-1]
    assert total == 8  # two steps in each epoch: every second kill is inside one
    for step in range(1, total + 1):
        done += steps(train(Collectives(), spec, EVERY_STEP, die_at=step))
    final = train(Collectives(), spec, EVERY_STEP)
    assert_same(final["state"], uninterrupted["state"])
    # dying after a step, before its checkpoint: each restart repeats exactly that one
    assert done == [step for n in range(1, total + 1) for step in ([n - 1, n] if n > 1 else [n])]


END_TO_END = {**{key: value for key, value in TINY.items() if key != "anchors"}, "end2end": True, "reg_max": 1,
              "head": [[[3, 4], 1, "Detect", ["nc"]]]}


def test_a_loss_that_knows_the_progress_of_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Its weights of the two heads change with each epoch."""
    uninterrupted, killed = (replace(make_spec(tmp_path / name, **EXACT), architecture=END_TO_END)
                             for name in ("uninterrupted", "killed"))
    for step in (3, 6):
        train(Collectives(), killed, EVERY_STEP, die_at=step)
    assert_same(train(Collectives(), killed, EVERY_STEP)["state"],
                train(Collectives(), uninterrupted, Placement())["state"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["yolov5n6", "yolov5nu", "yolo11n", "yolo12n", "yolo26n"])
def test_each_family_keeps_its_bits_through_kill_stop_and_more_workers(
        tmp_path: Path, model: str) -> None:
    recipe = {**EXACT, "model": model, "imgsz": 2 * MODELS[model].grid}
    uninterrupted, killed = (replace(make_spec(tmp_path / name, **recipe), architecture=None)
                             for name in ("uninterrupted", "killed"))
    train(Collectives(), killed, EVERY_STEP, die_at=3)
    on_two, _ = run_workers(2, train, killed, EVERY_STEP, -1, 2)
    train(Collectives(), killed, EVERY_STEP, die_at=6)
    on_three, *_ = run_workers(3, train, killed, EVERY_STEP)
    assert len(steps(on_two)) > 1
    assert steps(on_three)[-1] == 8
    assert len(steps(on_three)) > 1
    assert_same(last_state(killed), train(Collectives(), uninterrupted, Placement())["state"])


def test_pausing_twice_and_changing_workers_leaves_the_bits_equal(
        uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    spec, done = make_spec(tmp_path, **EXACT), []
    for epochs, workers in ((1, 1), (3, 2), (0, 1)):
        result = run_workers(workers, train, spec, replace_placement(stop_after=epochs))[0]
        done += steps(result)
        last = events_of(result, EndEvent)[-1]
        assert (last.status, last.epoch + 1) == (("stopped", epochs) if epochs else ("done", 4))
        assert [each.step for each in events_of(result, CheckpointEvent)][-1] == STEPS // 4 * (epochs or 4)
    assert done == list(range(1, STEPS + 1))
    assert_same(result["state"], uninterrupted["state"])


@pytest.mark.parametrize("nosave", [False, True])
def test_a_pause_leaves_one_checkpoint_and_a_summary_that_says_so(nosave: bool, tmp_path: Path) -> None:
    spec, events = make_spec(tmp_path, **EXACT | {"epochs": 3}), list[Event]()
    placement = replace_placement(stop_after=1, nosave=nosave)
    for _ in range(2):  # again: there is nothing to train
        summary = run_session(spec, WorkerContext(),
                              placement, events.append)
        assert summary is not None
        assert (summary.paused, summary.stopped, summary.epoch) == (True, False, 0)
    assert [path.name for path in checkpoint.newest_first(spec.run_dir)] == ["step-2"]
    ends = run_log.only(EndEvent, events)
    assert {(end.status, end.reason) for end in ends} == {("stopped", "paused after 1 epoch")}
    saved, again = [event.digest for event in run_log.only(CheckpointEvent, events)]
    assert saved == again != ""


def replace_placement(**settings: Any) -> Placement:
    return Placement.model_validate({"save_seconds": 0, "keep_checkpoints": 1, **settings})


ENDED = Summary(step=STEPS, epoch=3, best_epoch=1, best_fitness=0.5, stopped_early=False, stopped=False,
                last_epoch=None)


class Scripted(Rendezvous):
    """Worker 1 trains two steps alone. Then worker 0, which has no state, joins it."""

    lasting = False

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives)
        self.both, self.joined = collectives, Collectives()
        self.asked = self.joins = 0

    def join(self, progress: Progress | None, *, is_saved: bool = False) -> Generation | Summary:
        self.joins += 1
        if progress and progress.step == STEPS:
            return ENDED
        if self.both.rank == 1 and self.joins == 1:
            assert progress is None
            return Generation(self.joined, None, False)
        assert (progress and progress.step) == (2 if self.both.rank else None)
        self.joined = self.both
        return Generation(self.both, 1, True)

    @property
    def orders(self) -> Orders:
        self.asked += 1
        return Orders(regroup=self.asked == 2 and self.joins == 1 and self.both.rank == 1)


def train_with_a_newcomer(collectives: Collectives, spec: TrainSpec) -> dict[str, Any]:
    rendezvous, events, reported = Scripted(collectives), [], []

    def note_step(event: Event) -> None:
        events.append(event)
        if isinstance(event, StepEvent):
            reported.append(context.activity.step)

    context = WorkerContext(prepare_model=lambda model: wrap_model(model, rendezvous.joined))
    run_session(spec, context, Placement(save_steps=1), note_step, rendezvous)
    return {"state": last_state(spec), "events": [event.model_dump_json() for event in events],
            "joins": rendezvous.joins, "reported": reported}


def test_a_newcomer_takes_over_the_state_even_as_worker_0(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """DDP gives all workers the weights of worker 0."""
    first, second = run_workers(2, train_with_a_newcomer, make_spec(tmp_path, **EXACT))
    assert_same(first["state"], uninterrupted["state"])
    assert (steps(second), steps(first)) == ([1, 2], [3, 4, 5, 6, 7, 8])
    assert (second["joins"], first["joins"]) == (3, 1)  # the last time to wait for the end
    assert first["reported"] == [2, 3, 4, 5, 6, 7]  # the steps of its activity


class Parting(Rendezvous):
    """Two workers train two steps together. Then worker 0 leaves, and the other continues alone."""

    lasting = False

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives)
        self.both, self.joined = collectives, collectives
        self.asked = self.joins = 0

    def join(self, progress: Progress | None, *, is_saved: bool = False) -> Generation | None:
        self.joins += 1
        if self.joins == 1:
            return Generation(self.both, None, False)
        assert (progress and progress.step) == 2
        self.joined = Collectives()
        return Generation(self.joined, 0, False) if self.both.rank else None

    @property
    def orders(self) -> Orders:
        self.asked += 1
        return Orders(regroup=self.asked == 2 and self.both.rank == 0)


def train_with_a_leaver(collectives: Collectives, spec: TrainSpec) -> dict[str, Any]:
    rendezvous, events = Parting(collectives), []
    context = WorkerContext(prepare_model=lambda model: wrap_model(model, rendezvous.joined))
    summary = run_session(spec, context, Placement(), events.append, rendezvous)
    return {"ended": summary and summary.step, "state": last_state(spec),
            "events": [event.model_dump_json() for event in events]}


def test_a_worker_that_has_to_leave_does_so_after_the_step_and_the_others_continue(
        uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """Even if it was worker 0, which records."""
    first, second = run_workers(2, train_with_a_leaver, make_spec(tmp_path, **EXACT))
    assert first["ended"] is None
    assert second["ended"] == 8
    assert_same(second["state"], uninterrupted["state"])
    assert (steps(first), steps(second)) == ([1, 2], [3, 4, 5, 6, 7, 8])


class Given(Rendezvous):
    """Two workers train the first epoch. Then both leave at once for another program; worker 1 alone learns of it."""

    lasting = False

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives)
        self.both, self.joined = collectives, collectives
        self.asked = 0
        self.registered: list[tuple[int | None, bool]] = []

    def join(self, progress: Progress | None, *, is_saved: bool = False) -> Generation | None:
        self.registered.append((progress and progress.step, is_saved))
        return Generation(self.both, None, False) if len(self.registered) == 1 else None

    @property
    def orders(self) -> Orders:
        self.asked += 1
        ends = self.asked == 2 and self.both.rank == 1
        return Orders(save=ends, regroup=ends, leave=ends)


def give_places(collectives: Collectives, spec: TrainSpec, placement: Placement) -> dict[str, Any]:
    rendezvous = Given(collectives)
    context = WorkerContext(prepare_model=lambda model: wrap_model(model, rendezvous.joined))
    summary = run_session(spec, context, placement, lambda event: None, rendezvous)
    return {"summary": summary, "registered": rendezvous.registered}


def test_workers_whose_places_are_given_save_their_step(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """Whatever was saved before, and though the epoch is not validated yet. The next worker continues there."""
    spec = make_spec(tmp_path, **EXACT)
    first, second = run_workers(2, give_places, spec, BY_EPOCH)
    assert first["summary"] is second["summary"] is None
    assert first["registered"][1] == (2, True)
    assert second["registered"][1] == (2, False)  # it has not written it
    assert [path.name for path in (spec.run_dir / "checkpoints").iterdir()] == ["step-2"]
    events: list[Event] = []
    run_session(spec, WorkerContext(), BY_EPOCH, events.append)
    assert steps({"events": [event.model_dump_json() for event in events]}) == [3, 4, 5, 6, 7, 8]
    assert_same(last_state(spec), uninterrupted["state"])


def test_a_training_that_saves_nothing_leaves_without(tmp_path: Path) -> None:
    (found,) = run_workers(1, give_places_alone, make_spec(tmp_path, **EXACT), Placement(nosave=True))
    assert found["registered"][1] == (1, True)


def give_places_alone(collectives: Collectives, spec: TrainSpec, placement: Placement) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Given, "orders", property(lambda self: Orders(save=True, regroup=True, leave=True)))
        return give_places(collectives, spec, placement)


class Moving(Rendezvous):
    """In the second generation another worker records."""

    lasting = False

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        super().__init__(Collectives())
        self.is_busy, self.found = is_busy, list[bool]()

    def join(self, progress: Progress | None, *, is_saved: bool = False) -> Generation:
        self.found.append(self.is_busy())
        return Generation(Collectives(len(self.found) - 1), progress and 0, False)


@pytest.mark.parametrize("lost", [False, True])
def test_the_next_recording_worker_saves_after_the_last_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    """Otherwise an older checkpoint could be the later one, and the best weights be missing in the newest. After a
    loss, training waits for it only if another worker records."""
    write, rendezvous = checkpoint.save_checkpoint, Moving(lambda: made.keeper.saver.is_busy)

    def save(*given: Any) -> Path:
        time.sleep(0.3)
        return write(*given)

    monkeypatch.setattr(checkpoint, "save_checkpoint", save)
    monkeypatch.setattr(session, "form_team", lambda *_: contextlib.nullcontext())  # of a rank beyond its group
    made = session.Session(make_spec(tmp_path, **EXACT), WorkerContext(), Placement(), lambda event: None, rendezvous)
    with made.join():
        made._save_agreed()
        made.orders = Orders(regroup=not lost)
    with made.join():
        assert rendezvous.found == [False, lost]
        assert (made.is_writer, made.keeper.saver.is_busy) == (False, False)
    made.close()


class Abandoned(Rendezvous):
    """After the second step all workers drain."""

    def __init__(self, collectives: Collectives, steps: Callable[[], int]) -> None:
        super().__init__(collectives)
        self.steps = steps

    @property
    def orders(self) -> Orders:
        return Orders(save=self.steps() >= 2)


def train_abandoned(collectives: Collectives, spec: TrainSpec, nosave: bool, seconds: float) -> dict[str, Any]:
    keeper.LEAVING_SECONDS = seconds
    context, events = (
        WorkerContext(prepare_model=lambda model: wrap_model(model, collectives)),
        list[Event](),
    )
    run_session(spec, context, Placement(nosave=nosave, save_seconds=0), events.append,
                Abandoned(collectives, lambda: context.activity.step))
    return {name: [event.step for event in run_log.only(kind, events)]
            for name, kind in (("saved", CheckpointEvent), ("steps", StepEvent))}


@pytest.mark.parametrize(("nosave", "seconds", "saved"), [
    (False, 0.0, [2, 3, 4, 5, 6]), (False, 1e6, [2, 3, 4, 6]), (True, 0.0, [6])])
def test_if_all_workers_drain_they_save_at_once_and_continue_to_train(
        tmp_path: Path, nosave: bool, seconds: float, saved: list[int]) -> None:
    spec = make_spec(tmp_path, **{**EXACT, "epochs": 3})
    first, second = run_workers(2, train_abandoned, spec, nosave, seconds)
    assert first == {"saved": saved, "steps": [1, 2, 3, 4, 5, 6]}
    assert second == {"saved": [], "steps": []}


def held_resources() -> tuple[int, int, set[str]]:
    """This process's numbers of threads and open files, and its child processes except for process servers."""
    gc.collect()
    pids = [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    children = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in pids]
    return (threading.active_count(), len(os.listdir("/proc/self/fd")),
            {command for command in children if "forkserver" not in command and "resource_tracker" not in command})


def test_a_job_leaves_nothing_to_the_next_one_of_the_same_process(
    uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    """A pool's worker trains one job after another: bits, threads, files and processes are those of a first job."""
    others = [{"seed": 5, "exact": True, "threads": 2, "optimizer": {"name": "AdamW"}, "image_weights": True},
              {"seed": 6, "precision": "bf16", "multi_scale": True}]
    before = None
    for number, recipe in enumerate(others):
        spec = make_spec(tmp_path / str(number), **{"epochs": 1, **recipe})
        run_session(spec, WorkerContext(loader_processes=1, cache="ram"), Placement(), lambda event: None)
        before = before or held_resources()
    assert held_resources() == before
    spec = make_spec(tmp_path / "last", **EXACT)
    assert_same(train(Collectives(), spec, Placement())["state"], uninterrupted["state"])


class Aborted(Rendezvous):
    """Two workers train. In the `at`-th step the second is lost, and the first one's group is aborted as NCCL's is.

    With `silent` the exchanges of that step are in progress: they do not fail, but end and leave arbitrary values. The
    next exchange fails.
    """

    lasting = False

    def __init__(self, collectives: Collectives, patch: pytest.MonkeyPatch, at: int, silent: bool) -> None:
        super().__init__(collectives)
        self.both, self.joined, self.silent = collectives, collectives, silent
        self.at, self.asked, self.aborted, self.rescued = at, 0, False, 0
        module._group = module._Group(cut=torch.zeros(()))
        self._originals = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather_into_tensor")}
        for name in self._originals:
            patch.setattr(dist, name, partial(self.exchange, name))

    def exchange(self, name: str, received: Tensor, *args: Any, **options: Any) -> Any:
        if self.aborted and (self.asked > self.at or not self.silent):
            raise RuntimeError("NCCL communicator was aborted on rank 0.")
        if not self.aborted:
            work = self._originals[name](received, *args, **options)
            self.aborted = self.asked == self.at - 1 and not options  # the previous step's gather
            module._group.cut.fill_(self.aborted)
            return work
        if options:  # of gradients: arbitrary numbers
            received.fill_(7.0)
        return SimpleNamespace(wait=lambda: None)

    def join(self, progress: Progress | None, *, is_saved: bool = False) -> Generation:
        if progress is None:
            return Generation(self.both, None, False)
        assert progress.step == self.at - 1
        self.joined = Collectives()
        return Generation(self.joined, 0, False)

    @property
    def orders(self) -> Orders:
        self.asked += 1
        if self.both.rank and self.asked == self.at:
            raise Killed
        return Orders()

    def elect_saver(self) -> bool:
        self.rescued += 1
        return self.both.rank == 0


def train_beside_an_abort(collectives: Collectives, spec: TrainSpec, at: int, silent: bool) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(loop, "runs_ahead", lambda device: True)
        rendezvous, events = Aborted(collectives, patch, at, silent), []
        context = WorkerContext(prepare_model=lambda model: wrap_model(model, rendezvous.joined))
        run_session(spec, context, BY_EPOCH, events.append, rendezvous)
        return {"state": last_state(spec), "rescued": rendezvous.rescued,
                "events": [event.model_dump_json() for event in events]}
    return {}


@pytest.mark.parametrize(("at", "silent"), [(4, True), (8, True), (4, False)])
def test_an_aborted_exchange_on_gpus_changes_no_finished_step(
        tmp_path: Path, at: int, silent: bool) -> None:
    """The device was still computing the previous step. The 8th step is the last one: no exchange follows it."""
    recipe = {**EXACT, "epochs": 1, "batch_size": 4, "microbatch": 2, "optimizer": {"nominal_batch": 4}}
    uninterrupted = train(Collectives(), make_spec(tmp_path / "uninterrupted", 32, **recipe), Placement())
    survivor, nothing = run_workers(2, train_beside_an_abort, make_spec(tmp_path / "cut", 32, **recipe), at, silent)
    assert nothing == {}
    assert steps(uninterrupted) == steps(survivor) == list(range(1, 9))
    assert survivor["rescued"] == 1
    assert_same(survivor["state"], uninterrupted["state"])


class Garbled(Rendezvous):
    """Workers train. All but the last are lost before the third step's gather, which leaves `left` of their rows."""

    lasting = False

    def __init__(self, collectives: Collectives, patch: pytest.MonkeyPatch, left: str) -> None:
        super().__init__(collectives)
        self.asked, self.joins, self.left, self.stale = 0, 0, left, torch.zeros(())
        self.last = collectives.rank + 1 == collectives.num_workers
        self._gather = dist.all_gather_into_tensor
        patch.setattr(dist, "all_gather_into_tensor", self.gather)

    def gather(self, received: Tensor, own: Tensor, **options: Any) -> Any:
        if options:  # of gradients: garbage in the third step
            work = self._gather(received, own, **options)
            work.wait()
            return SimpleNamespace(wait=lambda: received.fill_(torch.inf) if self.asked == 2 and self.last else None)
        if self.asked != 3:
            self._gather(received, own)
            self.stale = received.clone()
            return None
        shape = received.shape
        received.view(torch.float32).copy_({"zeros": torch.zeros(shape), "a number": torch.full(shape, 7.0),
                                            "the rows before": self.stale.view(torch.float32)}[self.left])
        return received[-len(own):].copy_(own)

    def join(self, progress: Progress | None, *, is_saved: bool = False) -> Generation:
        self.joins += 1
        if self.joins == 2:
            raise Killed
        return Generation(Collectives(self._collectives.rank, self._collectives.num_workers), None, False)

    @property
    def orders(self) -> Orders:
        self.asked += 1
        if self.asked == 3 and not self.last:
            raise Killed
        return Orders()

    def elect_saver(self) -> bool:
        return True


def train_beside_garbage(collectives: Collectives, spec: TrainSpec, left: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(loop, "runs_ahead", lambda device: True)
        context = WorkerContext(prepare_model=lambda model: wrap_model(model, collectives))
        run_session(spec, context, Placement(), lambda event: None, Garbled(collectives, patch, left))
    return last_state(spec)


@pytest.mark.parametrize(("left", "images", "recipe"), [
    ("zeros", 32, {}), ("a number", 32, {}), ("the rows before", 32, {}), ("the rows before", 10, {}),
    ("the rows before", 32, {"precision": "fp16", "exact": False}),
    ("a number", 32, {"sync_bn": True, "exact": False})])
def test_whatever_an_aborted_gather_leaves_its_step_has_changed_nothing(
        tmp_path: Path, left: str, images: int, recipe: dict[str, Any]) -> None:
    """The survivor saves the state after the second step. With 10 images the third step has one microbatch, its own."""
    recipe = {**EXACT, "epochs": 1, "batch_size": 4, "microbatch": 2, "optimizer": {"nominal_batch": 4}, **recipe}
    uninterrupted, cut = (make_spec(tmp_path / name, images, **recipe) for name in ("uninterrupted", "cut"))
    run_workers(2, train, uninterrupted, Placement(), -1, 2)
    run_workers(2, train_beside_garbage, cut, left)
    expected, survivor = last_state(uninterrupted), last_state(cut)
    for part in ("model", "ema", "optimizer"):
        for (name, a), (_, b) in zip(flat(expected[part]), flat(survivor[part]), strict=True):
            assert torch.equal(a, b), (part, name)
    metas = [json.loads(state["meta"]) for state in (expected, survivor)]
    assert metas[0]["progress"] == metas[1]["progress"]
    assert metas[0]["scaler"] == metas[1]["scaler"]
    assert metas[0]["progress"][2] == 2


class Losing(Rendezvous):
    """The next collective operations fail as if a peer were lost. Then this worker continues alone."""

    lasting = False

    def __init__(self, spec: TrainSpec, patch: pytest.MonkeyPatch, losses: int, where: str) -> None:
        super().__init__(Collectives())
        self.spec, self.left, self.rescued = spec, losses, 0
        original = getattr(session, where)

        def lose(*args: Any) -> Any:
            if self.left and (where == "evaluate" or args[0].state.progress.step >= 3):
                self.left -= 1
                raise RuntimeError("[gloo/transport/tcp/pair.cc:545] Connection reset by peer")
            return original(*args)

        patch.setattr(session, where, lose)

    def join(self, progress: Progress | None, *, is_saved: bool = False) -> Generation:
        return Generation(Collectives(), None if progress is None else 0, False)

    def elect_saver(self) -> bool:
        self.rescued += 1
        return True


@pytest.mark.parametrize("where", ["train", "evaluate"])
def test_a_worker_that_loses_a_peer_saves_the_last_step_and_continues_with_the_next(
        uninterrupted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Also in a validation, which is then repeated."""
    spec, events = make_spec(tmp_path, **EXACT), []
    rendezvous = Losing(spec, monkeypatch, 1, where)
    regroups = iter([False, False, True])  # leaves the loop after its third step
    context = WorkerContext()

    def orders(_: Losing) -> Orders:
        return Orders(regroup=where == "train" and context.activity.phase != "validating" and next(regroups, False))

    monkeypatch.setattr(Losing, "orders", property(orders))
    run_session(spec, context, BY_EPOCH, events.append, rendezvous)
    assert_same(last_state(spec), uninterrupted["state"])
    assert [event.step for event in run_log.only(StepEvent, events)] == list(range(1, 9))
    assert rendezvous.rescued == 1
    saved = [event.step for event in run_log.only(CheckpointEvent, events)]
    assert saved[:2] == ([2, 3] if where == "train" else [2, 2])
    assert [event.images for event in run_log.only(ShardEvent, events)] == [len(spec.train)] * 4


def test_a_training_without_another_generation_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator counts the groups that fail by themselves, and the driver the workers that depart."""
    rendezvous = Losing(make_spec(tmp_path, **EXACT), monkeypatch, 100, "evaluate")
    answers = iter([True, True, False])
    monkeypatch.setattr(rendezvous, "may_regroup", lambda: next(answers))
    with pytest.raises(PeerDepartedError, match="Connection reset by peer"):
        run_session(rendezvous.spec, WorkerContext(), Placement(), lambda event: None, rendezvous)
    assert 100 - rendezvous.left == 3


def train_with_a_flipped_bit(collectives: Collectives, spec: TrainSpec, broken: int) -> str:
    """One weight of worker `broken` changes its sign after the second step. Returns what ended this worker."""
    asked: list[None] = []

    def flip() -> Orders:
        if collectives.rank == broken and len(asked.append(None) or asked) == 3:
            weight = next(made.learner.model.parameters())
            weight.data[0, 0, 0, 0] *= -1
        return Orders()

    context = WorkerContext(prepare_model=lambda model: wrap_model(model, collectives))
    made = session.Session(spec, context, Placement(save_steps=1), lambda event: None, Ordered(collectives, flip))
    try:
        made.train()
    except (WrongWeightsError, PeerDepartedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Together(Rendezvous):
    """The first group, then a group of the remaining workers; `folder` replaces the coordinator.

    During its last save worker 0 takes a second or is killed, by `fate`.
    """

    lasting = False

    def __init__(self, collectives: Collectives, folder: Path) -> None:
        super().__init__(collectives)
        self.both, self.joined = collectives, collectives
        self.ended, self.lost = folder / "ended", folder / "lost"

    def join(self, progress: Progress | None, *, is_saved: bool = False) -> Generation | Summary:
        if progress is None:
            return Generation(self.both, None, False)
        while not self.lost.exists():
            if self.ended.exists():
                return Summary.model_validate_json(self.ended.read_text())
            time.sleep(0.01)
        self.joined = Collectives()
        return Generation(self.joined, 0, False)

    def finish(self, summary: Summary) -> None:
        self.ended.with_suffix(".new").write_text(summary.model_dump_json())
        self.ended.with_suffix(".new").rename(self.ended)


def train_to_a_last_save(collectives: Collectives, spec: TrainSpec, fate: str) -> dict[str, Any]:
    rendezvous, events, write = Together(collectives, spec.run_dir.parent), list[Event](), checkpoint.save_checkpoint

    def save(run_dir: Path, state: dict[str, Any], step: int, *rest: Any) -> Path:
        if step == STEPS and collectives.rank == 0:
            time.sleep(1.0)
            if fate == "killed":
                raise Killed
        return write(run_dir, state, step, *rest)

    context = WorkerContext(prepare_model=lambda model: wrap_model(model, rendezvous.joined))
    result: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(checkpoint, "save_checkpoint", save)
        summary = run_session(spec, context, Placement(), events.append, rendezvous)
        result = {"step": summary and summary.step, "saved": checkpoint.steps_of_weights(spec.run_dir),
                  "state": last_state(spec)}
    if not result:
        rendezvous.lost.touch()
    return {**result, "events": [event.model_dump_json() for event in events]}


@pytest.mark.parametrize("fate", ["slow", "killed"])
def test_no_worker_says_that_training_has_ended_before_its_last_checkpoint_is_there(
        uninterrupted: dict[str, Any], tmp_path: Path, fate: str) -> None:
    """If the worker that writes it is killed, the other one, which has the same state, writes it."""
    spec = make_spec(tmp_path, **EXACT)
    first, second = run_workers(2, train_to_a_last_save, spec, fate)
    assert (second["step"], second["saved"]["last"]) == (STEPS, STEPS)
    assert second["saved"] == checkpoint.steps_of_weights(spec.run_dir)
    checkpoint.check_weights(spec.run_dir, STEPS)
    assert_same(second["state"], uninterrupted["state"])
    [end] = [event for result in (first, second) for event in events_of(result, EndEvent)]
    assert (end.status, end.step) == ("done", STEPS)
    if fate == "killed":
        [_, start] = [event for result in (first, second) for event in events_of(result, StartEvent)]
        assert (start.step, start.regrouped, start.num_workers) == (STEPS, True, 1)


class Outvoted(Together):
    """Three workers, of which the second leaves. The others form a group of two, without a state."""

    def __init__(self, collectives: Collectives, folder: Path) -> None:
        super().__init__(collectives, folder)
        self.progress: list[Progress | None] = []

    def join(self, progress: Progress | None, *, is_saved: bool = False) -> Generation | Summary:
        self.progress.append(progress)
        if len(self.progress) == 1:
            return Generation(self.both, None, False)
        if progress and progress.step == STEPS:
            return super().join(progress)
        dist.destroy_process_group()
        place, number = self.ended.parent / "rendezvous", self.both.rank // 2
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=number, world_size=2)
        self.joined = Collectives(number, 2)
        return Generation(self.joined, None, False)


def train_beside_a_flipped_bit(collectives: Collectives, spec: TrainSpec, placement: Placement) -> dict[str, Any]:
    """One weight of worker 1 changes its sign after the third step, which is detected after the fourth."""
    rendezvous, events, asked = Outvoted(collectives, spec.run_dir.parent), list[Event](), list[None]()

    def flip() -> Orders:
        if collectives.rank == 1 and len(asked.append(None) or asked) == 4:
            next(made.learner.model.parameters()).data[0, 0, 0, 0] *= -1
        return Orders()

    context = WorkerContext(prepare_model=lambda model: wrap_model(model, rendezvous.joined))
    made, summary = session.Session(spec, context, placement, events.append, rendezvous), None
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(WrongWeightsError):
        patch.setattr(Outvoted, "orders", property(lambda self: flip()))
        summary = made.train()
    made.close()
    return {
        "step": summary and summary.step,
        "state": last_state(spec),
        "joined": [*map(bool, rendezvous.progress)],
        "events": [event.model_dump_json() for event in events],
    }


@pytest.mark.parametrize("placement", [BY_EPOCH, Placement(nosave=True)], ids=["saved", "unsaved"])
def test_the_steps_to_which_a_wrong_worker_contributed_are_undone(
        uninterrupted: dict[str, Any], tmp_path: Path, placement: Placement) -> None:
    """Training returns to the newest checkpoint on which all agreed; without one to the first step."""
    first, wrong, third = run_workers(3, train_beside_a_flipped_bit, make_spec(tmp_path, **EXACT), placement)
    assert (first["step"], wrong["step"], third["step"]) == (STEPS, None, STEPS)
    assert first["joined"] == [False, False]
    assert third["joined"] == [False, False, True]  # the last time to wait for the end
    assert [event.step for event in events_of(first, StartEvent)] == [0, 0 if placement.nosave else 2]
    assert ("the workers' weights differ after step 4: training goes back to the newest checkpoint on which they agreed"
            in [event.message for event in events_of(first, WarningEvent)])
    assert_same(first["state"], uninterrupted["state"])


class Parted(Rendezvous):
    """Joins workers that are at the same step."""

    def join(self, progress: Progress | None, *, is_saved: bool = False) -> Generation:
        return Generation(self._collectives, None if progress is None else 0, False)


def join_with_other_weights(collectives: Collectives, spec: TrainSpec, wrong: int) -> tuple[str, list[str]]:
    made = session.Session(
        spec,
        WorkerContext(prepare_model=lambda model: wrap_model(model, collectives)),
        Placement(keep_checkpoints=1),
        lambda event: None,
        Parted(collectives),
    )
    state = made.learner.state
    with made.join():
        state.progress = Progress(0, 32, 3)
    if collectives.rank == 0:
        state.progress = Progress(0, 16, 2)
        made._save_agreed()
        state.progress = Progress(0, 32, 3)
        made._save()  # after a peer was lost: it was not compared
        made.keeper.saver.wait(needed=True)
    made.check.agreed = 2 if collectives.rank else -1  # the recording worker has just joined
    if collectives.rank == wrong:
        next(made.learner.model.parameters()).data[0, 0, 0, 0] *= -1
    try:
        with made.join():
            pass
    except (WrongWeightsError, PeerDepartedError) as error:
        return type(error).__name__, [path.name for path in checkpoint.newest_first(spec.run_dir)]
    return "nothing", []


def test_rejoining_workers_compare_their_weights(tmp_path: Path) -> None:
    """A checkpoint that one of them saved meanwhile was not compared: it is removed."""
    spec = make_spec(tmp_path, **EXACT)
    results = run_workers(3, join_with_other_weights, spec, 1)
    assert [name for name, _ in results] == ["PeerDepartedError", "WrongWeightsError", "PeerDepartedError"]
    assert results[0][1] == ["step-2"]


def train_by_time(collectives: Collectives, spec: TrainSpec, placement: Placement, waited: float) -> dict[str, Any]:
    """Each step takes 20 s on a fake clock, and training waits `waited` seconds for each save."""
    events, agreed, now = list[Event](), list[int](), [0.0]
    context = WorkerContext(prepare_model=lambda model: wrap_model(model, collectives))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "time", SimpleNamespace(monotonic=lambda: now[0]))
        made = session.Session(spec, context, placement, events.append, Rendezvous(collectives))
        made.keeper.saver.waited = waited
        after_step, save = made.after_step, made._save_agreed

        def slow_after_step(*args: Any) -> None:
            now[0] += 20.0
            after_step(*args)

        def note() -> None:
            agreed.append(made.learner.state.progress.step)
            save()
            made.keeper.saver.wait()
            made.keeper.saver.waited = waited

        patch.setattr(made, "after_step", slow_after_step)
        patch.setattr(made, "_save_agreed", note)
        made.train()
    return {"saved": [event.step for event in run_log.only(CheckpointEvent, events)], "agreed": agreed}


@pytest.mark.parametrize(("asked", "waited", "nosave", "saved"), [
    ("auto", 0.25, False, [4, 8]),  # a minute: step 4 begins after one, and is saved
    ("auto", 1.0, False, [6, 8]),  # a hundredth of the time
    (25.0, 1.0, False, [3, 6, 8]), (15.0, 1.0, False, [2, 4, 6, 8]), (0.0, 0.25, False, [8]), (15.0, 0.25, True, [8])])
def test_checkpoints_by_time_are_agreed_on_by_all_workers(
        tmp_path: Path, asked: Any, waited: float, nosave: bool, saved: list[int]) -> None:
    recipe = {**EXACT, "epochs": 1, "batch_size": 4, "microbatch": 2, "optimizer": {"nominal_batch": 4}}
    spec = make_spec(tmp_path, 32, **recipe)
    first, second = run_workers(2, train_by_time, spec, Placement(save_seconds=asked, nosave=nosave), waited)
    agreed = [] if nosave else saved
    assert (first, second) == ({"saved": saved, "agreed": agreed}, {"saved": [], "agreed": agreed})


@pytest.mark.parametrize("noval", [False, True])
def test_a_worker_that_waits_for_its_saver_says_that_it_saves(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noval: bool) -> None:
    """Others wait for it as long as a save may take, not only as long as a step."""
    context, phases, wait = WorkerContext(), list[str](), writer.Saver.wait

    def note(self: writer.Saver, **how: bool) -> None:
        phases.append(context.activity.phase)
        wait(self, **how)

    monkeypatch.setattr(writer.Saver, "wait", note)
    run_session(make_spec(tmp_path, **{**EXACT, "epochs": 2, "noval": noval}), context, Placement(), lambda event: None)
    assert set(phases) == {"saving"}


def test_colours_that_are_left_to_the_device_give_the_same_training(
        uninterrupted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; here the device is the CPU."""
    monkeypatch.setattr(team_module, "recolours_on_device", lambda recipe, device: True)
    recoloured: list[int] = []
    monkeypatch.setattr(team_module, "recoloured_input", lambda tables, pixels, *others: recoloured.append(
        len(pixels)) or recoloured_input(tables, pixels, *others))
    spec = make_spec(tmp_path, **EXACT)
    run_session(spec, WorkerContext(), BY_EPOCH, lambda event: None, Rendezvous(Collectives()))
    assert_same(last_state(spec), uninterrupted["state"])
    assert sum(recoloured) == spec.recipe.epochs * len(spec.train)
    team_module.colour_tables_on.cache_clear()


@pytest.mark.parametrize(("workers", "ended"), [
    (3, ["PeerDeparted", "WrongWeights", "PeerDeparted"]), (2, ["WrongWeights", "WrongWeights"])])
def test_a_flipped_bit_is_found_before_a_checkpoint(
        tmp_path: Path, workers: int, ended: list[str]) -> None:
    """The majority decides; of two workers either could be wrong."""
    spec = make_spec(tmp_path, **EXACT)
    results = run_workers(workers, train_with_a_flipped_bit, spec, 1)
    assert [text.partition("Error: ")[0] for text in results] == ended
    assert "after step 3 are not those" in results[1]
    # the others may have saved the state on which they agree
    assert next(checkpoint.newest_first(spec.run_dir)).name in ("step-2", "step-3")[: workers - 1]


def test_scheduled_changes_of_settings_apply_through_kills_and_on_other_workers(
        uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    changes = ["1: lr0=0.001 mosaic=0 box=0.2 schedule.ema_decay=0.9", "3: lr0=0.002 weight_decay=0.05"]
    undisturbed, killed = (make_spec(tmp_path / name, **EXACT, changes=changes) for name in ("undisturbed", "killed"))
    expected = train(Collectives(), undisturbed, Placement())
    for step in range(1, steps(expected)[-1] + 1):  # at step 2 and step 6 between two settings
        train(Collectives(), killed, EVERY_STEP, die_at=step)
    recorder, *_ = run_workers(2, train, killed, EVERY_STEP)
    assert_same(recorder["state"], expected["state"])
    rates = {event.epoch: event.lr[0] for event in events_of(expected, StepEvent)}
    assert [rates[epoch] / (0.01 + 0.99 * (1 - epoch / 4)) for epoch in range(4)] == pytest.approx(
        [1e-2, 1e-3, 1e-3, 2e-3])
    with pytest.raises(AssertionError):
        assert_same(expected["state"], uninterrupted["state"])


def test_stopping_after_every_step_repeats_none_and_keeps_the_bits(
        uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    spec, done = make_spec(tmp_path, **EXACT), []
    for number in range(steps(uninterrupted)[-1]):  # every second one is the last of its epoch
        if number % 3:
            done += steps(train(Collectives(), spec, Placement(), stop_at=1))
        else:  # the last worker is asked, and all stop
            done += steps(run_workers(2, train, spec, Placement(), -1, 1)[0])
    assert_same(train(Collectives(), spec, Placement())["state"], uninterrupted["state"])
    assert done == steps(uninterrupted)


def test_a_stop_request_to_a_worker_that_never_has_a_microbatch_stops_all(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, num_images=12, **EXACT)  # one step of three microbatches an epoch
    plan = Plan(spec.recipe, len(spec.train))
    [step] = plan.steps(0)
    assert plan.shard(step, 0, 4) == []
    assert steps(run_workers(4, train, spec, EVERY_STEP, -1, 2, 0)[0]) == [1, 2]


def test_one_small_image_is_trained_at_every_scale(tmp_path: Path) -> None:
    """At half of 64 pixels the map of stride 32 would have one cell: one value per channel, which BatchNorm refuses."""
    deep = {**TINY, "backbone": [*TINY["backbone"], [-1, 1, "Conv", [32, 3, 2]]],
            "head": [[[4, 5], 1, "Detect", ["nc", "anchors"]]]}
    spec = make_spec(tmp_path, num_images=17, multi_scale=True, epochs=8)  # each epoch's last microbatch is one image
    assert steps(train(Collectives(), replace(spec, architecture=deep), Placement()))[-1] == 16


@pytest.mark.parametrize("save_steps", [0, 2, 3])
def test_at_most_the_interval_between_checkpoints_is_repeated(
        uninterrupted: dict[str, Any], tmp_path: Path, save_steps: int) -> None:
    spec, placement = make_spec(tmp_path, **EXACT), Placement(save_steps=save_steps, save_seconds=0)
    first = train(Collectives(), spec, placement, die_at=6)
    second = train(Collectives(), spec, placement)
    assert_same(second["state"], uninterrupted["state"])
    saved = [event.step for event in events_of(first, CheckpointEvent)]
    assert steps(second)[0] == max(saved) + 1
    assert len(steps(first)) + len(steps(second)) <= len(steps(uninterrupted)) + 2


@pytest.mark.smoke
def test_other_numbers_of_workers_continue_with_the_same_bits(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    spec = make_spec(tmp_path, **EXACT)
    train(Collectives(), spec, Placement(save_steps=1), die_at=4)
    recorder, *_ = run_workers(3, train, spec, Placement(save_steps=1))
    assert_same(recorder["state"], uninterrupted["state"])


def test_a_damaged_newest_checkpoint_costs_steps_but_not_the_result(
    uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    spec = make_spec(tmp_path, **EXACT)
    train(Collectives(), spec, EVERY_STEP, die_at=6)
    newest = next(checkpoint.newest_first(spec.run_dir))
    (newest / "state.pt").write_bytes(b"torn")
    result = train(Collectives(), spec, EVERY_STEP)
    assert any("set aside" in event.message for event in events_of(result, WarningEvent))
    assert_same(result["state"], uninterrupted["state"])


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start(
        uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    spec = make_spec(tmp_path, **EXACT)
    train(Collectives(), spec, EVERY_STEP, die_at=4)
    for state in spec.run_dir.glob("checkpoints/*/state.pt"):
        state.write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        train(Collectives(), spec, EVERY_STEP)
    assert {path.name for path in (spec.run_dir / "checkpoints").iterdir()} == {"step-1", "step-2", "step-3"}
    (spec.run_dir / "checkpoints").rename(spec.run_dir / "aside")
    with pytest.raises(CheckpointError, match="has no checkpoint, although this run has saved some"):
        train(Collectives(), spec, EVERY_STEP)  # `weights` still shows one: nothing starts at step 0 unasked
    (spec.run_dir / "weights").rename(spec.run_dir / "weights-aside")
    again = train(Collectives(), spec, EVERY_STEP)
    assert steps(again) == steps(uninterrupted)
    assert_same(again["state"], uninterrupted["state"])


def test_a_checkpoint_of_another_recipe_is_not_trained_on(tmp_path: Path) -> None:
    train(Collectives(), make_spec(tmp_path, **EXACT), EVERY_STEP, die_at=3)
    with pytest.raises(CheckpointError, match="was trained by another recipe"):
        train(Collectives(), make_spec(tmp_path, **{**EXACT, "seed": 1}), EVERY_STEP)


def test_a_checkpoint_written_but_not_published_is_published_at_the_next_start(
        uninterrupted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(tmp_path, **EXACT)
    train(Collectives(), spec, EVERY_STEP, die_at=8)

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "link", die)
        train(Collectives(), spec, EVERY_STEP)
    again = train(Collectives(), spec, EVERY_STEP)
    assert steps(again) == []
    assert_same(again["state"], uninterrupted["state"])
    best = json.loads(torch.load(spec.run_dir / "weights" / "best.pt", weights_only=True)["meta"])
    assert best["progress"][0] == json.loads(uninterrupted["state"]["meta"])["best_epoch"] + 1
    checkpoint.check_weights(spec.run_dir, STEPS)


def test_a_finished_training_is_not_trained_again(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    spec = make_spec(tmp_path, **EXACT)
    train(Collectives(), spec, Placement())
    again = train(Collectives(), spec, Placement())
    assert steps(again) == []
    assert events_of(again, Event)[-1].type == "end"


def test_early_stopping_counts_patience_across_restarts(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, noval=False, patience=2, epochs=20, optimizer={"lr0": 1e-6},
                   schedule={"warmup_epochs": 0, "ema_decay": 0.0})
    result = train(Collectives(), spec, Placement())
    [end] = events_of(result, EndEvent)
    assert end.stopped_early
    assert end.epoch == end.best_epoch + 2
    again = train(Collectives(), spec, Placement())
    assert steps(again) == []
    assert events_of(again, EndEvent)[-1].epoch == end.epoch


def test_best_weights_and_patience_go_by_the_recipes_objective(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recall is highest in the second epoch and mAP rises until the end."""
    recall = iter([0.1, 0.9, 0.8, 0.7, 0.6, 0.5])
    validate = session.Session.validate

    def measured(self: session.Session, team: Team) -> Evaluation:
        evaluation = validate(self, team)
        epoch = self.learner.state.progress.epoch / 10
        return replace(evaluation, metrics=replace(evaluation.metrics, recall=next(recall), map50=epoch, map=epoch))

    monkeypatch.setattr(session.Session, "validate", measured)
    spec = make_spec(tmp_path, noval=False, patience=2, epochs=6, objective={"recall": 1, "map50": 0, "map50_95": 0})
    result = train(Collectives(), spec, Placement())
    assert [event.fitness for event in events_of(result, EpochEvent)] == [0.1, 0.9, 0.8, 0.7]
    assert [event.best for event in events_of(result, EpochEvent)] == [True, True, False, False]
    [end] = events_of(result, EndEvent)
    assert (end.best_epoch, end.reason) == (1, "early stop")
    best = torch.load(spec.run_dir / "weights" / "best.pt", weights_only=True)
    assert json.loads(best["meta"])["progress"][0] == 2


def test_best_epoch_and_patience_restart_at_a_change(tmp_path: Path) -> None:
    def end(name: str, **recipe: Any) -> EndEvent:
        spec = make_spec(tmp_path / name, noval=False, patience=2, epochs=20, optimizer={"lr0": 1e-6},
                       schedule={"warmup_epochs": 0, "ema_decay": 0.0}, **recipe)
        return events_of(train(Collectives(), spec, Placement()), EndEvent)[-1]

    uninterrupted = end("uninterrupted")
    changed = end("changed", changes=[f"{uninterrupted.best_epoch + 1}:"])  # a restart of the count alone
    assert changed.best_epoch > uninterrupted.best_epoch
    assert changed.epoch == changed.best_epoch + 2


def test_loading_an_optimiser_does_not_train_the_loaded_tensors(tmp_path: Path) -> None:
    """Optimizer.load_state_dict keeps references to its tensors, so restore must pass copies."""
    from ray_yolo.engine.state import restore

    spec = make_spec(tmp_path, **EXACT)
    train(Collectives(), spec, Placement(), die_at=3)
    saved = last_state(spec)
    before = {name: value.clone() for name, value in flat(saved["optimizer"])}
    learner = build_learner(spec, WorkerContext())
    restore(learner, saved)
    for group in learner.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    learner.optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in flat(saved["optimizer"]))


def test_full_storage_is_tolerated_for_a_while_then_training_fails_with_a_remedy(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_checkpoint", refuse)
    monkeypatch.setattr(writer, "MISSED_SECONDS", 0.0)
    events: list[Event] = []
    with pytest.raises(TrainingError, match="free or repair the storage"):
        run_session(make_spec(tmp_path), WorkerContext(), Placement(), events.append)
    types = [event.type for event in events if isinstance(event, (EpochEvent, WarningEvent, EndEvent))]
    assert types == ["epoch", "warning"] * 3


@pytest.mark.parametrize("placement", [Placement(), Placement(nosave=True)])
def test_a_failed_last_checkpoint_fails_the_run_which_can_then_be_continued(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: Placement) -> None:
    spec = make_spec(tmp_path, **{**EXACT, "epochs": 2})
    expected = train(Collectives(), make_spec(tmp_path / "uninterrupted", **{**EXACT, "epochs": 2}), Placement())
    save = checkpoint.save_checkpoint

    def refuse_the_last(run_dir: Path, state: dict[str, Any], step: int, *rest: Any) -> Path:
        if step == steps(expected)[-1]:
            raise OSError(28, "No space left on device")
        return save(run_dir, state, step, *rest)

    monkeypatch.setattr(checkpoint, "save_checkpoint", refuse_the_last)
    with pytest.raises(TrainingError, match=r"step 4 .*could not be written.*No space left.*run the same"):
        train(Collectives(), spec, placement)
    monkeypatch.undo()
    result = train(Collectives(), spec, placement)
    assert steps(result) == ([1, 2, 3, 4] if placement.nosave else [3, 4])
    assert_same(result["state"], expected["state"])


@pytest.mark.root
def test_on_a_full_disk_a_training_fails_and_ends_with_the_same_bits_once_there_is_room(tmp_path: Path) -> None:
    spec, uninterrupted = (make_spec(tmp_path / name, **{**EXACT, "epochs": 2}) for name in ("full", "uninterrupted"))
    expected = train(Collectives(), uninterrupted, Placement())
    size = (uninterrupted.run_dir / "weights" / "last.pt").stat().st_size
    spec.run_dir.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={10 * size}", "tmpfs", str(spec.run_dir)], check=True)
    try:
        ballast = spec.run_dir / "ballast"
        ballast.write_bytes(bytes(9 * size))
        with pytest.raises(TrainingError, match=r"No space left on device\); free or repair"):
            train(Collectives(), spec, Placement())
        with pytest.raises(TrainingError):
            checkpoint.check_weights(spec.run_dir, STEPS // 2)
        ballast.unlink()
        assert_same(train(Collectives(), spec, Placement())["state"], expected["state"])
        checkpoint.check_weights(spec.run_dir, STEPS // 2)
    finally:
        subprocess.run(["umount", str(spec.run_dir)], check=True)


def test_a_loss_that_stays_non_finite_ends_training_and_touches_no_weight(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(tmp_path)
    events: list[Event] = []
    made = session.Session(spec, WorkerContext(), Placement(nosave=True), events.append, Rendezvous(Collectives()))
    terms = made.learner.criterion.terms
    monkeypatch.setattr(made.learner.criterion, "terms", lambda *args: terms(*args) * float("nan"))
    before = [value.clone() for value in made.learner.model.state_dict().values()]
    with pytest.raises(TrainingError, match="10 times in a row"):
        made.train()
    after = made.learner.model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert sum(event.skipped for event in run_log.only(StepEvent, events)) == 10


def diverging_forward(*args: Any) -> tuple[Tensor, Tensor]:
    loss, terms = FORWARD(*args)
    return loss * float("nan"), terms * float("nan")


FORWARD = loop.forward


def living(least_numbers: int = 1000) -> list[int]:
    """The models, and the tensors of at least `least_numbers` numbers, that this process holds."""
    gc.unfreeze()  # a frozen object is not among those that can be listed
    gc.collect()
    kinds = [type(each) for each in gc.get_objects()]
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    return [kinds.count(Detector), sum(tensor.numel() >= least_numbers for tensor in tensors)]


def train_one_after_another(collectives: Collectives, specs: list[TrainSpec]) -> list[list[int]]:
    """What is alive after each of these trainings; every second one diverges."""
    alive = []
    for number, spec in enumerate(specs):
        with pytest.MonkeyPatch.context() as patch:
            if number % 2:
                patch.setattr(loop, "forward", diverging_forward)
            try:
                train(collectives, spec, Placement(nosave=True))
            except TrainingError as error:
                assert number % 2
                release_frames(error)
        alive.append(living())
    return alive


@pytest.mark.parametrize("num_workers", [1, 2])
def test_no_model_stays_after_ten_trainings_that_end_and_diverge(tmp_path: Path, num_workers: int) -> None:
    specs = [make_spec(tmp_path / str(number), epochs=1 + 3 * (number % 2)) for number in range(10)]
    for alive in run_workers(num_workers, train_one_after_another, specs):
        assert [models for models, _ in alive] == [alive[0][0]] * 10
        assert max(tensors for _, tensors in alive) <= alive[0][1]
    if num_workers > 1:
        assert alive[0][0] == 0  # here a process of its own, without models of other tests


class SlowStore:
    """Holds a checkpoint, of which each download takes longer than a collective may wait."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def download(self, run_dir: Path, step: int | None = None) -> list[str]:
        time.sleep(self.seconds)
        return []


def resume_slowly(collectives: Collectives, spec: TrainSpec) -> list[Any]:
    """The step to resume from, and the longest time in which the activity did not move."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_module, "MEETING_SECONDS", 0.2)
        module._set_group_timeout(None, 1.0)
        store: Any = SlowStore(2.0 + collectives.rank)
        activity = Activity()
        context = WorkerContext(activity=activity, stored=store)
        learner = build_learner(spec, context)
        over, longest = threading.Event(), [0.0]

        def watch() -> None:
            while not over.wait(0.05):
                longest[0] = max(longest[0], time.monotonic() - activity.since)

        activity.enter("joining")
        threading.Thread(target=watch, daemon=True).start()
        resume(learner, context, collectives, lambda text: None)
        over.set()
        return [learner.state.progress.step, longest[0]]


def test_a_download_may_take_longer_than_a_collective_and_a_phase(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, epochs=1)
    train(Collectives(), spec, Placement())
    for step, longest in run_workers(2, resume_slowly, spec):
        assert step == 3
        assert longest < 1.0


def test_a_save_that_was_requested_for_an_abandoned_step_is_requested_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made = session.Session(make_spec(tmp_path), WorkerContext(), Placement(save_seconds=60), lambda event: None,
                           Rendezvous(Collectives()))
    with made.join():
        assert not made._poll_orders().save
        now[0] += 61
        assert [made._poll_orders().save for _ in range(2)] == [True, False]  # once for each save
    with made.join():  # the step was abandoned before the save
        assert [made._poll_orders().save for _ in range(2)] == [True, False]
    made._save()
    now[0] += 59
    assert not made._poll_orders().save
    made.close()


def test_detections_are_written_atomically_without_stopping_the_training(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(tmp_path)
    spec.run_dir.mkdir(exist_ok=True)
    free, stored = threading.Event(), list[np.ndarray]()
    store: Any = SimpleNamespace(put_file=lambda path: stored.append(np.load(path)) if free.wait(30) else None)
    made = Keeper(spec, WorkerContext(stored=store), Placement(), lambda event: None)
    old, new = np.zeros((3, 8)), np.ones((5, 8))
    np.save(spec.run_dir / DETECTIONS_FILE, old)
    save = np.save

    def save_half(file: Any, *arguments: Any, **options: Any) -> None:
        save(file, *arguments, **options)
        assert (np.load(spec.run_dir / DETECTIONS_FILE) == old).all()

    monkeypatch.setattr(np, "save", save_half)
    evaluation: Any = SimpleNamespace(detections=new)
    made.keep_detections(evaluation)  # returns while the upload waits
    assert not stored
    free.set()
    made.await_detections()
    assert (stored[0] == new).all()
    assert (np.load(spec.run_dir / DETECTIONS_FILE) == new).all()
    assert not list(spec.run_dir.glob(".*"))
