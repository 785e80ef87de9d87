"""The identity of a recipe, by which runs and sweeps are found again."""

from __future__ import annotations

import hashlib

import pytest

from ray_yolo.config.recipe import Recipe, recipe_digest
from ray_yolo.config.sections import LossConfig
from ray_yolo.config.settings import leaves
from ray_yolo.core.versioned import FORMAT


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


@pytest.mark.parametrize("set_later", [{"later": True}, {"loss": {"box": 0.1, "later": 2.0}}])
def test_a_field_that_is_added_changes_the_digest_once_it_is_used(set_later: dict[str, object]) -> None:
    now, later = Recipe.model_validate(ASKED), LaterRecipe.model_validate({**ASKED, **set_later})
    assert recipe_digest(later) != recipe_digest(now)


def test_recipes_that_differ_have_digests_that_differ() -> None:
    for path, value in (("seed", 1), ("loss.box", 0.2), ("freeze", 3), ("changes", "5: lr0=0.1")):
        section, _, name = path.rpartition(".")
        fields = {section: {name: value}} if section else {name: value}
        now, other = Recipe.model_validate(ASKED), Recipe.model_validate({**ASKED, **fields})
        assert recipe_digest(now) != recipe_digest(other), path


def test_the_format_of_files_moves_with_the_settings() -> None:
    """After a release, increase FORMAT when settings are added, renamed or removed, and state the new digest."""
    paths = sorted(".".join(keys) for keys, _ in leaves(Recipe().model_dump(mode="json")))
    digest = hashlib.sha256("\n".join(paths).encode()).hexdigest()[:16]
    assert (FORMAT, digest) == (2, "f64dd1b302b6c554")
