"""Sweeps and comparisons that cannot start or go on: the space itself is valid, something around it does not fit."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray

from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.core.errors import CheckpointError, ConfigError, InputError, TrainingError
from ray_yolo.runs.run_dir import begin_run
from ray_yolo.runs.run_record import SweepRecord
from ray_yolo.tune import runner, tuner
from ray_yolo.tune.evolution import Gene, Space, propose
from ray_yolo.tune.latency import networks
from ray_yolo.tune.ledger import Ledger, read_ledger
from ray_yolo.tune.listing import list_project
from ray_yolo.tune.pairs import PairSchedule
from ray_yolo.tune.ray_adapter import TaskCallback
from ray_yolo.tune.schedule import Outcome, Task
from ray_yolo.tune.sides import Recipes
from ray_yolo.tune.tuner import Sweep, concurrent_trials, search
from tests.support import schedules
from tests.support.messages import Refusal
from tests.support.sweeps import SPACE, make_sweep

STARTS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("", {"noval": True}, ConfigError,
     "noval: the scheduler ladder judges trials by the validation of every epoch; leave --noval out, or use scheduler: "
     "none"),
    ("batch_size: {type: choice, values: [16, 4]}\noptimizer.nominal_batch: {type: fixed, value: 4}", {}, ConfigError,
     "num_workers: 2 workers, but a step of batch size 4 and microbatch 4 has only 1 part; use 1 worker, a "
     "smaller --microbatch, a larger --batch-size, or --sync-bn"),
    ("model: {type: choice, values: [yolov5n, yolov5q]}", {}, ConfigError,
     "model: 'yolov5q' is unknown; did you mean yolov5n? Known: yolov5n, …, or a YAML file"),
    ("model: {type: choice, values: [yolov5n, tiny.yaml]}", {}, ConfigError,
     "model: tiny.yaml: give an absolute path; each trial has its own working folder"),
    ("weights: {type: choice, values: ['', none.pt]}", {}, CheckpointError,
     "…/here/none.pt: no such weights file; give a .pt file of a run, of YOLOv5 or of Ultralytics, or a .safetensors "
     "file"),
    ("search: {objective: {mAP50: 1}}", {"objective": {"recall": 1}}, ConfigError,
     "objective: a sweep and its trials maximise the search.objective of the space; write it there, and leave "
     "objective out"),
]
"""Spaces above lr0 and scale, over a recipe, some of whose trials would fail."""

PLACEMENTS: list[tuple[dict[str, Any], str]] = [
    ({"resume": "runs/train/exp"},
     "resume: a sweep continues by its own command, and never a training; leave it out"),
    ({"stop_after": 2}, "stop_after: a sweep decides how far its trainings go; leave it out"),
    ({"max_hours": 2.0}, "max_hours: the time of a sweep is sweep.hours (--hours); leave it out"),
    ({"num_workers": 4},
     "num_workers: each training of a sweep has as many workers as workers_per_trial says, 2; leave num_workers out"),
]
"""Settings of a single training."""

GRID = Space((Gene("n", "int", 1, 3),), ({"n": 1},), "grid")


def _start(space: str, recipe: dict[str, Any]) -> None:
    search(make_sweep(Path(), f"{space}\n{SPACE}", workers_per_trial=2, recipe=recipe), quiet=True)


def _start_placed(placement: dict[str, Any]) -> None:
    config = make_sweep(Path(), workers_per_trial=2)
    tuner.dry_run(config.model_copy(update={"placement": config.placement.model_copy(update=placement)}))


def _start_a_grid_from_old_results() -> None:
    Path("hyp.yaml").write_text("lr0: 0.02\n")
    space = "search: {algorithm: grid}\nlr0: {type: choice, values: [0.01, 0.02]}\n"
    tuner.dry_run(make_sweep(Path(), space, warm_start="hyp.yaml"))


def continue_on(virtual_slots: int) -> None:
    """Continue a sweep of three virtual slots with this setting.

    Raises:
        InterruptedError: if the sweep would continue.
    """
    config = make_sweep(Path(), virtual_slots=virtual_slots)
    run = begin_run(config.placement, SweepRecord(digest=recipe_digest(config.recipe), space="", trials=1))
    run.release()
    schedules.run_sweep(run.folder / "ledger.jsonl", 1)
    with mock.patch.object(tuner.cluster, "connect", side_effect=InterruptedError):
        search(config, quiet=True)


def _start_over_the_limit() -> None:
    found = [(0, {"a": 31.0, "b": 52.0})]
    with mock.patch.multiple(tuner, concurrent_trials=lambda *_: 1, check_cluster=lambda *_: [],
                             map_on_workers=lambda *_, **__: found), \
            mock.patch.object(tuner.cluster, "connect", return_value=0.0):
        _start("search: {limit: {latency_ms: 20}}", {})


def _measure_many() -> None:
    models = Gene("model", "choice", values=("yolov5n", "yolov8n"))
    sizes = Gene("imgsz", "choice", values=tuple(range(64, 32 * 53, 32)))
    networks(Space((models, sizes), ()), Recipe(model="yolov5n", imgsz=64))


def _find_room(there: dict[str, float], gpus: float) -> None:
    config = make_sweep(Path(), workers_per_trial=2)
    with mock.patch.multiple(ray, is_initialized=lambda: True, cluster_resources=lambda: there):
        concurrent_trials(config, gpus)


def _append_to_a_broken_disk() -> None:
    ledger = schedules.open_ledger(Path("ledger.jsonl"))
    with mock.patch.object(os, "fsync", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))):
        schedules.propose(ledger)


def _append_after_the_end() -> None:
    schedules.propose(schedules.run_sweep(Path("ledger.jsonl"), 1))


def _restore_without_the_first_trial() -> None:
    begun, _, *lines = read_ledger(schedules.run_sweep(Path("ledger.jsonl"), 2).path)
    begun.schedule().restore(lines)


def _tear() -> None:
    path = schedules.run_sweep(Path("ledger.jsonl"), 1).path
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:30], *lines[2:], ""]))
    read_ledger(path)


def _continue_with_other_labels() -> None:
    for labels in ("ab", "cd"):
        identity = {"validation set": labels}
        Ledger(Path("ledger.jsonl"), schedules.sweep_of().model_copy(update={"identity": identity})).close()


def _fail_in_a_pair() -> None:
    recipe = Recipe(epochs=3, batch_size=8)
    schedule = PairSchedule(Recipes(recipe, recipe), lambda line: None, lambda: 1)
    task = schedule.next(lambda: True)
    assert isinstance(task, Task)
    schedule.finish(task, Outcome(reason="OSError: loss or gradient not finite, says a disk"))


def _step_after_the_end() -> None:
    callback = TaskCallback(mock.Mock(), mock.Mock())
    callback.end()
    callback.on_step_end(0, [])


def _lose_the_lease() -> None:
    config = make_sweep(Path(), trials=1, max_concurrent=1)
    run = begin_run(config.placement, SweepRecord(digest="ab", space="", trials=1))
    try:
        with mock.patch.object(runner, "RecordProcess"), \
                mock.patch.object(tuner, "room_for_trials", return_value=1):
            sweep = Sweep(config, schedules.open_ledger(Path("ledger.jsonl")), run, 1, 0.0, io.StringIO())
            sweep.run = SimpleNamespace(remote=SimpleNamespace(is_lost=True, address="s3://b/x"))
            sweep.each_step()
    finally:
        run.release()


def _list(project: str) -> None:
    Path("notes").mkdir()
    list_project(project)


CASES: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    ("a limit below all networks", _start_over_the_limit, ConfigError,
     "search.limit.latency_ms: the fastest network of the space takes 31 ms an image here, over the limit of 20; raise "
     "it, or search smaller models or image sizes"),
    ("more networks than are measured", _measure_many, ConfigError,
     "search.limit: the space has more than 100 networks (model x imgsz), too many to measure; use choices of fewer "
     "values"),
    ("old results for a grid", _start_a_grid_from_old_results, ConfigError,
     "warm_start: a grid tries its combinations in their order and starts from no old results; leave --warm-start out, "
     "or search by another algorithm"),
    ("other virtual slots", partial(continue_on, 4), ConfigError,
     "virtual_slots: …/runs/evolve/exp/ledger.jsonl: this sweep has 3 virtual slots, not 4; leave --virtual-slots out "
     "to continue it, or give another --name to start a new one"),
    ("too few CPUs", partial(_find_room, {"CPU": 1.0}, 0.0), ConfigError,
     "workers_per_trial: 2 workers need 2 CPU and 0 GPU, the cluster has 1 and 0; use fewer"),
    ("too few GPUs", partial(_find_room, {"CPU": 8.0, "GPU": 1.0}, 1.0), ConfigError,
     "workers_per_trial: 2 workers need 2 CPU and 2 GPU, the cluster has 8 and 1; use fewer"),
    ("a ledger on a broken disk", _append_to_a_broken_disk, TrainingError,
     "ledger.jsonl: cannot be written (Input/output error); free or repair the storage and run the same command again: "
     "it continues"),
    ("a ledger after its end", _append_after_the_end, TrainingError, "ledger.jsonl: this command has ended the study"),
    ("a ledger without its first trial", _restore_without_the_first_trial, InputError,
     'ledger: ScheduledEvent {"trial":0,…} is recorded, but ProposedEvent {"trial":0,…} follows from the lines before; '
     "restore it from a copy, or choose another --name"),
    ("a torn line of a ledger", _tear, InputError,
     "ledger.jsonl:2: damaged: this line cannot be read; restore the file from a copy, or choose another --name"),
    ("another validation set", _continue_with_other_labels, InputError,
     "ledger.jsonl: started with another validation set; give the original one to continue it, or another --name to "
     "start a new one (nothing was changed)"),
    ("a failed training of a pair", _fail_in_a_pair, TrainingError,
     "pair1-a: OSError: loss or gradient not finite, says a disk"),
    ("a step of Ray Tune after the end", _step_after_the_end, TrainingError, "interrupted"),
    ("a study that another process has", _lose_the_lease, TrainingError,
     "s3://b/x: another process has taken over this study"),
    *((f"a list of {project}", partial(_list, project), InputError,
       f"{project}: has no runs; give the folder or address of a project, such as runs/train")
      for project in ("notes", "nowhere")),
    ("a point after the last one of a grid", partial(propose, GRID, 0, 3, []), IndexError, "point 3 of a grid of 3"),
]


def _refusals() -> Iterator[Refusal]:
    for space, recipe, error, message in STARTS:
        yield Refusal(f"a sweep: {space} {recipe}", message, partial(_start, space, recipe), error)
    for placement, message in PLACEMENTS:
        yield Refusal(f"a sweep: {placement}", message, partial(_start_placed, placement), ConfigError)
    for name, cause, error, message in CASES:
        yield Refusal(name, message, cause, error)


REFUSALS = list(_refusals())
