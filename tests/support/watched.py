"""Trainings from command lines, watched: what the loop forwarded, and what the run left behind. Nothing is replaced."""

from __future__ import annotations

import functools
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import cv2
import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ray_yolo.cli import parse_train
from ray_yolo.core.events import Event
from ray_yolo.models.detector import Detector
from ray_yolo.runs.event_log import read_events
from ray_yolo.runtime.trainer import fit
from tests.support.checkpoints import newest

GREY = 114

multiprocessing.set_forkserver_preload(["ray_yolo.data.dataset"])  # importing torch takes seconds; once is enough


class Pass(NamedTuple):
    """One training forward of the model, as it was when it ended."""

    pictures: np.ndarray  # (B, 3, height, width) uint8
    dtype: torch.dtype  # of what came out
    threads: int  # of arithmetic
    deterministic: bool  # kernels alone
    processes: int  # children of this process
    mapped: frozenset[str]  # files of decoded images in this process's memory


@dataclass(frozen=True)
class Watched:
    """A training that has ended."""

    files: Path  # what `make_files` wrote
    storage: Path
    folder: Path  # of the run
    passes: list[Pass]
    optimizers: list[str]  # kind of optimiser at each of its steps

    @functools.cached_property
    def events(self) -> list[Event]:
        return list(read_events(self.folder / "events.jsonl"))

    def all(self, kind: str, field: str) -> list[Any]:
        """A field of every event of a kind."""
        return [getattr(event, field) for event in self.events if event.type == kind]

    @functools.cached_property
    def last(self) -> dict[str, Any]:
        """What is in the newest checkpoint."""
        return newest(self.folder)

    @property
    def meta(self) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads(self.last["meta"]))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """(images, height, width) of every pass."""
        return [(len(seen.pictures), *seen.pictures.shape[2:]) for seen in self.passes]

    @property
    def shown(self) -> list[list[str | None]]:
        """For every pass, the file that each of its pictures shows as it is; None for all others, such as mosaics."""
        return [[_originals(self.files, seen.pictures.shape[2:]).get(picture.tobytes()) for picture in seen.pictures]
                for seen in self.passes]

    def per_epoch(self, values: list[Any]) -> list[list[Any]]:
        """Values of passes, or of steps, by epoch."""
        epochs = len(self.all("epoch", "epoch"))
        size = len(values) // epochs
        return [values[epoch * size:(epoch + 1) * size] for epoch in range(epochs)]


def train(words: str, files: Path, storage: Path, stop_after: int = 0) -> Watched:
    """The training that the words ask for, over `files`/base.yaml unless they give another --config; in them, {files}
    and {storage} are these folders.

    Raises:
        KeyboardInterrupt: after so many training passes, if `stop_after` is given.
    """
    given = words.format(files=files, storage=storage).split()
    base = [] if "--config" in given else ["--config", str(files / "base.yaml")]
    argv = [*base, "--storage-path", str(storage), *given]
    with _watching(stop_after) as (passes, optimizers):
        result = fit(parse_train(argv).config, quiet=True)
    return Watched(files, storage, result.run_dir, passes, optimizers)


@contextmanager
def _watching(stop_after: int) -> Iterator[tuple[list[Pass], list[str]]]:
    passes: list[Pass] = []
    optimizers: list[str] = []

    def note_pass(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if isinstance(module, Detector) and module.training:
            pictures = inputs[0].mul(255).round().byte().cpu().contiguous().numpy()
            passes.append(Pass(pictures, outputs[0].dtype, torch.get_num_threads(),
                               torch.are_deterministic_algorithms_enabled(),
                               len(multiprocessing.active_children()), _mapped_images()))
            if len(passes) == stop_after:
                raise KeyboardInterrupt

    def note_step(optimizer: Optimizer, *_: Any) -> None:
        optimizers.append(type(optimizer).__name__)

    threads = torch.get_num_threads()
    handles = register_module_forward_hook(note_pass), register_optimizer_step_pre_hook(note_step)
    try:
        yield passes, optimizers
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        for handle in handles:
            handle.remove()


def _mapped_images() -> frozenset[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return frozenset(line.split(maxsplit=5)[5] for line in lines if line.endswith(".rgb"))


@functools.cache
def _originals(files: Path, shape: tuple[int, int]) -> dict[bytes, str]:
    """Names of the training pictures by how each looks in the middle of a grey canvas (3, height, width)."""
    found = {}
    for path in sorted((files / "data" / "images" / "train").iterdir()):
        picture = cv2.imread(str(path), cv2.IMREAD_COLOR_RGB)
        assert picture is not None
        top, left = ((side - own) // 2 for side, own in zip(shape, picture.shape[:2], strict=True))
        if top >= 0 and left >= 0:
            canvas = np.full((*shape, 3), GREY, np.uint8)
            canvas[top:top + picture.shape[0], left:left + picture.shape[1]] = picture
            found[np.ascontiguousarray(canvas.transpose(2, 0, 1)).tobytes()] = path.stem
    return found
