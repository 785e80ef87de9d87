"""Search spaces: what may be written, what it becomes, and the message of each mistake."""

from pathlib import Path

import pytest

from ray_yolo.config.effects import UNKNOWN, Surroundings
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import GENES, canonical
from ray_yolo.core.errors import ConfigError, InputError
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

    @pytest.mark.parametrize("space", ["quik", "quick.yaml", "tune_spaces/quick.yaml"])
    def test_a_space_that_is_not_there_is_answered_with_the_shipped_names(self, space, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InputError, match=f"space: {space}: no such file.*evolve, ladder, quick"):
            load_space(space, Recipe())

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
    """Which values a space may hold beside those that a field refuses by itself."""

    @pytest.mark.parametrize(("data", "base", "message"), [
        ({"imgsz": [64, 256]}, Recipe(),
         r"imgsz: a range includes every whole number from 64 to 256, .* \[64, 96, 128, 160, 192, 224, 256\]\}"),
        ({"imgsz": [64, 8192]}, Recipe(), r"values: \[64, 96, ..., 8192\]"),
        ({"batch_size": [8, 16]}, Recipe(microbatch=4), r"values: \[8, 12, 16\]"),
        ({"batch_size": [-1, 2]}, Recipe(microbatch=1), r"values: \[-1, 1, 2\]"),
        ({"batch_size": choice(8, 16)}, Recipe(), "batch_size can be searched only if microbatch is set"),
        ({"quad": choice(True, False)}, Recipe(batch_size=8), "add --microbatch"),
        ({"microbatch": choice(2, 4)}, Recipe(batch_size=-1), "add --batch-size"),
        ({"rect": choice(True, False), "quad": choice(False, True)}, Recipe(batch_size=8, microbatch=4),
         "rect True, quad True make an invalid recipe: quad and rect exclude each other"),
        ({"batch_size": [1, 20000]}, Recipe(microbatch=1), "batch_size: more than 10,000 values or"),
        ({"augment.close_mosaic": [0, 1e300]}, Recipe(), "whole limits go up to 9007199254740992"),
        ({"exact": [0, 1]}, Recipe(), r"exact: is true or false; write \{type: choice, values: \[true, false\]\}"),
        ({"objective.recall": [0, 1]}, Recipe(), "objective.recall cannot be searched: trials with other values"),
    ])
    def test_values_that_would_fail_trials_are_refused_with_what_to_write(self, data, base, message):
        with pytest.raises(ConfigError, match=message):
            read_space({"lr0": [0.01, 0.1], **data}, base)

    @pytest.mark.parametrize(("name", "values", "reason"), [
        ("data", ["a.yaml", "b.yaml"], "measure another fitness"),
        ("classes", [0, 1], "measure another fitness"),
        ("single_cls", [True, False], "measure another fitness"),
        ("epochs", [5, 50], "choose --epochs for all trials"),
        ("patience", [0, 10], "how long a trial trains"),
        ("noval", [True, False], "when fitness is measured"),
        ("seed", [0, 1], "a lucky seed is not a better recipe"),
        ("threads", [1, 2], "speed and the last bits"),
        ("strict", [True, False], "only checks the data set"),
        ("allow_empty", [True, False], "only checks the data set"),
        ("labels_with_confidence", [True, False], "measure another fitness"),
        ("keep_difficult", [True, False], "measure another fitness"),
        ("allow_names", [True, False], "only checks the classes"),
        ("evaluate.iou", [0.5, 0.7], "how fitness is measured"),
        ("evaluate.confidence", [0.001, 0.25], "how fitness is measured"),
        ("evaluate.max_detections", [100, 300], "how fitness is measured"),
        ("evaluate.batch_size", [8, 32], "how fitness is measured"),
        ("recipe.evaluate.iou", [0.5, 0.7], "how fitness is measured"),
        ("objective.map50", [0.1, 1.0], "measure another fitness"),
    ])
    def test_a_field_that_makes_no_better_recipe_is_refused_with_the_reason(self, name, values, reason):
        with pytest.raises(ConfigError, match=f"{name} cannot be searched: .*{reason}.*; remove it"):
            genes_of({name: choice(*values)})

    def test_a_choice_of_image_sizes_is_searched(self):
        assert genes_of({"imgsz": choice(64, 96)})[0].values == (64, 96)


MISTAKES = {
    "lr_0: [0.1, 0.2]": r"space.yaml:2: unknown setting 'lr_0'; did you mean optimizer.lr0\?",
    "optimizer: [0.1, 0.2]": "space.yaml:2: 'optimizer' is a section; give one of its fields: optimizer.name, ",
    "num_workers: [1, 4]": "space.yaml:2: num_workers decides where a trial is trained, not what is trained; a space",
    "placement.cache: [1, 4]": "space.yaml:2: placement.cache decides where",
    "iou_t: [0.1, 0.7]": "space.yaml:2: iou_t cannot be searched: YOLOv5's loss does not read it either",
    "lr0: {low: 0.1, high: 0.01}": "space.yaml:2: lr0: low 0.1 is above high 0.01; swap them",
    "lr0: [0.1, 0.01]": "space.yaml:2: lr0: low 0.1 is above high 0.01",
    "lr0: [0, 0.1, log]": "space.yaml:2: lr0: loguniform needs a low above 0, not 0",
    "lr0: [0.01, 5.0]": "space.yaml:2: lr0: 5.0 is outside of the recipe's bounds: optimizer.lr0 is a number .*<= 1.0",
    "anchor_t: [0.5, 5.0]": "space.yaml:2: anchor_t: 0.5 is outside of .*: loss.anchor_t is a number > 1",
    "optimizer.name: {type: choice, values: [SGD, Adom]}":
        "space.yaml:2: optimizer.name: 'Adom' is outside of .*: optimizer.name is one of SGD, Adam, AdamW",
    "imgsz: {type: choice, values: [320, 333]}": "space.yaml:2: imgsz: 333 is outside",
    "optimizer.name: [1, 2]": "space.yaml:2: optimizer.name: 1.0 is outside",
    "lr0: 0.1": r"space.yaml:2: lr0: got 0.1; write \{low: 0.1, high: 0.9\}, \[0.1, 0.9\]",
    "lr0: [0.1]": r"space.yaml:2: lr0: got \[0.1\]; write",
    "lr0: {low: 0.1}": "space.yaml:2: lr0.high: is missing",
    "lr0: {low: 0.1, high: x}": "space.yaml:2: lr0.high: got 'x': .*number",
    "lr0: {low: 0.1, high: 0.2, gian: 1}": r"space.yaml:2: lr0.gian: unknown key; did you mean gain\?",
    "lr0: {low: 0.1, high: 0.2, gain: -1}": "space.yaml:2: lr0.gain: got -1: .*greater than or equal to 0",
    "lr0: {type: normal, low: 0.1, high: 0.2}":
        "space.yaml:2: lr0: unknown type 'normal'; the types are uniform, loguniform, int, choice, fixed",
    "lr0: {type: choice, values: []}": "space.yaml:2: lr0.values: got .*at least 1 item",
    "close_mosaic: [0, 3]": r"space.yaml:2: unknown setting 'close_mosaic'; did you mean augment.close_mosaic\?",
    "augment.close_mosaic: {type: int, low: 0, high: 2.5}":
        "space.yaml:2: augment.close_mosaic: a whole number needs whole limits, not 0 and 2.5",
    "augment.close_mosaic: {type: uniform, low: 0, high: 5}":
        "space.yaml:2: augment.close_mosaic: the field takes whole numbers; write type: int",
    "optimizer.lr0: [0.1, 0.2]\nlr0: [0.1, 0.2]": "space.yaml:3: lr0: lr0 is in this space already; remove one",
    "batch_size: {type: choice, values: [8, 16]}\nmicrobatch: {type: choice, values: [3, 16]}":
        "space.yaml:1: .*batch_size 8, microbatch 3 make an invalid recipe: microbatch 3 does not divide batch_size 8",
    "search: {algorithm: genetic}": "space.yaml:2: search.algorithm: got 'genetic': .*'evolve', 'random'",
    "search: {sheduler: ladder}": r"space.yaml:2: search.sheduler: unknown key; did you mean scheduler\?",
    "search: {scheduler: {name: ladder, first_epoch: 3}}":
        r"space.yaml:2: search.scheduler.first_epoch: unknown key; did you mean first_epochs\?",
    "search: {scheduler: hyperband}": "space.yaml:2: search.scheduler: got .*hyperband",
    "search: {objective: {map: 1}}": "search.objective: unknown metric 'map'; the metrics are precision, ",
    "search: {objective: {mAP50: 0}}": "space.yaml:2: search.objective: weights must be 0 or more, and not all 0",
    "search: {objective: {mAP50: -1, recall: 2}}": "space.yaml:2: search.objective: weights must be 0 or more",
    "search: {algorithm: grid}\nlr0: [0.1, 0.2]": "space.yaml:1: lr0: a grid needs points, and this is a range",
    "search: {random_share: 0.5}\nlr0: [0.01, 0.1]": "search: random_share is a setting of evolve; write algorithm",
    "search: {algorithm: evolve}\ndegrees: [0, 45]":
        "space.yaml:1: no gene can evolve: mutation multiplies, and every gene is 0, fixed, or",
    "search: {algorithm: evolve}\nlr0: {low: 0.01, high: 0.1, gain: 0}": "space.yaml:1: no gene can evolve",
    "search: {algorithm: random}": r"space.yaml:1: the space names no gene; write for example lr0: \[0.001, 0.1, log\]",
}


@pytest.mark.parametrize("text", MISTAKES, ids=[text.partition("\n")[0] for text in MISTAKES])
def test_a_mistake_is_reported_with_its_line(text, tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text(f"# a space\n{text}\n")
    with pytest.raises(ConfigError, match=MISTAKES[text]) as error:
        load_space(path, Recipe(microbatch=None))
    assert "\n" not in str(error.value)


def test_the_line_is_that_of_the_value(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("lr0:\n  low: 0.1\n  high: x\n")
    with pytest.raises(ConfigError, match=r"space.yaml:3: lr0.high: got 'x'"):
        load_space(path, Recipe())


def test_a_mapping_without_a_file_says_space():
    with pytest.raises(ConfigError, match=r"^space: unknown setting 'lr'"):
        read_space({"lr": [0, 1]}, Recipe())


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

    def test_a_mistake_in_the_section_of_other_models_is_refused_too(self):
        with pytest.raises(ConfigError, match="unknown setting 'nonsense'"):
            read_space({"lr0": [0.01, 0.1], "without_anchors": {"nonsense": [1, 2]}}, Recipe(model="yolov5n"))

    def test_sections_do_not_suit_a_search_among_both_kinds_of_models(self):
        data = {"model": choice("yolov5n", "yolov8n"), "with_anchors": {"obj": [0.2, 4]}}
        with pytest.raises(ConfigError, match="with_anchors: the space has models with anchors and without"):
            read_space(data, Recipe(model="yolov5n"))
        read_space({**data, "model": choice("yolov5n", "yolov5s")}, Recipe(model="yolov5n"))

    def test_an_error_in_a_section_has_its_line(self, tmp_path):
        path = tmp_path / "space.yaml"
        for section, message in (("\n  obj: [4, 2]", r"3: obj: low 4 is above high 2"),
                                 (" 5", "2: with_anchors: got 5; write genes")):
            path.write_text(f"lr0: [0.01, 0.1]\nwith_anchors:{section}\n")
            for model in ("yolov5n", "yolov8n"):
                with pytest.raises(ConfigError, match=f"space.yaml:{message}"):
                    load_space(path, Recipe(model=model))


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

    def test_other_algorithms_have_no_children(self):
        search = {"algorithm": "random", "random_first": 20}
        assert not list(warnings(read_space({"search": search, "lr0": [0.001, 0.1]}, Recipe()).space, Recipe(), 5))


def test_every_gene_of_yolov5_can_be_searched():
    for name in GENES:
        value = recipe_value(Recipe(), name)
        genes = genes_of({name: [value, value]}) if name != "mosaic" else genes_of({"scale": [0.5, 0.5]})
        assert canonical(genes[0].name) in GENES.values(), name


def test_settings_of_a_scheduler_are_read():
    data = {"lr0": [0.01, 0.1], "search": {"scheduler": {"name": "ladder", "first_epochs": 3}}}
    assert read_space(data, Recipe()).search.scheduler == Ladder(first_epochs=3)


class TestEffects:
    @pytest.mark.parametrize(("data", "recipe", "around", "reason"), [
        ({"obj": [0.2, 4.0]}, {"model": "yolov8n"}, UNKNOWN, "the loss of yolov8n does not read it"),
        ({"mixup": [0.0, 0.5]}, {"augment": {"mosaic": 0.0}}, UNKNOWN, "no sample is a mosaic"),
        ({"cls": [0.2, 4.0]}, {}, Surroundings(num_classes=1), "no term of classes where there is only one"),
        ({"copy_paste": [0.0, 0.5]}, {}, Surroundings(has_outlines=False), "no training label has an outline"),
    ])
    def test_a_gene_without_effect_is_refused_with_its_line(
            self, tmp_path: Path, data: dict[str, object], recipe: dict[str, object], around: Surroundings, reason: str
    ) -> None:
        path = tmp_path / "space.yaml"
        [(gene, limits)] = data.items()
        path.write_text(f"lr0: [0.01, 0.1]\n{gene}: {limits}\n")
        with pytest.raises(ConfigError, match=rf"space\.yaml:2: {gene} has no effect: .*{reason}.*; remove it"):
            load_space(path, Recipe.model_validate(recipe), around)

    def test_a_gene_that_another_one_switches_on_has_an_effect(self) -> None:
        recipe = Recipe.model_validate({"augment": {"mosaic": 0.0}})
        data = {"search": {"algorithm": "random"}, "mosaic": [0.0, 1.0], "mixup": [0.0, 0.5]}
        genes = read_space(data, recipe).space.genes
        assert [gene.name for gene in genes] == ["mosaic", "mixup"]

    def test_the_included_spaces_lose_genes_without_effect(self) -> None:
        around = Surroundings(num_classes=1, has_outlines=False)
        whole, part = load_space("evolve", Recipe()), load_space("evolve", Recipe(), around)
        assert set(part.left_out) == {"cls", "cls_pw", "copy_paste"}
        names, kept = ({gene.name for gene in each.space.genes} for each in (whole, part))
        assert names - kept == set(part.left_out)
