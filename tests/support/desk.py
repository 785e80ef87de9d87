"""The training command in this process, in a folder whose complete content is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ray_yolo import cli
from ray_yolo.cli import run
from ray_yolo.core.errors import RayYoloError
from ray_yolo.core.structures import AnnotationIndex
from tests.support.audit import Deeds, watched
from tests.support.jobs import TINY
from tests.support.snapshot import Snapshot, snapshot


class AcceptedError(RayYoloError):
    """The command has read the data set and would train on it now."""

    exit_code = 0


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str
    deeds: Deeds


@dataclass
class Desk:
    """A folder with a tiny model, and folders for data, runs (`storage`) and the user's cache."""

    folder: Path
    written: Callable[[], tuple[str, str]]  # stdout and stderr since the last call
    indices: list[AnnotationIndex] = field(default_factory=list)  # training labels that were read

    def prepare(self) -> None:
        """Create the folders and the model file."""
        for name in ("cwd", "storage", "cache"):
            (self.folder / name).mkdir()
        (self.folder / "tiny.yaml").write_text(json.dumps(TINY))

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def storage(self) -> Path:
        return self.folder / "storage"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def run(self) -> Path:
        return self.storage / "runs" / "train" / "exp"

    def look(self) -> Snapshot:
        """Snapshot of the folder without runs and cache."""
        return snapshot(self.folder, without=(self.storage, self.cache))

    def train(self, *words: str | Path) -> Ended:
        """`python -m ray_yolo.train` for one epoch without Ray and tracking."""
        argv = ["--num-workers", "0", "--epochs", "1", "--imgsz", "64", "--model", self.folder / "tiny.yaml",
                "--mlflow-uri", "off", "--storage-path", self.storage, *words]
        self.written()
        with watched() as deeds:
            status = run(lambda: cli.train(list(map(str, argv))))
        return Ended(status, *self.written(), deeds)
