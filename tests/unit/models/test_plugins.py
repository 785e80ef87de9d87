"""Families of other packages: a toy one end to end, and what is refused."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_yolo.config import model_facts
from ray_yolo.config.model_facts import MODELS, plugin_of, plugins
from ray_yolo.core.cache_folder import cache_folder
from ray_yolo.core.errors import ConfigError
from ray_yolo.models.families import find_family

TOY = Path(__file__).parents[2] / "support" / "toy_family"
TRAIN = ["train", "--data", "shapes8", "--model", "toy", "--imgsz", "64", "--epochs", "40", "--batch-size", "4",
         "--microbatch", "2", "--num-workers", "0", "--noplots", "--mlflow-uri", "off", "--name", "mine"]


def install(folder: Path, package: str = "toy_family", line: str = "toy = toy_family:PLUGIN") -> Path:
    """What an installer leaves in `folder`."""
    if not (folder / "toy_family").exists():
        shutil.copytree(TOY, folder / "toy_family", ignore=shutil.ignore_patterns("__pycache__"))
    info = folder / f"{package}-1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[{model_facts.GROUP}]\n{line}\n")
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = install(tmp_path / "site")
    monkeypatch.syspath_prepend(folder)
    plugins.cache_clear()
    yield folder
    plugins.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "toy_family"]:
        del sys.modules[name]


def start(folder: Path, *words: str, site: Path | None = None) -> subprocess.Popen[str]:
    """A command in a process that has the packages in `site`."""
    program = (f"import sys; sys.path[:0] = {[str(site)] * bool(site)!r}; sys.argv = ['ray_yolo', *{list(words)!r}]\n"
               "from ray_yolo.cli import console\nsys.exit(console())")
    return subprocess.Popen([sys.executable, "-c", program], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)


def run(folder: Path, *words: str, site: Path | None = None) -> tuple[int, str]:
    """The exit status of a command and what it printed."""
    process = start(folder, *words, site=site)
    output = "".join(process.communicate())
    return process.returncode, output


def test_no_plugin_is_looked_up_for_our_own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_facts, "plugins", lambda: pytest.fail("looked up"))
    assert [plugin_of(name) for name in (*MODELS, "mine.yaml")] == [None] * (len(MODELS) + 1)


def test_an_installed_family_is_known_without_its_code(installed: Path) -> None:
    found = plugin_of("toy")
    assert found is not None
    assert (found.package, found.version) == ("toy_family", "1.5")
    assert "toy_family.code" not in sys.modules
    assert find_family("toy").models.keys() == {"toy"}
    with pytest.raises(ConfigError, match="did you mean toy"):
        find_family("toyy")


def test_a_name_of_two_packages_is_refused_with_both(installed: Path) -> None:
    install(installed, "other_toys", "other = toy_family:PLUGIN")
    plugins.cache_clear()
    with pytest.raises(ConfigError, match=r"'toy' is offered by .*other_toys.*"):
        plugin_of("toy")


@pytest.mark.parametrize(("line", "reason"), [
    ("x = toy_family:TAKEN", "which is a model of ray_yolo"), ("x = toy_family:MODELS", "is no ray_yolo"),
    ("x = nowhere:PLUGIN", "cannot be imported: ModuleNotFoundError")])
def test_a_plugin_that_cannot_be_used_is_refused_with_its_package(installed: Path, line: str, reason: str) -> None:
    with (installed / "toy_family" / "__init__.py").open("a") as code:
        code.write("TAKEN = Plugin({'yolov5n': ModelFacts('toy')}, '')\nMODELS = {}\n")
    install(installed, "broken", line)
    plugins.cache_clear()
    with pytest.raises(ConfigError, match=f"the package broken.*{reason}"):
        plugin_of("anything")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plugin_family_works_in_every_command_and_is_refused_where_missing(
        tmp_path: Path) -> None:
    site, run_dir = install(tmp_path / "site"), tmp_path / "runs" / "train" / "mine"
    training = start(tmp_path, *TRAIN, site=site)
    while training.poll() is None and not list(run_dir.glob("checkpoints/step-*/MANIFEST.json")):
        time.sleep(0.05)
    training.send_signal(signal.SIGINT)
    training.communicate()
    assert training.returncode == 130
    status, output = run(tmp_path, *TRAIN, site=site)
    assert status == 0, output
    assert json.loads((run_dir / "run.json").read_text())["provenance"]["toy_family"] == "1.5"
    weights, pictures = str(run_dir / "weights" / "best.pt"), cache_folder() / "shapes8-v2" / "images" / "val"
    for words in (["val", "--noplots"], ["predict", "--source", str(pictures)], ["export", "--format", "torchscript"]):
        status, output = run(tmp_path, *words, "--weights", weights, site=site)
        assert status == 0, output
    assert "toy_family 1.5: toy" in run(tmp_path, "checks", site=site)[1]
    status, output = run(tmp_path, "val", "--weights", weights)
    assert status == 2
    assert "is of the package toy_family (version 1.5), which is not installed here" in output
