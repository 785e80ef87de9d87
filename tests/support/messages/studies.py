"""Search spaces, old results for a warm start, sides of a comparison, ledgers, and what is refused about them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ray_yolo.cli import parse_compare
from ray_yolo.config.effects import UNKNOWN, Surroundings
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import ConfigError
from ray_yolo.runs.run_record import SweepRecord, write_record
from ray_yolo.tune.files import read_warm_start
from ray_yolo.tune.ledger import Ledger, read_ledger
from ray_yolo.tune.search import Search
from ray_yolo.tune.sides import read_sides
from ray_yolo.tune.space import load_space, read_space
from ray_yolo.tune.study import StudyEvent
from tests.support.messages import Refusal
from tests.support.schedules import SPACE, run_sweep, sweep_of

SPACES = {
    "lr_0: [0.1, 0.2]": "2: unknown setting 'lr_0'; did you mean optimizer.lr0?",
    "optimizer: [0.1, 0.2]":
        "2: 'optimizer' is a section; give one of its fields: optimizer.name, optimizer.lr0, optimizer.momentum, "
        "optimizer.weight_decay, optimizer.nominal_batch, optimizer.backbone_lr, optimizer.clip_norm",
    "num_workers: [1, 4]":
        "2: num_workers decides where a trial is trained, not what is trained; a space names fields of the recipe "
        "only (all trials have the placement of the command line)",
    "placement.cache: [1, 4]":
        "2: placement.cache decides where a trial is trained, not what is trained; a space names fields of the "
        "recipe only (all trials have the placement of the command line)",
    "iou_t: [0.1, 0.7]": "2: iou_t cannot be searched: YOLOv5's loss does not read it either; remove it",
    "lr0: {low: 0.1, high: 0.01}": "2: lr0: low 0.1 is above high 0.01; swap them",
    "lr0: [0.1, 0.01]": "2: lr0: low 0.1 is above high 0.01; swap them",
    "lr0: [0, 0.1, log]": "2: lr0: loguniform needs a low above 0, not 0; raise it, or use uniform",
    "lr0: [0.01, 5.0]": "2: lr0: 5.0 is outside of the recipe's bounds: optimizer.lr0 is a number >= 1e-06 and <= 1.0",
    "anchor_t: [0.5, 5.0]": "2: anchor_t: 0.5 is outside of the recipe's bounds: loss.anchor_t is a number > 1.0",
    "optimizer.name: {type: choice, values: [SGD, Adom]}":
        "2: optimizer.name: 'Adom' is outside of the recipe's bounds: optimizer.name is one of SGD, Adam, AdamW",
    "imgsz: {type: choice, values: [320, 333]}":
        "2: imgsz: 333 is outside of the recipe's bounds: imgsz is a whole number >= 64 and <= 8192",
    "optimizer.name: [1, 2]":
        "2: optimizer.name: 1.0 is outside of the recipe's bounds: optimizer.name is one of SGD, Adam, AdamW",
    "lr0: 0.1": "2: lr0: got 0.1; write {low: 0.1, high: 0.9}, [0.1, 0.9], [0.001, 0.1, log], or a mapping with a type",
    "lr0: [0.1]":
        "2: lr0: got [0.1]; write {low: 0.1, high: 0.9}, [0.1, 0.9], [0.001, 0.1, log], or a mapping with a type",
    "lr0: {low: 0.1}": "2: lr0.high: is missing",
    "lr0: {low: 0.1, high: x}":
        "2: lr0.high: got 'x': Input should be a valid number, unable to parse string as a number",
    "lr0: {low: 0.1, high: 0.2, gian: 1}": "2: lr0.gian: unknown key; did you mean gain?",
    "lr0: {low: 0.1, high: 0.2, gain: -1}": "2: lr0.gain: got -1: Input should be greater than or equal to 0",
    "lr0: {type: normal, low: 0.1, high: 0.2}":
        "2: lr0: unknown type 'normal'; the types are uniform, loguniform, int, choice, fixed",
    "lr0: {type: choice, values: []}":
        "2: lr0.values: got []: Tuple should have at least 1 item after validation, not 0",
    "close_mosaic: [0, 3]": "2: unknown setting 'close_mosaic'; did you mean augment.close_mosaic?",
    "augment.close_mosaic: {type: int, low: 0, high: 2.5}":
        "2: augment.close_mosaic: a whole number needs whole limits, not 0 and 2.5",
    "augment.close_mosaic: {type: uniform, low: 0, high: 5}":
        "2: augment.close_mosaic: the field takes whole numbers; write type: int",
    "optimizer.lr0: [0.1, 0.2]\nlr0: [0.1, 0.2]": "3: lr0: lr0 is in this space already; remove one of the two",
    "batch_size: {type: choice, values: [8, 16]}\nmicrobatch: {type: choice, values: [3, 16]}":
        "1: batch_size 8, microbatch 3 make an invalid recipe: microbatch 3 does not divide batch_size 8; legal: 1, "
        "2, 4, 8",
    "search: {algorithm: genetic}":
        "2: search.algorithm: got 'genetic': Input should be 'gp', 'evolve', 'random' or 'grid'",
    "search: {sheduler: ladder}": "2: search.sheduler: unknown key; did you mean scheduler?",
    "search: {scheduler: {name: ladder, first_epoch: 3}}":
        "2: search.scheduler.first_epoch: unknown key; did you mean first_epochs?",
    "search: {scheduler: hyperband}":
        "2: search.scheduler: got {'name': 'hyperband'}: Input tag 'hyperband' found using 'name' does not match any "
        "of the expected tags: 'none', 'ladder'",
    "search: {objective: {map: 1}}":
        "2: search.objective: unknown metric 'map'; the metrics are precision, recall, mAP50, mAP50-95",
    "search: {objective: {mAP50: 0}}": "2: search.objective: weights must be 0 or more, and not all 0",
    "search: {objective: {mAP50: -1, recall: 2}}": "2: search.objective: weights must be 0 or more, and not all 0",
    "search: {algorithm: grid}\nlr0: [0.1, 0.2]":
        "1: lr0: a grid needs points, and this is a range; write {type: choice, values: [...]}",
    "search:\n  objective: {mAP50: 1}\n  random_share: 0.5\nlr0: [0.01, 0.1]":
        "4: search.random_share has no effect: the algorithm gp does not read it; remove it, or write algorithm: "
        "evolve",
    "search: {algorithm: gp, random_first: 9}\nlr0: [0.01, 0.1]":
        "2: search.random_first has no effect: the algorithm gp does not read it; remove it, or write algorithm: "
        "evolve",
    **{f"search: {{algorithm: {algorithm}, {name}: {value}}}\nlr0: {{type: choice, values: [0.01, 0.02]}}":
        f"2: search.{name} has no effect: the algorithm {algorithm} does not read it; remove it, or write algorithm: "
        "evolve"
       for algorithm in ("random", "grid")
       for name, value in (("random_first", 0), ("random_share", 0.5), ("parent", "mean"))},
    **{f"search: {{algorithm: {algorithm}}}\nlr0:\n  type: choice\n  values: [0.01, 0.02]\n  gain: 1":
        f"6: lr0.gain has no effect: the algorithm {algorithm} does not read it; remove it, or write algorithm: evolve"
       for algorithm in ("random", "grid")},
    "search: {scheduler: {name: ladder, first_epochs: 100}}\nlr0: [0.01, 0.1]":
        "2: search.scheduler.first_epochs: 100 is not below the 100 epochs of a training, so no trial would pause; "
        "lower it, or write scheduler: none",
    "lr0: [0.01, 0.1]\nmosaic:\n  type: choice\n  values: [1, 0.5, 1.0]":
        "5: mosaic.values: 1 and 1.0 make the same recipe; remove one of them",
    "lr0: [0.01, 0.1]\nexact: {type: choice, values: [true, false, 1]}":
        "3: exact.values: True and 1 make the same recipe; remove one of them",
    "optimizer.name: {type: choice, values: [SGD, AdamW, SGD]}":
        "2: optimizer.name.values: 'SGD' and 'SGD' make the same recipe; remove one of them",
    "search: {algorithm: evolve}\ndegrees: [0, 45]":
        "1: no gene can evolve: mutation multiplies, and every gene is 0, fixed, or has gain 0; start from other "
        "values (--hyp, --set) or use algorithm: random",
    "search: {algorithm: evolve}\nlr0: {low: 0.01, high: 0.1, gain: 0}":
        "1: no gene can evolve: mutation multiplies, and every gene is 0, fixed, or has gain 0; start from other "
        "values (--hyp, --set) or use algorithm: random",
    "lr0: [0.1, 0.1]\nmosaic: {type: fixed, value: 1.0}":
        "2: lr0: no gene of the space varies, so every trial is the same; give at least one of them a range or several "
        "values",
    "search: {algorithm: random}": "1: the space names no gene; write for example lr0: [0.001, 0.1, log]",
    "lr0:\n  low: 0.1\n  high: x":
        "4: lr0.high: got 'x': Input should be a valid number, unable to parse string as a number",
    "lr0: [0.01, 0.1]\nwith_anchors:\n  obj: [4, 2]": "4: obj: low 4 is above high 2; swap them",
    "lr0: [0.01, 0.1]\nwith_anchors: 5": "3: with_anchors: got 5; write genes, as in with_anchors: {box: [1, 20]}",
    "lr0: [0.01, 0.1]\nwithout_anchors: {nonsense: [1, 2]}": "3: unknown setting 'nonsense'",
    "lr0: [0.01, 0.1]\nsearch: {scheduler: asha}":
        "3: search.scheduler: trials pause now and are not stopped; write scheduler: ladder",
    "lr0: [0.01, 0.1]\nsearch: {scheduler: median}":
        "3: search.scheduler: trials pause now and are not stopped; write scheduler: ladder",
    "lr0: [0.01, 0.1]\nsearch: {scheduler: pbt}":
        "3: search.scheduler: ray_yolo has had population based training up to 0.2.0; write scheduler: ladder, and "
        "search what changes during a training as lrf and warmup_epochs",
    "lr0: [0.01, 0.1]\nsearch: {scheduler: {name: pbt, interval_epochs: 3}}":
        "3: search.scheduler: ray_yolo has had population based training up to 0.2.0; write scheduler: ladder, and "
        "search what changes during a training as lrf and warmup_epochs",
}
"""A space in space.yaml, below a first line."""

FIELDS: dict[str, list[Any]] = {
    "data": ["a.yaml", "b.yaml"], "classes": [0, 1], "single_cls": [True, False], "epochs": [5, 50],
    "patience": [0, 10], "noval": [True, False], "seed": [0, 1], "threads": [1, 2], "strict": [True, False],
    "allow_empty": [True, False], "labels_with_confidence": [True, False], "keep_difficult": [True, False],
    "allow_names": [True, False], "evaluate.iou": [0.5, 0.7], "evaluate.confidence": [0.001, 0.25],
    "evaluate.max_detections": [100, 300], "evaluate.batch_size": [8, 32], "recipe.evaluate.iou": [0.5, 0.7],
    "objective.map50": [0.1, 1.0],
}
"""Fields that make no better recipe."""

REASONS = {
    "epochs": "a longer training is a better one; choose --epochs for all trials",
    "patience": "it decides how long a trial trains, so that trials of other lengths would be compared",
    "noval": "it decides when fitness is measured; choose --noval for all trials",
    "seed": "a lucky seed is not a better recipe; choose --seed for all trials",
    "threads": "it decides speed and the last bits, not what is learned; choose --set threads=N for all trials",
    "strict": "it only checks the data set; choose --strict for all trials",
    "allow_empty": "it only checks the data set; choose --allow-empty for all trials",
    "allow_names": "it only checks the classes of the weights; choose --allow-names for all trials",
    "evaluate.iou":
        "it changes how fitness is measured, not what is learned; choose --set evaluate.NAME=VALUE for all trials",
    "evaluate.confidence":
        "it changes how fitness is measured, not what is learned; choose --set evaluate.NAME=VALUE for all trials",
    "evaluate.max_detections":
        "it changes how fitness is measured, not what is learned; choose --set evaluate.NAME=VALUE for all trials",
    "evaluate.batch_size":
        "it changes how fitness is measured, not what is learned; choose --set evaluate.NAME=VALUE for all trials",
    "recipe.evaluate.iou":
        "it changes how fitness is measured, not what is learned; choose --set evaluate.NAME=VALUE for all trials",
    "data": "trials with other values measure another fitness",
    "classes": "trials with other values measure another fitness",
    "single_cls": "trials with other values measure another fitness",
    "labels_with_confidence": "trials with other values measure another fitness",
    "keep_difficult": "trials with other values measure another fitness",
    "objective.map50": "trials with other values measure another fitness",
}


def _choice(*values: Any) -> dict[str, Any]:
    return {"type": "choice", "values": list(values)}


VALUES: list[tuple[dict[str, Any], Recipe, str]] = [
    ({"imgsz": [64, 256]}, Recipe(),
     "imgsz: a range includes every whole number from 64 to 256, and some are invalid; write {type: choice, values: "
     "[64, 96, 128, 160, 192, 224, 256]}"),
    ({"imgsz": [64, 8192]}, Recipe(),
     "imgsz: a range includes every whole number from 64 to 8192, and some are invalid; write {type: choice, values: "
     "[64, 96, ..., 8192]}"),
    ({"batch_size": [8, 16]}, Recipe(microbatch=4),
     "batch_size: a range includes every whole number from 8 to 16, and some are invalid; write {type: choice, "
     "values: [8, 12, 16]}"),
    ({"batch_size": [-1, 2]}, Recipe(microbatch=1),
     "batch_size: a range includes every whole number from -1 to 2, and some are invalid; write {type: choice, "
     "values: [-1, 1, 2]}"),
    ({"batch_size": _choice(8, 16)}, Recipe(),
     "batch_size can be searched only if microbatch is set or searched too; add --microbatch"),
    ({"quad": _choice(True, False)}, Recipe(batch_size=8),
     "quad can be searched only if microbatch is set or searched too; add --microbatch"),
    ({"microbatch": _choice(2, 4)}, Recipe(batch_size=-1),
     "microbatch can be searched only if batch_size is set or searched too; add --batch-size"),
    ({"rect": _choice(True, False), "quad": _choice(False, True)}, Recipe(batch_size=8, microbatch=4),
     "rect True, quad True make an invalid recipe: quad and rect exclude each other; drop one of them"),
    ({"batch_size": [1, 20000]}, Recipe(microbatch=1),
     "batch_size: more than 10,000 values or combinations, too many to check; use choices of fewer values"),
    ({"augment.close_mosaic": [0, 1e300]}, Recipe(),
     "augment.close_mosaic: whole limits go up to 9007199254740992; lower them"),
    ({"exact": [0, 1]}, Recipe(), "exact: is true or false; write {type: choice, values: [true, false]}"),
    ({"objective.recall": [0, 1]}, Recipe(),
     "objective.recall cannot be searched: trials with other values measure another fitness; remove it"),
    ({"model": _choice("yolov5n", "yolov8n"), "with_anchors": {"obj": [0.2, 4]}}, Recipe(model="yolov5n"),
     "with_anchors: the space has models with anchors and without, and a trial's genes do not depend on its model; "
     "search one kind"),
    ({"lr": [0, 1]}, Recipe(), "unknown setting 'lr'; did you mean optimizer.lr0?"),
]
"""Values of a space beside lr0, over a recipe, that would fail trials."""

EFFECTS: list[tuple[str, dict[str, Any], Surroundings, str]] = [
    ("obj: [0.2, 4.0]", {"model": "yolov8n"}, UNKNOWN,
     "obj has no effect: the loss of yolov8n does not read it; remove it"),
    ("mixup: [0.0, 0.5]", {"augment": {"mosaic": 0.0}}, UNKNOWN,
     "mixup has no effect: no sample is a mosaic, because augment.mosaic is 0; remove it"),
    ("cls: [0.2, 4.0]", {}, Surroundings(num_classes=1),
     "cls has no effect: the loss of yolov5s has no term of classes where there is only one; remove it"),
    ("copy_paste: [0.0, 0.5]", {}, Surroundings(has_outlines=False),
     "copy_paste has no effect: no training label has an outline; remove it"),
]
"""Genes without effect, in the second line of a space."""

METRICS = "metrics/precision,metrics/recall,metrics/mAP_0.5,metrics/mAP_0.5:0.95"
STARTS: list[tuple[str, str | None, str]] = [
    ("evolve.csv", None, ": cannot be read: [Errno 2] No such file or directory: 'evolve.csv'"),
    ("evolve.csv", "",
     ":1: no column metrics/precision; a warm start takes an evolve.csv of YOLOv5 or of ray_yolo.tune, or a hyp file"),
    ("evolve.csv", "epoch,lr0\n1,2\n",
     ":1: no column metrics/precision; a warm start takes an evolve.csv of YOLOv5 or of ray_yolo.tune, or a hyp file"),
    ("evolve.csv", f"{METRICS}\nx,1,nan,1\n",
     ": no row has finite metrics; give another file, or leave --warm-start out"),
    ("ladder.yaml", "search: {algorithm: random}\nlr0: 0.1\n",
     ":1: search.algorithm: a search space has no values to start from; give it as --space, and to --warm-start an "
     "evolve.csv, a hyp file (lr0: 0.01), or a folder of hyp files"),
    ("space.yaml", "momentum: 0.9\nlr0: {low: 0.1, high: 0.2}\n",
     ":2: lr0.low: a search space has no values to start from; give it as --space, and to --warm-start an "
     "evolve.csv, a hyp file (lr0: 0.01), or a folder of hyp files"),
    ("space.yaml", "optimizer: {lr0: [0.1, 0.2]}\n",
     ":1: optimizer.lr0: a search space has no values to start from; give it as --space, and to --warm-start an "
     "evolve.csv, a hyp file (lr0: 0.01), or a folder of hyp files"),
    ("space.yaml", "optimizer.name: {type: fixed, value: SGD}\n",
     ":1: optimizer.name.type: a search space has no values to start from; give it as --space, and to --warm-start "
     "an evolve.csv, a hyp file (lr0: 0.01), or a folder of hyp files"),
    ("space.yaml", "with_anchors: {box: [1, 2]}\n",
     ":1: with_anchors.box: a search space has no values to start from; give it as --space, and to --warm-start an "
     "evolve.csv, a hyp file (lr0: 0.01), or a folder of hyp files"),
    ("hyp.yaml", "lr0: [\n", ":2: not YAML: …"),
    ("hyp.yaml", "lr0: 0.01\nlearning_rate: 0.1\n", ":2: unknown setting 'learning_rate'; did you mean optimizer.lr0?"),
    ("hyp.yaml", "LR0: 0.1\n", ":1: unknown setting 'LR0'; did you mean optimizer.lr0?"),
    ("hyp.yaml", "lr0: 0,02\n", ": lr0: '0,02' is not a number; correct it, or remove it from the file"),
    ("hyp.yaml", "lr0:\n", ": lr0: None is not a number; correct it, or remove it from the file"),
    ("hyp.yaml", "mosaic: true\n", ": mosaic: True is not a number; correct it, or remove it from the file"),
    ("hyp.yaml", "momentum: 0.9\n",
     ": has none of the genes of this space (lr0, mosaic, augment.close_mosaic, optimizer.name); give another file, "
     "or leave --warm-start out"),
    ("hyp.yaml", "",
     ": has none of the genes of this space (lr0, mosaic, augment.close_mosaic, optimizer.name); give another file, "
     "or leave --warm-start out"),
    ("evolve.csv", f"{METRICS},lr0,mosaic\n1,1,1,1,0.01,1\n1,1,1,1,0.01,3.2,1\n",
     ":3: 7 cells, and the header has 6: it is not known which is which; remove the rows of another header"),
    ("evolve.csv", f"{METRICS},lr0,mosaic\n1,1,1,1,0.01\n",
     ":2: 5 cells, and the header has 6: it is not known which is which; remove the rows of another header"),
    ("evolve.csv", f"{METRICS},lr0\n1,1,1,1,\n", ":2: lr0: '' is not a number; correct it, or remove it from the file"),
    ("evolve.csv", f"{METRICS},momentum\n1,1,1,1,0.9\n",
     ":2: has none of the genes of this space (lr0, mosaic, augment.close_mosaic, optimizer.name); give another "
     "file, or leave --warm-start out"),
]
"""Files of --warm-start; None: there is none."""

SIDES = {
    "base nothing":
        "B: nothing: no such file, folder or recipe; give base, a YAML file of settings, a recipe (scratch-low, "
        "scratch-med, scratch-high, fine-tune, Objects365), the folder of a run, a data set, weights, or PATH=VALUE, "
        "such as model=yolov5n or data=shapes",
    "none.yaml base": "none.yaml: cannot be read: No such file or directory",
    "base lr=1": "B: unknown setting 'lr'; did you mean optimizer.lr0?",
    "base lr0=x": "B: optimizer.lr0: got 'x'; expected a number >= 1e-06 and <= 1.0",
    "base base --set-a lr0": "--set-a: lr0: write PATH=VALUE, e.g. optimizer.lr0=0.02",
    "base base --set-b seed=3":
        "--set-b: seed: each pair trains both sides on a fresh seed; leave it out, or give --seed, from which they "
        "follow",
    "base cache=ram":
        "B: cache is no setting of a recipe; both sides are trained in the same way, so give it as a flag",
    "base sweep": "B: sweep: is a sweep or a comparison; give one of its trainings, such as sweep/trials/NAME",
    "base s3://bucket/run":
        "B: s3://bucket/run: a run or data set in a bucket cannot be a side; weights are weights=ADDRESS",
    "base evaluate.iou=0.5":
        "evaluate: A has confidence=0.001 iou=0.6 max_detections=300 batch_size=32, B has confidence=0.001 iou=0.5 "
        "max_detections=300 batch_size=32, so their fitness would be measured differently; give the settings of "
        "evaluate once, for both sides",
    "base base --pairs 2": "--pairs: got '2'; expected a whole number >= 4 and <= 1000",
    "base base --num-workers 2":
        "--num-workers: use --workers-per-training; the number of trainings at once follows from the cluster",
}
"""The words of `compare`, in a folder with a sweep."""

OTHERS: list[tuple[StudyEvent, str]] = [
    (sweep_of("4567"), "data set"),
    (sweep_of(asked=Recipe(seed=4)), "base recipe"),
    (sweep_of(space=replace(SPACE, algorithm="random")), "search space"),
    (sweep_of(search=Search(objective={"mAP50": 1.0})), "search settings"),
    (sweep_of("4567", Recipe(), search=Search(objective={"mAP50": 1.0})),
     "search settings and another data set and another base recipe"),
]
"""Sweeps that cannot continue the ledger of another one."""

FIRST_LINES: list[tuple[dict[str, Any], str]] = [
    ({"type": "epoch"}, "not the ledger of a sweep or comparison; choose another --name"),
    ({"version": 7, "ray_yolo": "9.0"},
     "written by a later ray_yolo (9.0); read or continue it with that one, or choose another --name"),
    ({"search": {"scheduler": {"name": "pbt"}}},
     "a sweep by population based training, which ray_yolo has had up to 0.2.0; read or continue it with that "
     "version, or choose another --name"),
    ({"version": 4},
     "written by an earlier ray_yolo than 0.2.0, with other rules for its decisions; read or continue it with that "
     "one, or choose another --name"),
    ({"version": "x"}, "damaged: its version is x; restore it from a copy, or choose another --name"),
    ({"space": 1},
     "damaged: 1 validation error for SweepEvent space; restore it from a copy, or choose another --name"),
]
"""Changes of a ledger's first line."""


def _load(text: str) -> None:
    Path("space.yaml").write_text(f"# a space\n{text}\n")
    load_space(Path("space.yaml"), Recipe(microbatch=None))


def _read(data: dict[str, Any], recipe: Recipe) -> None:
    read_space({"lr0": [0.01, 0.1], **data}, recipe)


def _load_gene(line: str, recipe: dict[str, Any], around: Surroundings) -> None:
    Path("space.yaml").write_text(f"lr0: [0.01, 0.1]\n{line}\n")
    load_space(Path("space.yaml"), Recipe.model_validate(recipe), around)


def _start(name: str, text: str | None) -> None:
    base = Recipe(model="yolov5n", epochs=3, batch_size=16, microbatch=8, precision="fp32", autoanchor=False)
    space = read_space({"lr0": [0.001, 0.1], "mosaic": [0.0, 1.0], "augment.close_mosaic": [0, 5],
                        "optimizer.name": _choice("SGD", "AdamW")}, base).space
    if text is not None:
        Path(name).write_text(text)
    read_warm_start(name, space, Search(), base)


def _compare(words: str) -> None:
    Path("sweep").mkdir()
    write_record(Path("sweep"), SweepRecord(digest="ab", space="quick", trials=2))
    config, origins, *_ = parse_compare(words.split())
    read_sides(config, origins)


def _continue(other: StudyEvent) -> None:
    run_sweep(Path("ledger.jsonl"), 1)
    Ledger(Path("ledger.jsonl"), other)


def _read_changed(change: dict[str, Any], type: str = "sweep") -> None:
    path = Path("ledger.jsonl")
    run_sweep(path, 1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [{**line, **change} if line["type"] == type else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read_ledger(path)


def _refusals() -> Iterator[Refusal]:
    for text, message in SPACES.items():
        yield Refusal(f"space: {text}", f"space.yaml:{message}", partial(_load, text), ConfigError)
    for name, values in FIELDS.items():
        yield Refusal(f"space: {name}", f"space: {name} cannot be searched: {REASONS[name]}; remove it",
                      partial(_read, {name: _choice(*values)}, Recipe()), ConfigError)
    for data, recipe, message in VALUES:
        yield Refusal(f"space: {data}", f"space: {message}", partial(_read, data, recipe), ConfigError)
    for line, settings, around, message in EFFECTS:
        yield Refusal(f"space: {line} {settings}", f"space.yaml:2: {message}",
                      partial(_load_gene, line, settings, around), ConfigError)
    for name in ("quik", "quick.yaml", "tune_spaces/quick.yaml"):
        yield Refusal(f"space {name}", f"space: {name}: no such file; give a YAML file, or one of evolve, ladder, "
                      "quick", partial(load_space, name, Recipe()))
    for name, text, message in STARTS:
        yield Refusal(f"warm start: {name}: {text!r}", f"{name}{message}", partial(_start, name, text))
    yield Refusal("warm start: a folder", ".: no hyp file (*.yaml) in this folder; give another one, or leave "
                  "--warm-start out", partial(_start, ".", None))
    for words, message in SIDES.items():
        yield Refusal(f"compare {words}", message, partial(_compare, words))
    for number, (other, message) in enumerate(OTHERS):
        yield Refusal(f"another sweep {number}", f"ledger.jsonl: started with another {message}; give the original one "
                      "to continue it, or another --name to start a new one (nothing was changed)",
                      partial(_continue, other))
    for change, message in FIRST_LINES:
        yield Refusal(f"ledger: {change}", f"ledger.jsonl: {message}", partial(_read_changed, change))
    yield Refusal("an unknown line of a ledger",
                  "ledger.jsonl: damaged: 'judged'; restore it from a copy, or choose another --name",
                  partial(_read_changed, {"type": "judged"}, "counted"))


REFUSALS = list(_refusals())
