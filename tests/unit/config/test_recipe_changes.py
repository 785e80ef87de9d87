"""Settings that change on the way: how they are written, what they may be, and what holds in each epoch."""

from __future__ import annotations

from ray_yolo.cli import parse_train
from ray_yolo.config.recipe import CHANGEABLE, Change, Recipe, recipe_digest
from ray_yolo.config.settings import describe

CHANGES = ["4: box=0.1", "2: mosaic=0 optimizer.lr0=1e-3 schedule.cos_lr=yes"]
RECIPE = Recipe.model_validate({"epochs": 8, "changes": CHANGES})


def test_each_holds_from_its_epoch_on_over_those_before_it() -> None:
    held = [RECIPE.at(epoch) for epoch in range(8)]
    assert [recipe.augment.mosaic for recipe in held] == [1.0] * 2 + [0.0] * 6
    assert [recipe.optimizer.lr0 for recipe in held] == [0.01] * 2 + [0.001] * 6
    assert [recipe.schedule.cos_lr for recipe in held] == [False] * 2 + [True] * 6
    assert [recipe.loss.box for recipe in held] == [0.05] * 4 + [0.1] * 4
    assert held[0] == Recipe(epochs=8)
    assert [RECIPE.last_change(epoch) for epoch in range(8)] == [0, 0, 2, 2, 4, 4, 4, 4]


def test_two_for_the_same_epoch_hold_together() -> None:
    recipe = Recipe.model_validate({"changes": ["3: lr0=0.1 box=0.2", "3:lr0=0.1 mosaic=0"]})
    held = recipe.at(3)
    assert (held.optimizer.lr0, held.loss.box, held.augment.mosaic) == (0.1, 0.2, 0)


def test_the_plain_form_is_the_written_one_and_reads_back() -> None:
    texts = RECIPE.model_dump(mode="json")["changes"]
    assert texts == ["2: augment.mosaic=0.0 optimizer.lr0=0.001 schedule.cos_lr=true", "4: loss.box=0.1"]
    assert Recipe.model_validate(RECIPE.model_dump(mode="json")) == RECIPE
    assert recipe_digest(RECIPE) != recipe_digest(Recipe(epochs=8))
    assert Change.model_validate("5:") == Change(epoch=5, settings={})


def test_flags_files_and_the_printed_settings_agree(tmp_path) -> None:
    file = tmp_path / "hyp.yaml"
    file.write_text("epochs: 8\nchanges: ['4: box=0.1', '2: mosaic=0 optimizer.lr0=1e-3 schedule.cos_lr=yes']\n")
    parsed = parse_train(["--epochs", "8", "--changes", *CHANGES])
    assert parsed.config.recipe == parse_train(["--hyp", str(file)]).config.recipe == RECIPE
    file.write_text(describe(*parsed[:2]))
    assert parse_train(["--config", str(file)]).config == parsed.config


def test_every_gene_of_yolov5_can_change() -> None:
    from ray_yolo.config.settings import GENES

    assert set(GENES.values()) <= set(CHANGEABLE)
