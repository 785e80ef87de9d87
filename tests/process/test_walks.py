"""The walks of docs/design.md: their functions exist, and are called in the order of the page."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import ray_yolo
from ray_yolo import cli
from tests.support.jobs import make_dataset

PACKAGE = Path(ray_yolo.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "design.md").read_text()
FUNCTION = re.compile(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+)\.([A-Za-z_]\w*(?:\.\w+)?)`")
OVER_RAY = "on Ray `runs/recorder.RecorderClient.emit`"  # beside the step of the same number

Function = tuple[str, str]  # module and qualified name


def read_walks() -> dict[str, list[Function]]:
    """The functions of each walk, in order."""
    section = PAGE.split("\n## Walks\n")[1].split("\n## ")[0].replace(OVER_RAY, "")
    walks: dict[str, list[Function]] = {}
    for walk in section.split("\n### ")[1:]:
        title, steps = walk.split("\n", 1)
        walks[title] = []
        for module, name in FUNCTION.findall(steps):
            if "/" in module or module == "cli":  # not `events.jsonl`
                walks[title].append((module, name))
    return walks


WALKS = read_walks()


def defined_in(module: str) -> set[str]:
    """The functions, classes and methods of a module."""
    names = set()
    for node in ast.parse((PACKAGE / f"{module}.py").read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return names


@contextmanager
def trace(functions: set[Function]) -> Iterator[list[Function]]:
    """Yields the calls of these functions so far, in all threads of this process."""
    calls: list[Function] = []
    root = f"{PACKAGE}/"

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            function = code.co_filename.removeprefix(root).removesuffix(".py"), code.co_qualname
            if function in functions:
                calls.append(function)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def first_missing(walk: list[Function], calls: list[Function]) -> Function | None:
    """The first step of a walk that is not called after those before it; None: all are."""
    position = 0
    for step in walk:
        if step not in calls[position:]:
            return step
        position = calls.index(step, position) + 1
    return None


def test_a_walk_is_compared_by_order() -> None:
    a, b, c = ("m", "a"), ("m", "b"), ("m", "c")
    assert first_missing([a, b], [a, c, a, b]) is None
    assert first_missing([b, a], [a, b]) == a
    assert first_missing([a, a], [a, b]) == a


@pytest.mark.parametrize("title", WALKS)
def test_the_functions_of_a_walk_exist(title: str) -> None:
    assert len(WALKS[title]) >= 6
    assert [(module, name) for module, name in WALKS[title] if name not in defined_in(module)] == []


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Function]]:
    """The calls of a training that pauses after an epoch, of its resume, and of its records."""
    folder = tmp_path_factory.mktemp("walks")
    store = f"file://{folder}/bucket"
    words = ["--data", str(make_dataset(folder / "data")), "--model", "yolov5n", "--imgsz", "64", "--epochs", "2",
             "--set", "optimizer.lr0=0.02", "--threads", "1", "--workers", "0", "--num-workers",
             "0", "--noplots", "--mlflow-uri", f"sqlite:///{folder}/mlflow.db", "--storage-path", store]
    functions = {function for walk in WALKS.values() for function in walk}
    taken = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RAY_YOLO_CACHE", str(folder / "cache"))
        for part, command in (("paused", [*words, "--stop-after", "1"]), ("resumed", words)):
            with trace(functions) as taken[part]:
                cli.train(command)
        with trace(functions) as taken["records"]:
            cli.sync([f"{store}/runs/train/exp", "--mlflow-uri", f"sqlite:///{folder}/other.db"])
    return taken


@pytest.mark.parametrize(("title", "parts"), [
    ("A bare training", ["paused", "resumed"]),
    ("One flag, `--set optimizer.lr0=0.02`, to the optimiser", ["paused"]),
    ("One image, from a file to the loss", ["paused"]),
    ("One metric, mAP50, to MLflow", ["paused", "records"]),
    ("One checkpoint, to a bucket", ["paused"]),
    ("A resume", ["resumed"]),
])
def test_a_walk_is_walked(title: str, parts: list[str], calls: dict[str, list[Function]]) -> None:
    assert first_missing(WALKS[title], [call for part in parts for call in calls[part]]) is None
