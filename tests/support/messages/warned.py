"""What is said about files and folders that are used otherwise than one might expect."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.data.index import read_index
from ray_yolo.data.sources import find_media
from ray_yolo.runs.folders import output_folder
from ray_yolo.runs.run_dir import begin_run, find_run
from ray_yolo.runs.run_record import RECORD_FILE
from ray_yolo.runtime.preflight import check_model
from tests.support.jobs import TINY
from tests.support.messages import Warned
from tests.support.messages.runs import RECIPE, record_of
from tests.support.pictures import write_dataset

SIZES = {"m": [0.67, 0.75, 768], "n": [0.33, 0.25, 1024]}
MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("mine.yaml", {"scales": SIZES},
     "mine.yaml: has several scales and chooses none: the first, m, is used. Write a line scale: m, or put the letter "
     "behind the number in the file's name, as in yolo11m.yaml"),
    ("mine8n.yaml", {"scales": SIZES, "depth_multiple": 1, "width_multiple": 0.5},
     "mine8n.yaml: width_multiple: 0.5 is not used, because the file has scales"),
]
"""Model files by name, and what they have besides a tiny model."""


def _check_file(name: str, table: dict[str, Any]) -> None:
    Path(name).write_text(yaml.safe_dump(TINY | table, sort_keys=False))
    check_model(Recipe(model=name))


def _find_twice(damaged: bool) -> None:
    """Look for a run where an unfinished one is being trained, or is damaged."""
    where = Placement(storage_path=".", project="p")
    run = begin_run(where, record_of(RECIPE))
    if damaged:
        run.release()
        (run.folder / RECORD_FILE).write_text("{")
    try:
        assert find_run(RECIPE, where) is None
    finally:
        run.release()


def _use_again() -> None:
    where = Placement(storage_path=".", project="val", name="mine", exist_ok=True)
    for _ in range(2):
        (output_folder(where) / "results.json").touch()


def _read_without_cache() -> None:
    Path("file").touch()
    with mock.patch.dict(os.environ, {"RAY_YOLO_CACHE": str(Path("file").absolute())}):
        read_index(write_dataset(Path.cwd(), {"a": None}), "train")


def _find_media() -> None:
    os.mkdir("pictures")
    for name in ("a.jpg", "b.heic"):
        Path("pictures", name).touch()
    find_media("pictures")


def _warnings() -> Iterator[Warned]:
    for name, table, message in MODELS:
        yield Warned(name, message, partial(_check_file, name, table))
    yield Warned("a model without a file", "model: here/yolov8n.yaml: no such file; the built-in yolov8n is used",
                 lambda: check_model(Recipe(model="here/yolov8n.yaml")))
    yield Warned("a run that is trained", "…/p/exp has the same settings but another process trains it; this command "
                 "takes another run (--name chooses which)", partial(_find_twice, damaged=False))
    yield Warned("a damaged run", "…/p/exp/run.json: is damaged (…); restore it from a copy… (until then this run is "
                 "skipped)", partial(_find_twice, damaged=True))
    yield Warned("a name that is used again", "…/val/mine: its earlier content is in …/val/mine.old1 now", _use_again)
    yield Warned("no cache", "the label index cannot be written to …/file (Not a directory): it is rebuilt at every "
                 "start", _read_without_cache)
    yield Warned("pictures that are not read", "source: 1 picture (pictures/b.heic) in formats that are not read; use "
                 "JPEG or PNG", _find_media)


WARNINGS = list(_warnings())
