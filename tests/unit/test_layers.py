"""The dependency rule: imports point down only and form no cycle, siblings do not import each other, and only named
modules import Ray, MLflow, torch.distributed and obstore.
"""

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ray_yolo"
SIBLINGS = ("models", "data", "plots")
FLOORS = (  # lowest first; modules of the package that are not named here are on top: the commands and the API
    ("core", "__version__"),
    ("config", "storage", "ops"),
    ("labels",),
    SIBLINGS,
    ("checkpoints",),
    ("engine", "inference"),
    ("runs",),
    ("sinks",),
    ("runtime",),
    ("tune",),
    ("instruments",),
)
RAY_IN_TUNE = tuple(f"tune/{name}.py" for name in ("tuner", "comparer", "runner", "task", "trainable", "ray_adapter"))
DOORS = {"ray": ("runtime/", "runs/recorder.py", *RAY_IN_TUNE), "mlflow": ("sinks/", "tune/mlflow.py"),
         "torch.distributed": ("engine/collectives.py", "engine/gradients.py"), "obstore": ("storage/store.py",),
         "wandb": ("sinks/wandb_run.py",)}
FOR_OPS = ("torch", "numpy", "ray_yolo.ops", "ray_yolo.core.internals", *sys.stdlib_module_names)
ROOMS = {"labels": ("data",), "tune": (), "instruments": ()}
"""Rooms with a door, and those that are built on their modules: the others use the names in their `__init__`."""
KERNELS = dict.fromkeys(("ops/colour_kernel.py", "ops/norm_kernel.py", "ops/render_kernel.py"), ("triton",))
"""Modules of ops that define kernels of other libraries, and these; imported where a kernel is used."""
RANK_TESTS = {"print0", "is_main_process"}


def floor(module: str) -> int:
    return next((level for level, names in enumerate(FLOORS) if module in names), len(FLOORS))


@cache
def offered(room: str) -> tuple[str, ...]:
    """The names in the `__all__` of a room."""
    for node in ast.parse((PACKAGE / room / "__init__.py").read_text("utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name("__all__")], value=value):
                return tuple(ast.literal_eval(value))
    return ()


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@cache  # two tests look at all modules
def mentions(source: str) -> tuple[tuple[int, str], ...]:
    """(line, dotted name) of everything that is imported, and of bare names and attributes."""
    return tuple(_mentions(ast.parse(source)))


def _mentions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                module = "." * node.level + (node.module or "")
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            case ast.Attribute(value=ast.Name("torch"), attr="distributed"):
                yield node.lineno, "torch.distributed"
            case ast.Name(name) | ast.FunctionDef(name) | ast.Attribute(attr=name) if name in RANK_TESTS:
                yield node.lineno, name


def objection(path: str, name: str) -> str | None:
    """Why the module at `path` may not mention `name`."""
    here = "commands" if path.endswith("__main__.py") else path.removesuffix(".py").partition("/")[0]
    there = name.split(".")[1] if within(name, "ray_yolo") and "." in name else None
    door = next((door for world, door in DOORS.items() if within(name, world)), None)
    if name in RANK_TESTS:
        return "no module reads the rank: scores are global before any code uses them"
    if name.startswith("."):
        return "a relative import; write it out"
    if door and not path.startswith(door):
        return f"only {' and '.join(door)} may"
    if here == "labels" and within(name, "torch"):
        return "labels are read without torch"
    if here == "ops" and not any(within(name, package) for package in (*FOR_OPS, *KERNELS.get(path, ()))):
        return "ops imports torch, numpy and the standard library only"
    if here == "tune" and path not in RAY_IN_TUNE and f"{'/'.join(name.split('.')[1:3])}.py" in RAY_IN_TUNE:
        return "the modules of a search do not import the code that runs its trials; pass it as an argument"
    if there in ROOMS and here not in (there, *ROOMS[there]) and not {*name.split(".")[2:3]} & {*offered(there)}:
        return f"other rooms use what ray_yolo/{there}/__init__.py names"
    if there and floor(there) > floor(here):
        return f"{there} is above {here}; pass it as an argument, or move the shared code down (see FLOORS)"
    if there and there != here and {there, here} <= set(SIBLINGS):
        return f"{there} and {here} are siblings; shared code belongs into core or ops"
    return None


def breaches(path: str, source: str) -> list[str]:
    """`file:line: name: reason` of every breach of the rule in one module of the package."""
    found = [(line, name, objection(path, name)) for line, name in mentions(source)]
    return [f"ray_yolo/{path}:{line}: {name}: {reason}" for line, name, reason in found if reason]


def imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that one of them imports."""
    for _, name in mentions(path.read_text("utf-8")):
        module = name.removeprefix("ray_yolo.")
        if within(name, "ray_yolo"):
            yield from modules.keys() & {module, module.rpartition(".")[0]}


def circles(edges: Mapping[str, Collection[str]]) -> list[str]:
    """Modules in or above a cycle: those that remain when modules without remaining imports are removed repeatedly."""
    left = {module: set(targets) for module, targets in edges.items()}
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in free:
            del left[module]
    return sorted(left)


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    edges = {module: set(imported(path, modules)) for module, path in modules.items()}
    assert sum(map(len, edges.values())) > 300
    assert circles(edges) == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_offers_at_most_ten_names(room: str) -> None:
    assert 1 <= len(offered(room)) <= 10


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_what_it_offers(room: str) -> None:
    door = ast.parse((PACKAGE / room / "__init__.py").read_text("utf-8"))
    imported = {alias.name for node in door.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {*offered(room)} <= imported | {path.stem for path in (PACKAGE / room).glob("*.py")}


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": set()}) == ["a", "b", "c", "d"]


def test_imports_follow_the_rule() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 20
    found = [breach for file in files
             for breach in breaches(file.relative_to(PACKAGE).as_posix(), file.read_text("utf-8"))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(("path", "source"), [
    ("engine/loop.py", "import torch.distributed as dist"),
    ("engine/loop.py", "from torch import distributed"),
    ("engine/loop.py", "import torch\ntorch.distributed.barrier()"),
    ("engine/loop.py", "def f():\n    import ray"),
    ("tune/__main__.py", "from mlflow.tracking import MlflowClient"),
    ("runtime/trainer.py", "import mlflow"),
    ("sinks/console.py", "import ray"),
    ("tune/ledger.py", "import ray.tune"),
    ("tune/files.py", "from ray_yolo.tune.trainable import train_task"),
    ("runtime/trainer.py", "from ray_yolo.tune import ledger"),
    ("engine/loop.py", "from ray_yolo.runtime import trainer"),
    ("models/heads.py", "from ray_yolo.checkpoints import local"),
    ("data/dataset.py", "import ray_yolo.engine.loop"),
    ("core/errors.py", "from ray_yolo.cli import run"),
    ("core/files.py", "from ray_yolo.config.recipe import Recipe"),
    ("models/heads.py", "from ray_yolo.data.geometry import move"),
    ("labels/voc.py", "from ray_yolo.data.images import read_image"),
    ("labels/voc.py", "import torch"),
    ("runtime/trainer.py", "from ray_yolo.labels.coco import CocoFile"),
    ("runtime/trainer.py", "from ray_yolo.labels import coco"),
    ("cli.py", "from ray_yolo.tune.ledger import read_ledger"),
    ("cli.py", "from ray_yolo.instruments import probe"),
    ("cli.py", "import ray_yolo.tune"),
    ("instruments/replay.py", "from ray_yolo.tune import schedule"),
    ("ops/nms.py", "import cv2"),
    ("ops/nms.py", "from torchvision.ops import nms"),
    ("ops/nms.py", "from ray_yolo.core.structures import Progress"),
    ("data/images.py", "from .cache import keep"),
    ("runs/run_dir.py", "from obstore.store import from_url"),
    ("engine/loop.py", "if is_main_process(): pass"),
    ("engine/loop.py", "def print0(): pass"),
])
def test_a_breach_is_caught(path: str, source: str) -> None:
    (breach,) = breaches(path, source)
    assert breach.startswith(f"ray_yolo/{path}:")


@pytest.mark.parametrize(("path", "source"), [
    ("runtime/trainer.py", "import ray.train\nfrom ray_yolo.engine import loop\nfrom ray_yolo.runs import event_log"),
    ("engine/collectives.py", "import torch\ntorch.distributed.barrier()"),
    ("data/dataset.py", "from ray_yolo.data.mosaic import snap\nfrom torch.utils.data.distributed import x"),
    ("ops/nms.py", "import math\nfrom torch.nn import functional\nfrom ray_yolo.ops import boxes"),
    ("train.py", "from ray_yolo.runtime import trainer\nfrom ray_yolo import cli"),
    ("tune/__main__.py", "from ray_yolo.tune import tuner\nfrom ray_yolo.cli import run"),
    ("runtime/trainer.py", "from ray_yolo.labels import LabelSources"),
    ("data/index.py", "from ray_yolo.labels.label_files import LabelSources"),
    ("cli.py", "from ray_yolo.tune import tuner\nfrom ray_yolo.tune.search import TuneConfig"),
    ("tune/tuner.py", "import ray\nfrom ray_yolo.tune.trainable import train_task"),
    ("engine/loop.py", "import raylike\nray = 1\nray.get"),
])
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert breaches(path, source) == []
