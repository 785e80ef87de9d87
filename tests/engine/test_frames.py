"""How far it is from `fit` to `backward`: a reader opens few functions on the way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import ray_yolo
from ray_yolo.runtime.trainer import fit
from tests.support.jobs import make_config

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


def test_few_own_frames_lie_between_fit_and_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[str] = []

    def backward(loss: torch.Tensor) -> None:
        frames.extend(own_frames())
        raise ReachedError

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    with pytest.raises(ReachedError):
        fit(make_config(tmp_path, 0, epochs=1), quiet=True)
    assert frames[-1] == "fit"
    assert len(frames) <= MOST_FRAMES, " <- ".join(frames)
