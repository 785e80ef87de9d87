"""Search spaces: what may be written, and what it becomes."""

from pathlib import Path

import pytest

from ray_yolo.config.effects import Surroundings
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import GENES, canonical
from ray_yolo.core.errors import ConfigError
from ray_yolo.tune.evolution import Gene, propose
from ray_yolo.tune.search import Ladder, SweepConfig
from ray_yolo.tune.space import load_space, read_space, warnings
from ray_yolo.tune.trials import overlay, recipe_value

SPACES = sorted((Path(__file__).parents[3] / "tune_spaces").glob("*.yaml"))
PUBLISHED = {  # gene: (gain, low, high) of YOLOv5 v7.0
    "lr0": (1, 1e-5, 0.1), "lrf": (1, 0.01, 1), "momentum": (0.3, 0.6, 0.98), "weight_decay": (1, 0, 0.001),
    "warmup_epochs": (1, 0, 5), "warmup_momentum": (1, 0, 0.95), "warmup_bias_lr": (1, 0, 0.2), "box": (1, 0.02, 0.2),
    "cls": (1, 0.2, 4), "cls_pw": (1, 0.5, 2), "obj": (1, 0.2, 4), "obj_pw": (1, 0.5, 2), "anchor_t": (1, 2, 8),
    "fl_gamma": (0, 0, 2), "hsv_h": (1, 0, 0.1), "hsv_s": (1, 0, 0.9), "hsv_v": (1, 0, 0.9), "degrees": (1, 0, 45),
    "translate": (1, 0, 0.9), "scale": (1, 0, 0.9), "shear": (1, 0, 10), "perspective": (0, 0, 0.001),
    "flipud": (1, 0, 1), "fliplr": (0, 0, 1), "mosaic": (1, 0, 1), "mixup": (1, 0, 1), "copy_paste": (1, 0, 1),
}


def choice(*values):
    return {"type": "choice", "values": list(values)}


def genes_of(data, recipe=None):
    return read_space({"mosaic": [0, 1], **data}, recipe or Recipe()).space.genes[1:]


class TestForms:
    def test_every_form_of_a_gene(self):
        for entry, gene in [
            ({"low": 1e-5, "high": 0.1, "gain": 2}, Gene("lr0", low=1e-5, high=0.1, gain=2.0)),
            ({"type": "uniform", "low": 0.01, "high": 0.1}, Gene("lr0", low=0.01, high=0.1)),
            ({"type": "loguniform", "low": 0.01, "high": 0.1}, Gene("lr0", low=0.01, high=0.1, log=True)),
            ([0.01, 0.1], Gene("lr0", low=0.01, high=0.1)),
            ([0.01, 0.1, "log"], Gene("lr0", low=0.01, high=0.1, log=True)),
            ({"type": "choice", "values": [0.01, 0.1]}, Gene("lr0", "choice", values=(0.01, 0.1))),
            ({"type": "fixed", "value": 0.02}, Gene("lr0", "choice", gain=0.0, values=(0.02,))),
        ]:
            assert genes_of({"lr0": entry}) == (gene,), entry

    def test_ranges_of_whole_number_fields_are_whole(self):
        assert genes_of({"augment.close_mosaic": [0, 10]}) == (Gene("augment.close_mosaic", "int", 0.0, 10.0),)
        assert genes_of({"batch_size": {"type": "int", "low": 4, "high": 8}}, Recipe(microbatch=1))[0].kind == "int"

    @pytest.mark.parametrize("key", ["lr0", "optimizer.lr0", "recipe.optimizer.lr0"])
    def test_a_gene_has_one_name_however_it_is_written(self, key):
        assert genes_of({key: [0.01, 0.1]})[0].name == "lr0"

    def test_words_and_switches_can_be_chosen(self):
        data = {"optimizer.name": {"type": "choice", "values": ["SGD", "AdamW"]},
                "schedule.cos_lr": {"type": "choice", "values": [True, False]}}
        assert [gene.values for gene in genes_of(data)] == [("SGD", "AdamW"), (True, False)]

    def test_trial_zero_is_the_recipe_moved_into_the_space(self):
        data = {"lr0": [0.02, 0.1], "scale": [0.1, 0.9], "optimizer.name": {"type": "choice", "values": ["AdamW"]}}
        space = read_space(data, Recipe()).space
        assert propose(space, 0, 0, [])[0] == {"lr0": 0.02, "scale": 0.5, "optimizer.name": "AdamW"}


class TestFiles:
    @pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
    def test_every_proposal_of_a_shipped_space_is_a_recipe(self, path):
        base = Recipe(epochs=30)
        space = load_space(path, base).space
        for k in range(40):
            overlay(base, propose(space, 0, k, [])[0])

    @pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
    def test_a_shipped_space_says_how_it_is_run(self, path):
        assert f"--space {path.stem} " in path.read_text()

    @pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
    def test_a_shipped_space_is_found_by_its_name_in_any_folder(self, path, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert load_space(path.stem, Recipe()) == load_space(path, Recipe())

    def test_the_space_of_a_bare_command_is_shipped(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert load_space(SweepConfig().space, Recipe()).search.algorithm == "gp"

    def test_there_is_a_space_for_each_way_to_search(self):
        searches = {path.stem: load_space(path, Recipe()).search for path in SPACES}
        assert {name: (search.algorithm, search.scheduler.name) for name, search in searches.items()} == {
            "evolve": ("evolve", "none"), "ladder": ("gp", "ladder"),
            "quick": ("gp", "ladder")}

    @pytest.mark.parametrize(("search", "algorithm", "parent", "scheduler"), [
        ({}, "gp", "mean", "ladder"), ({"objective": {"mAP50": 1}}, "gp", "mean", "ladder"),
        ({"scheduler": "none"}, "gp", "mean", "none"), ({"algorithm": "evolve"}, "evolve", "single", "none"),
        ({"algorithm": "grid", "scheduler": "ladder"}, "grid", "single", "ladder")])
    def test_a_space_without_an_algorithm_has_the_default_search(self, search, algorithm, parent, scheduler):
        gene = {"type": "choice", "values": [0.01, 0.02]}
        found = read_space({"search": search, "lr0": gene}, Recipe()).search
        assert (found.algorithm, found.parent, found.scheduler.name) == (algorithm, parent, scheduler)

    def test_evolve_has_the_published_genes_ranges_and_gains(self):
        space = load_space(next(path for path in SPACES if path.stem == "evolve"), Recipe()).space
        assert {gene.name: (gene.gain, gene.low, gene.high) for gene in space.genes} == PUBLISHED
        assert set(PUBLISHED) == set(GENES) - {"label_smoothing"}  # which YOLOv5 does not evolve
        assert (space.parent, space.algorithm) == ("single", "evolve")

    def test_numbers_in_exponent_form_are_numbers(self, tmp_path):
        path = tmp_path / "space.yaml"
        path.write_text("lr0: [1e-5, 1e-1, log]\n")
        assert load_space(path, Recipe()).space.genes == (Gene("lr0", low=1e-5, high=0.1, log=True),)


class TestValues:
    @pytest.mark.parametrize("entry", ["{type: fixed, value: 0.1}", "[0.1, 0.1]", "{type: choice, values: [0.1]}"])
    @pytest.mark.parametrize("algorithm", ["gp", "evolve", "random"])
    def test_a_space_in_which_nothing_varies_is_refused(self, entry, algorithm, tmp_path):
        path = tmp_path / "space.yaml"
        path.write_text(f"search: {{algorithm: {algorithm}}}\nlr0: {entry}\nmosaic: {{type: fixed, value: 0.5}}\n")
        with pytest.raises(ConfigError, match=rf"{path}:2: lr0: no gene of the space varies"):
            load_space(path, Recipe())
        path.write_text(path.read_text().replace("{type: fixed, value: 0.5}", "[0, 1]"))
        assert len(load_space(path, Recipe()).space.genes) == 2

    """Which values a space may hold beside those that a field refuses by itself."""

    def test_a_choice_of_image_sizes_is_searched(self):
        assert genes_of({"imgsz": choice(64, 96)})[0].values == (64, 96)


class TestModels:
    @pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
    @pytest.mark.parametrize("model", ["yolov5s", "yolov8n", "yolo26n"])
    def test_trial_zero_of_a_shipped_space_is_the_recipe_of_any_model(self, path, model):
        recipe = Recipe(model=model)
        space = load_space(path, recipe).space
        assert not [text for text in warnings(space, recipe, 300) if "trial 0" in text]
        names = {gene.name for gene in space.genes}
        assert names.isdisjoint({"obj", "cls_pw", "obj_pw", "anchor_t", "fl_gamma"}) or model == "yolov5s"
        assert "box" not in names or ("loss.dfl" in names) == (model != "yolov5s")

    def test_genes_of_a_section_are_those_of_the_model(self):
        data = {"lr0": [0.01, 0.1], "with_anchors": {"obj": [0.2, 4]}, "without_anchors": {"loss.dfl": [1, 2]},
                "mosaic": [0, 1]}
        for model, second in (("yolov5n", "obj"), ("yolov8n", "loss.dfl")):
            genes = read_space(data, Recipe(model=model)).space.genes
            assert [gene.name for gene in genes] == ["lr0", second, "mosaic"]

    def test_sections_do_not_suit_a_search_among_both_kinds_of_models(self):
        data = {"model": choice("yolov5n", "yolov8n"), "with_anchors": {"obj": [0.2, 4]}}
        with pytest.raises(ConfigError):
            read_space(data, Recipe(model="yolov5n"))
        read_space({**data, "model": choice("yolov5n", "yolov5s")}, Recipe(model="yolov5n"))

class TestWarnings:
    def test_a_recipe_outside_of_the_space_is_said(self):
        recipe = Recipe(model="yolov8n")
        data = {"box": [0.02, 0.2], "mosaic": {"type": "fixed", "value": 0.5}, "optimizer.name": choice("Adam", "SGD"),
                "schedule.cos_lr": choice(True)}
        (warning,) = warnings(read_space(data, recipe).space, recipe, 300)
        assert warning == "box: the recipe has 7.5, which this space does not allow; trial 0 has 0.2"

    def test_genes_that_cannot_evolve_are_named(self):
        space = read_space({"search": {"algorithm": "evolve"}, "lr0": [0.001, 0.1], "degrees": [0, 45],
                            "shear": {"low": 0, "high": 1, "gain": 0}}, Recipe()).space
        (warning,) = warnings(space, Recipe(), 300)
        assert warning.startswith("evolve: degrees start at 0 and stay at 0")

    def test_random_search_moves_them(self):
        space = read_space({"search": {"algorithm": "random"}, "degrees": [0, 45]}, Recipe()).space
        assert not list(warnings(space, Recipe(), 300))

    @pytest.mark.parametrize(("trials", "warned"), [(1, False), (2, True), (21, True), (22, False)])
    def test_a_sweep_that_ends_before_its_first_child_is_warned_of(self, trials, warned):
        space = read_space({"search": {"algorithm": "evolve", "random_first": 20}, "lr0": [0.001, 0.1]}, Recipe()).space
        found = list(warnings(space, Recipe(), trials))
        assert len(found) == warned
        assert not found or f"all {trials} trials" in found[0]


def test_every_gene_of_yolov5_can_be_searched():
    for name in GENES:
        value = recipe_value(Recipe(), name)
        genes = genes_of({name: [value, value]}) if name != "mosaic" else genes_of({"scale": [0.5, 0.5]})
        assert canonical(genes[0].name) in GENES.values(), name


@pytest.mark.parametrize(("search", "gene"), [
    ({"algorithm": "gp", "parent": "single"}, {"gain": 2}), ({"parent": "mean"}, {"gain": 2}),
    ({"algorithm": "evolve", "parent": "mean", "random_first": 3, "random_share": 0.5}, {"gain": 2})])
def test_a_setting_that_the_algorithm_reads_is_no_mistake(search, gene):
    space = read_space({"search": search, "lr0": {"low": 0.001, "high": 0.1, **gene}}, Recipe()).space
    assert all(getattr(space, name) == value for name, value in search.items())


def test_settings_of_a_scheduler_are_read():
    data = {"lr0": [0.01, 0.1], "search": {"scheduler": {"name": "ladder", "first_epochs": 3}}}
    assert read_space(data, Recipe()).search.scheduler == Ladder(first_epochs=3)


class TestEffects:
    def test_a_gene_that_another_one_switches_on_has_an_effect(self) -> None:
        recipe = Recipe.model_validate({"augment": {"mosaic": 0.0}})
        data = {"search": {"algorithm": "random"}, "mosaic": [0.0, 1.0], "mixup": [0.0, 0.5]}
        genes = read_space(data, recipe).space.genes
        assert [gene.name for gene in genes] == ["mosaic", "mixup"]

    def test_the_included_spaces_lose_genes_without_effect(self) -> None:
        around = Surroundings(num_classes=1, has_outlines=False)
        whole, part = load_space("evolve", Recipe()), load_space("evolve", Recipe(), around)
        assert set(part.left_out) == {"cls", "cls_pw", "copy_paste"}
        assert part.left_out["copy_paste"] == "no training label has an outline"  # mosaic is on
        names, kept = ({gene.name for gene in each.space.genes} for each in (whole, part))
        assert names - kept == set(part.left_out)
