"""How far it is from `fit` to `backward`: a reader opens few functions on the way."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ray_yolo
from ray_yolo.config.placement import Placement
from ray_yolo.core.events import Event, FailureEvent
from ray_yolo.core.system import own_process
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.membership import Rendezvous
from ray_yolo.runtime.trainer import fit
from ray_yolo.runtime.workers import worker
from ray_yolo.runtime.workers.worker import train_job
from tests.support.jobs import make_config, make_spec

MOST_FRAMES = 7
PACKAGE = Path(ray_yolo.__file__).parent


class ReachedError(Exception):
    """The training has reached the first backward pass."""


def own_frames() -> list[str]:
    """The package's functions on the stack, from the caller's up to the outermost one."""
    names, frame = [], sys._getframe(1)
    while frame:
        if PACKAGE in Path(frame.f_code.co_filename).parents:
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The own frames at the first backward pass, which ends the training."""
    found: list[str] = []

    def backward(loss: torch.Tensor) -> None:
        found.extend(own_frames())
        raise ReachedError

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    return found


def test_few_own_frames_lie_between_fit_and_backward(tmp_path: Path, frames: list[str]) -> None:
    with pytest.raises(ReachedError):
        fit(make_config(tmp_path, 0, epochs=1), quiet=True)
    assert frames[-1] == "fit"
    assert len(frames) <= MOST_FRAMES, " <- ".join(frames)


class Alone(Rendezvous):
    """A group of one worker, which a worker's function leaves."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__(Collectives())

    def close(self) -> None: ...


@pytest.fixture
def as_on_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker's function can be called in this process, without Ray and without lasting effects."""
    monkeypatch.setattr(worker, "from_payload", lambda spec: spec)
    monkeypatch.setattr(worker, "prepare_process", lambda: None)
    monkeypatch.setattr(worker, "undo_niceness", lambda: True)
    monkeypatch.setattr(worker, "RendezvousClient", Alone)
    monkeypatch.setattr(worker.ray, "get_runtime_context",
                        lambda: SimpleNamespace(get_accelerator_ids=lambda: {"GPU": []}, get_node_labels=dict))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    gc.unfreeze()


@pytest.mark.usefixtures("as_on_ray")
def test_no_more_lie_between_the_function_of_a_worker_and_backward(tmp_path: Path, frames: list[str]) -> None:
    events: list[Event] = []
    coordinator: Any = None
    recorder: Any = SimpleNamespace(emit=events.append, wait=lambda seconds: None, flush=lambda: None)
    payload = {"spec": make_spec(tmp_path, epochs=1), "placement": Placement(num_workers=1),
               "recorder": recorder, "coordinator": coordinator, "on_pool": True, "stored": None, "callbacks": ("", {}),
               "driver": own_process()}
    with pytest.raises(ReachedError):
        train_job(payload, 1, coordinator)
    assert isinstance(events[-1], FailureEvent)
    assert frames[-1] == "train_job"
    assert len(frames) <= MOST_FRAMES, " <- ".join(frames)
