"""Sides of a comparison that another ray_yolo trains: another version of this package, or one with other libraries.

Such a training is the command `python -m ray_yolo.train` of its own Python. It gets the settings that were given for
its side, as a file for --hyp. All other settings have the defaults of its version: these belong to what is compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ray_yolo.config.placement import Placement
from ray_yolo.config.yaml import to_yaml
from ray_yolo.core import deadline
from ray_yolo.core.errors import InputError, ResourcesError, TrainingError
from ray_yolo.core.files import atomic_write
from ray_yolo.runs.folders import lock_file
from ray_yolo.tune.schedule import Outcome
from ray_yolo.tune.task import read_outcome

_PYTHONS = ("bin/python", "Scripts/python.exe")  # of a virtual environment
_START_SECONDS = 120.0  # at most, for a Python to describe its package
_POLL_SECONDS = 0.2
_SAVE_SECONDS = 10.0  # for an interrupted command to save its step; with a deadline it has what is left

_BAD_INPUT, _NO_RESOURCES = 2, 4  # exit codes of the train command
_DIVERGED_OR_LOST = 3

_DESCRIBE = """
import hashlib, json, pathlib, platform, sys
from importlib.metadata import version
import ray_yolo
folder = pathlib.Path(ray_yolo.__file__).parent
digest = hashlib.sha256()
for path in sorted(folder.rglob("*.py")):
    digest.update(str(path.relative_to(folder)).encode() + b"\\0" + path.read_bytes() + b"\\0")
libraries = {name: version(name) for name in ("torch", "torchvision", "numpy", "opencv-python-headless", "ray")}
print(json.dumps({"folder": str(folder), "version": ray_yolo.__version__, "sources": digest.hexdigest()[:16],
                  "libraries": {"Python": platform.python_version(), **libraries}}))
"""
"""What the Python of a side runs to describe its package."""


class Package(NamedTuple):
    """A ray_yolo that can train."""

    python: str
    search_path: str  # a folder that Python searches first, as PYTHONPATH; '': none
    folder: str  # of the package
    version: str
    sources: str  # digest of its Python files
    libraries: Mapping[str, str]  # versions by name, with Python's own

    @property
    def identity(self) -> str:
        """A text that is equal for equal packages with equal libraries, wherever they are installed."""
        return json.dumps([self.version, self.sources, dict(self.libraries)])

    def __str__(self) -> str:
        libraries = ", ".join(f"{name} {version}" for name, version in self.libraries.items())
        return f"ray_yolo {self.version} in {self.folder} (sources {self.sources}), {libraries}"


def find_package(setting: str, origin: str) -> Package:
    """The package that a setting names: a checkout, a virtual environment, a Python, or '' for this one.

    Args:
        origin: of the setting, for errors.

    Raises:
        InputError: if there is none, or its Python cannot import it.
    """
    python, search_path = _python_of(setting, origin)
    process = subprocess.run([python, "-c", _DESCRIBE], env=_environment(search_path), capture_output=True, text=True,
                             timeout=_START_SECONDS, check=False)
    if process.returncode:
        reason = _error_in(process.stderr)
        raise InputError(f"{origin}: {setting or python}: this Python cannot import ray_yolo ({reason}); give the "
                         "folder of a checkout, or a Python that has it installed")
    found = json.loads(process.stdout.splitlines()[-1])
    return Package(python, search_path, **found)


def describe_packages(packages: tuple[Package, Package]) -> list[str]:
    """A line for each side, or one line if both are equal."""
    a, b = packages
    if a.identity == b.identity:
        return [f"A and B have equal packages: {a}"]
    return [f"A is trained by {a}", f"B is trained by {b}"]


class CommandTraining:
    """Trainings of a comparison as commands, one after the other.

    Args:
        folder: of the comparison.
        packages: of A and B.
        settings: the given settings of A and of B, as plain JSON by path.
        placement: of the comparison; its project and name are replaced.
        each_step: called several times a second while a command runs.
    """

    def __init__(self, folder: Path, packages: tuple[Package, Package], settings: tuple[Mapping[str, Any], ...],
                 placement: Placement, each_step: Callable[[], None]) -> None:
        self._folder, self._packages, self._settings = folder, packages, settings
        self._placement, self._each_step = placement, each_step
        self._output = folder / "output"
        self._output.mkdir(exist_ok=True)

    def train(self, name: str, side: int, seed: int, until: int) -> Outcome:
        """Train a side, 0 or 1, in the run folder `trials/name`, or continue it.

        Raises:
            InputError: if the command refuses its settings.
            ResourcesError: if the cluster lacks its workers.
            TrainingError: if the command ends in any other way than at the end of its training.
        """
        run_folder = self._folder / "trials" / name
        while _is_locked(run_folder):  # by a command whose driver was killed; it trains to its end
            self._wait()
        known = read_outcome(run_folder, until)
        if known:
            return known
        output = self._output / f"{name}.txt"
        exit_code = self._run(self._packages[side], self._arguments(name, side, seed), output)
        outcome = read_outcome(run_folder, until)
        if exit_code == 0 and outcome:
            return outcome
        reason = _error_in(output.read_text(errors="replace"))
        if exit_code == _DIVERGED_OR_LOST:
            return Outcome(reason=reason)
        text = f"{name}: {reason} (all output: {output})"
        if exit_code == _BAD_INPUT:
            raise InputError(text)
        if exit_code == _NO_RESOURCES:
            raise ResourcesError(text)
        raise TrainingError(f"{text}; it ended with {exit_code}; the same command continues")

    def _arguments(self, name: str, side: int, seed: int) -> list[str]:
        settings = self._folder / f"{'ab'[side]}.yaml"
        atomic_write(settings, to_yaml(dict(self._settings[side])), durable=False)
        words = ["--hyp", str(settings), "--seed", str(seed)]
        own = {"project": str((self._folder / "trials").absolute()), "name": name, "storage_path": "",
               "mlflow_uri": "off", "keep_checkpoints": 1}  # MLflow is a record of the comparison
        for field, value in {**self._placement.model_dump(mode="json"), **own}.items():
            if value != Placement.model_fields[field].default:  # a setting that an earlier version may not have
                flag = f"--{field.replace('_', '-')}"
                words += [flag] if value is True else [flag, str(value)]
        return words

    def _run(self, package: Package, arguments: list[str], output: Path) -> int:
        """Run the train command of a package to its end. Returns its exit code."""
        with output.open("w") as text:
            process = subprocess.Popen(
                [package.python, "-m", "ray_yolo.train", *arguments], env=_environment(package.search_path),
                stdin=subprocess.DEVNULL, stdout=text, stderr=subprocess.STDOUT)
            try:
                while process.poll() is None:
                    self._wait()
            finally:
                if process.poll() is None:  # this command is interrupted, or fails
                    process.terminate()  # after Ctrl-C it has the signal already, and saves once
                    try:
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(deadline.seconds_left(_SAVE_SECONDS))
                    finally:  # after the time, or a second Ctrl-C
                        process.kill()  # does nothing if it has ended
        return process.returncode

    def _wait(self) -> None:
        self._each_step()
        time.sleep(_POLL_SECONDS)


def _is_locked(run_folder: Path) -> bool:
    """Whether a command of any version trains in a run folder; `is_held` sees the locks of this version only."""
    with contextlib.suppress(FileNotFoundError), (run_folder / ".lock").open("r+") as lock:
        return not lock_file(lock)
    return False


def _python_of(setting: str, origin: str) -> tuple[str, str]:
    """A Python, and the folder that it searches first."""
    if not setting:
        return sys.executable, os.environ.get("PYTHONPATH", "")
    path = Path(setting).expanduser().absolute()  # not resolved: the Python of a virtual environment is a link
    if path.is_file():
        return str(path), ""
    if (path / "ray_yolo" / "__init__.py").is_file():
        return sys.executable, str(path)
    for python in _PYTHONS:
        if (path / python).is_file():
            return str(path / python), ""
    raise InputError(f"{origin}: {setting}: is no checkout of ray_yolo (a folder with ray_yolo/__init__.py), no "
                     "virtual environment and no Python")


def _environment(search_path: str) -> dict[str, str]:
    """The environment of a side's Python. It does not search the current folder, which may be another checkout."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": search_path}
    if not search_path:
        del environment["PYTHONPATH"]
    return environment


def _error_in(text: str) -> str:
    """The last error that a command has printed, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"\w+Error: ", line)]
    if errors:
        return errors[-1]
    return lines[-1] if lines else "it has printed nothing"
