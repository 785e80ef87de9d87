"""One trial, as Ray Tune's function: a distributed training in a thread, its epochs reported as they are recorded.

A trial is known by its name, trialN: its configuration is another trial's, mutated, once it has exploited one.
"""

from __future__ import annotations

import json
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import ray.tune

from ray_yolo.config import RunConfig
from ray_yolo.engine.events import Event, follow, read_events
from ray_yolo.engine.fork import asked_recipe, open_fork
from ray_yolo.engine.ledger import Origin
from ray_yolo.engine.replay import train_command
from ray_yolo.engine.results import EVENTS_FILE
from ray_yolo.engine.runs import is_held
from ray_yolo.runtime.trainer import fit
from ray_yolo.tune_search import Search
from ray_yolo.tune_space import overlay

POINTER_FILE = "origin.json"
_POLL_SECONDS, _PATIENCE_SECONDS = 0.5, 60.0


def train_trial(config: Mapping[str, Any], wire: Mapping[str, Any]) -> None:
    """Train the trial that this Tune process is for, or go on with it, and report every validated epoch.

    Args:
        config: `genes`, and `origin` where an earlier start of the sweep has noted one.
        wire: what is the same for all trials, as plain JSON.
    """
    number = number_of(ray.tune.get_context().get_trial_name())
    run_config = trial_config(wire, number, config["genes"])
    search = Search.model_validate(wire["search"])
    exchanges = search.scheduler.name == "pbt"
    if exchanges:
        checkpoint = ray.tune.get_checkpoint()
        pointer = read_pointer(checkpoint) if checkpoint else None
        trials = Path(wire["placement"]["project"])
        name = run_folder(trials, number, pointer, config.get("origin"), config["genes"])
        recipe = asked_recipe(trials / name) or run_config.recipe
        run_config = _renamed(RunConfig(recipe=recipe, placement=run_config.placement), name)
    folder = Path(run_config.placement.project) / run_config.placement.name
    _wait_until_released(folder)
    past = read_events(folder / EVENTS_FILE) if exchanges else []  # PBT has seen them; ASHA judges all rungs anew
    log = follow(folder / EVENTS_FILE, after_seq=past[-1]["seq"] if past else -1)
    newest = partial(_newest_pointer, folder, number, run_config.recipe.epochs)
    outcome = _start(run_config, folder, wire["link"])
    failure, held = None, None
    while failure is None:
        failure = _wait(outcome)
        held = _report(next(log), held, search, newest)
    _send(held, search, None)  # under --nosave only the last epoch is checkpointed
    if failure:
        ray.tune.report({"failed": failure.splitlines()[0]})


def number_of(name: str) -> int:
    """The number in a trial's name."""
    return int(name.removeprefix("trial"))


def trial_config(wire: Mapping[str, Any], number: int, genes: Mapping[str, Any]) -> RunConfig:
    """The training of a trial: the base recipe with its genes, in a run folder of its own under its own name."""
    config = RunConfig.model_validate({"recipe": wire["recipe"], "placement": wire["placement"]})
    return _renamed(RunConfig(recipe=overlay(config.recipe, genes), placement=config.placement), f"trial{number}")


def read_pointer(checkpoint: ray.tune.Checkpoint) -> Origin:
    """What a Tune checkpoint of ours points to."""
    with checkpoint.as_directory() as folder:
        return Origin(**json.loads((Path(folder) / POINTER_FILE).read_text()))


def _renamed(config: RunConfig, name: str) -> RunConfig:
    return config.model_copy(update={"placement": config.placement.model_copy(update={"name": name})})


def run_folder(trials: Path, number: int, pointer: Origin | None, noted: Mapping[str, Any] | None,
               genes: Mapping[str, Any]) -> str:
    """The name of the folder that a trial trains in under population based training.

    Args:
        pointer: what Ray gives the trial to go on from: another trial's checkpoint, or its own if it was only paused.
        noted: what the ledger has, for the first start after a restart of the sweep.
    """
    if pointer and pointer.trial == number:
        return Path(pointer.state).parent.parent.name
    origin = pointer or (Origin(**noted) if noted else None)
    return open_fork(trials, number, origin, genes)


def _wait_until_released(folder: Path) -> None:
    """Wait for the process that trained this trial before; a paused one takes a moment to end."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while is_held(folder) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _start(config: RunConfig, folder: Path, link: Mapping[str, Any]) -> queue.Queue[str]:
    """Train in a thread. The queue gets '' at the end, or the reason of a failure."""
    outcome: queue.Queue[str] = queue.Queue()

    def run() -> None:
        try:
            fit(config, quiet=True, link=link, command=train_command(config.recipe))
            outcome.put("")
        except KeyboardInterrupt:  # told to stop, as the whole sweep: its driver ends this process
            return
        except BaseException as error:
            outcome.put(f"{type(error).__name__}: {error}")

    if (folder / "finished").exists():  # it ended, and the driver died before it could note that
        outcome.put("")
    else:
        threading.Thread(target=run, daemon=True).start()
    return outcome


def _wait(outcome: queue.Queue[str]) -> str | None:
    try:
        return outcome.get(timeout=_POLL_SECONDS)
    except queue.Empty:
        return None


def _report(events: list[Event], held: Event | None, search: Search, newest: Callable[[], Origin | None]
            ) -> Event | None:
    """Report epochs once they are checkpointed, which is right after. Returns the one that still waits for that."""
    for event in events:
        if held and event["type"] in ("epoch", "checkpoint", "end"):
            _send(held, search, newest())
            held = None
        if event["type"] == "epoch":
            held = event
    return held


def _send(event: Event | None, search: Search, pointer: Origin | None) -> None:
    """Report one epoch to Tune."""
    fitness = search.fitness(event["metrics"]) if event else None
    if event is None or fitness is None:
        return
    # as text: Tune would flatten what is nested
    row = {"fitness": fitness, "epoch": event["epoch"] + 1,
           "row": json.dumps({"metrics": event["metrics"], "losses": event["val"]})}
    if pointer is None:
        ray.tune.report(row)
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / POINTER_FILE).write_text(json.dumps(asdict(pointer)))
        ray.tune.report(row, checkpoint=ray.tune.Checkpoint.from_directory(folder))


def _newest_pointer(folder: Path, number: int, epochs: int) -> Origin | None:
    """A pointer to the newest of the checkpoints that are kept for good (`save_period`) and have epochs left to train.

    None if there is none.
    """
    kept = {int(path.stem.removeprefix("epoch")) + 1: path for path in (folder / "weights").glob("epoch*.pt")}
    trained = max((count for count in kept if count < epochs), default=None)
    if trained is None:
        return None
    manifest = json.loads(kept[trained].with_suffix(".json").read_text())
    return Origin(number, trained, str(kept[trained]), manifest["sha256"])
