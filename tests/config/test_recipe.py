"""The identity of a recipe, by which runs and sweeps are found again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ray_yolo.config.recipe import Recipe, is_digest_of, recipe_digest
from ray_yolo.config.sections import LossConfig

RUN_OF_0_1_0 = Path(__file__).parents[1] / "fixtures" / "0.1.0" / "runs" / "train" / "exp" / "run.json"


class LaterLoss(LossConfig):
    """A section with a field that it does not have yet."""

    later: float = 1.5


class LaterRecipe(Recipe):
    """A recipe with fields that it does not have yet."""

    later: bool = False
    loss: LaterLoss = LaterLoss()


ASKED = {"epochs": 8, "loss": {"box": 0.1}, "freeze": 2, "changes": "4: lr0=0.1"}


@pytest.mark.parametrize("asked", [{}, ASKED])
def test_a_field_that_is_added_with_a_default_changes_no_digest(asked: dict[str, object]) -> None:
    now, later = Recipe.model_validate(asked), LaterRecipe.model_validate(asked)
    assert recipe_digest(later) == recipe_digest(now)
    assert is_digest_of(recipe_digest(now), later)


@pytest.mark.parametrize("set_later", [{"later": True}, {"loss": {"box": 0.1, "later": 2.0}}])
def test_a_field_that_is_added_changes_the_digest_once_it_is_used(set_later: dict[str, object]) -> None:
    now, later = Recipe.model_validate(ASKED), LaterRecipe.model_validate({**ASKED, **set_later})
    assert recipe_digest(later) != recipe_digest(now)
    assert not is_digest_of(recipe_digest(now), later)


@pytest.mark.parametrize(("path", "value"), [("seed", 1), ("loss.box", 0.2), ("freeze", 3), ("changes", "5: lr0=0.1")])
def test_recipes_that_differ_have_digests_that_differ(path: str, value: object) -> None:
    section, _, name = path.rpartition(".")
    fields = {section: {name: value}} if section else {name: value}
    assert not is_digest_of(recipe_digest(Recipe.model_validate(ASKED)), Recipe.model_validate({**ASKED, **fields}))


def test_a_digest_of_0_1_0_is_known_by_every_later_recipe_that_is_the_same() -> None:
    record = json.loads(RUN_OF_0_1_0.read_text())
    assert is_digest_of(record["digest"], Recipe.model_validate(record["asked"]))
    assert is_digest_of(record["digest"], LaterRecipe.model_validate(record["asked"]))
    for other in ({"later": True}, {"loss": {**record["asked"]["loss"], "later": 2.0}}, {"epochs": 5}):
        assert not is_digest_of(record["digest"], LaterRecipe.model_validate({**record["asked"], **other}))
