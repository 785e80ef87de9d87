"""Families of other packages: a toy one end to end, and what is refused."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_yolo.config import model_facts
from ray_yolo.config.model_facts import MODELS, plugin_of, plugins
from ray_yolo.core.errors import ConfigError
from ray_yolo.models.families import find_family
from tests.support.packages import write_package

TOY = Path(__file__).parents[2] / "support" / "toy_family"


def install(folder: Path, package: str = "toy_family", line: str = "toy = toy_family:PLUGIN") -> Path:
    """What an installer leaves in `folder`."""
    if not (folder / "toy_family").exists():
        shutil.copytree(TOY, folder / "toy_family", ignore=shutil.ignore_patterns("__pycache__"))
    write_package(folder, package, model_facts.GROUP, line)
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


def test_no_plugin_is_looked_up_for_our_own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_facts, "plugins", lambda: pytest.fail("looked up"))
    files = ["mine.yaml", "mine.pt", "mine.safetensors", "mine.onnx"]
    assert all(plugin_of(name) is None for name in (*MODELS, *files))


def test_an_installed_family_is_known_without_its_code(installed: Path) -> None:
    found = plugin_of("toy")
    assert found is not None
    assert (found.package, found.version) == ("toy_family", "1.5")
    assert "toy_family.code" not in sys.modules
    assert find_family("toy").models.keys() == {"toy"}
    with pytest.raises(ConfigError):
        find_family("toyy")


def test_the_name_of_a_model_may_have_a_dot(installed: Path) -> None:
    """As rtdetr-v2.1 has."""
    with (installed / "toy_family" / "__init__.py").open("a") as code:
        code.write("DOTTED = Plugin({'toy-v2.1': ModelFacts('toy')}, '')\n")
    install(installed, "dotted", "dotted = toy_family:DOTTED")
    plugins.cache_clear()
    found = plugin_of("toy-v2.1")
    assert found is not None
    assert found.package == "dotted"


def test_a_name_of_two_packages_is_refused(installed: Path) -> None:
    install(installed, "other_toys", "other = toy_family:PLUGIN")
    plugins.cache_clear()
    with pytest.raises(ConfigError):
        plugin_of("toy")


def test_a_plugin_that_cannot_be_imported_is_refused(installed: Path) -> None:
    install(installed, "broken", "x = nowhere:PLUGIN")
    plugins.cache_clear()
    with pytest.raises(ConfigError):
        plugin_of("anything")
