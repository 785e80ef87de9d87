"""Whether two sweeps are the same, by the contents of what their settings only name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import InputError
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.tune.evolution import Gene, Space
from ray_yolo.tune.identity import changed_parts, has_same_inputs, identity_of, versions
from ray_yolo.tune.ledger import Ledger
from tests.support.schedules import sweep_of


def labels(kind: int) -> AnnotationIndex:
    return AnnotationIndex(("a.jpg",), np.full((1, 2), 32, np.int32), np.array([0, 1]), np.array([kind]),
                           np.array([[1, 2, 3, 4]], np.float32), ("zero", "one"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "net.yaml").write_text("nc: 2")
    (tmp_path / "start.pt").write_bytes(b"weights")
    return tmp_path / "net.yaml", tmp_path / "start.pt"


@pytest.fixture
def recipe(files: tuple[Path, Path]) -> Recipe:
    return Recipe(model=str(files[0]), weights=str(files[1]))


@pytest.fixture
def other_weights(tmp_path: Path) -> Path:
    (tmp_path / "other.pt").write_bytes(b"others")
    return tmp_path / "other.pt"


@pytest.fixture
def space(other_weights: Path) -> Space:
    return Space((Gene("weights", "choice", values=("", str(other_weights))),), ({"weights": ""},))


def test_every_input_has_a_digest_of_its_contents(
        recipe: Recipe, space: Space, files: tuple[Path, Path], other_weights: Path) -> None:
    before = identity_of(recipe, space, labels(0), labels(1))
    assert identity_of(recipe, space, labels(0), labels(1)) == before
    changes = {"data set": identity_of(recipe, space, labels(1), labels(1)),
               "validation set": identity_of(recipe, space, labels(0), labels(0)),
               "base recipe": identity_of(recipe.model_copy(update={"seed": 1}), space, labels(0), labels(1))}
    for part, path in (("model", files[0]), ("weights", files[1]), ("weights", other_weights)):
        content = path.read_bytes()
        path.write_bytes(content + b"changed")
        changes[f"{part} {path}"] = identity_of(recipe, space, labels(0), labels(1))
        path.write_bytes(content)
    for part, after in changes.items():
        assert changed_parts(before, after) == [part]
        assert has_same_inputs(before, after) == (part == "base recipe")


def test_another_validation_set_under_the_same_name_is_another_sweep(
        recipe: Recipe, space: Space, tmp_path: Path) -> None:
    path, first = tmp_path / "ledger.jsonl", identity_of(recipe, space, labels(0), labels(0))
    Ledger(path, sweep_of().model_copy(update={"identity": first})).close()
    content = path.read_bytes()
    second = identity_of(recipe, space, labels(0), labels(1))
    with pytest.raises(InputError):
        Ledger(path, sweep_of().model_copy(update={"identity": second}))
    assert path.read_bytes() == content
    Ledger(path, sweep_of().model_copy(update={"identity": first})).close()


def test_a_ledger_of_an_earlier_release_continues_but_its_results_are_not_taken_over(
        recipe: Recipe, space: Space) -> None:
    own = identity_of(recipe, space, labels(0), labels(1))
    without_versions = own
    own = {**versions(), **own}
    for earlier in without_versions, {part: own[part] for part in ("data set", "base recipe")}:
        assert changed_parts(earlier, own) == []
        assert not has_same_inputs(earlier, own)
    assert has_same_inputs(without_versions, without_versions)  # a continued one may have taken them over before


@pytest.mark.parametrize("library", ["ray_yolo", "torch"])
def test_trainings_of_another_version_are_not_comparable(recipe: Recipe, space: Space, library: str) -> None:
    own = {**versions(), **identity_of(recipe, space, labels(0), labels(1))}
    other = {**own, library: "9.9"}
    assert has_same_inputs(own, dict(own))
    assert changed_parts(other, own) == [library]
    assert not has_same_inputs(other, own)
