"""Each setting of a recipe, changed alone, changes its training, or the start says that it has no effect.

The trainings are real ones: of tiny models of each family, on data sets and with settings that leave others without
effect. What is compared is all that a training shows: its log, its last weights, and the detections of its best epoch.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from ray_yolo.config.class_names import SINGLE_CLASS
from ray_yolo.config.effects import LOSS, PERMISSIONS, Surroundings, without_effect
from ray_yolo.config.placement import Placement, RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import config_fields
from ray_yolo.core.events import Event
from ray_yolo.engine.session import run_session
from ray_yolo.engine.spec import WorkerContext
from ray_yolo.models.families import build_model
from ray_yolo.runtime.preflight import first_record, read_dataset, spec_of, surroundings
from tests.support.flag_files import FAR_ANCHORS
from tests.support.jobs import TINY

HEAD = [[[3, 4], 1, "Detect", ["nc"]]]
MODELS = {"anchors": {**TINY, "anchors": FAR_ANCHORS}, "anchor-free": {**TINY, "anchors": None, "head": HEAD},
          "end-to-end": {**TINY, "anchors": None, "end2end": True, "reg_max": 1, "head": HEAD}}

BASE: dict[str, Any] = {
    "imgsz": 64, "epochs": 4, "batch_size": 4, "microbatch": 2, "precision": "fp32", "threads": 1, "patience": 0,
    "optimizer": {"nominal_batch": 8}, "schedule": {"warmup_epochs": 0.5, "warmup_min_batches": 1, "ema_ramp": 5.0},
    "evaluate": {"confidence": 0.0}, "augment": {"mosaic": 0.7, "close_mosaic": 1},
    "objective": {"recall": 1.0, "map50": 0.0, "map50_95": 0.0}}
"""Every mechanism is at work: warm-up, accumulation, mosaics and samples without one, detections of untrained models,
a fitness that stays."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "outlines": {"data": "outlines"},
    "one class": {"data": "one"},
    "rect": {"rect": True},
    "no mosaic": {"augment": {"mosaic": 0.0}},
    "no warm-up": {"schedule": {"warmup_epochs": 0.0}},
    "noval": {"noval": True},
    "one epoch": {"epochs": 1, "augment": {"close_mosaic": 0}, "schedule": {"warmup_epochs": 0.0}},
    "no gains": {"loss": {"obj": 0.0, "cls": 0.0}},
}
"""Data sets and settings that leave others without effect."""

OTHER: dict[str, Any] = {
    "data": "other", "model": "wider", "weights": "initial", "epochs": 5, "batch_size": 8, "microbatch": 1, "imgsz": 96,
    "seed": 1, "precision": "bf16", "threads": 2, "patience": 1, "freeze": (0,), "classes": (0,), "fraction": 0.5,
    "changes": ("1: lr0=0.02",), "optimizer.name": "Adam", "optimizer.lr0": 0.02, "optimizer.momentum": 0.5,
    "optimizer.weight_decay": 0.05, "optimizer.nominal_batch": 4, "optimizer.backbone_lr": 0.5,
    "optimizer.clip_norm": 0.1, "schedule.lrf": 0.5, "schedule.warmup_epochs": 1.0, "schedule.warmup_min_batches": 5,
    "schedule.warmup_momentum": 0.3, "schedule.warmup_bias_lr": 0.05, "schedule.ema_decay": 0.5,
    "schedule.ema_ramp": 2.0, "loss.box": 0.5, "loss.obj": 0.6, "loss.cls": 0.7, "loss.dfl": 3.0, "loss.obj_pw": 2.0,
    "loss.cls_pw": 2.0, "loss.anchor_t": 1.5, "loss.fl_gamma": 1.5, "loss.label_smoothing": 0.2,
    "augment.hsv_h": 0.1, "augment.hsv_s": 0.1, "augment.hsv_v": 0.1, "augment.degrees": 20.0,
    "augment.translate": 0.4, "augment.scale": 0.1, "augment.shear": 10.0, "augment.perspective": 0.001,
    "augment.flipud": 0.5, "augment.fliplr": 0.0, "augment.mosaic": 1.0, "augment.mixup": 0.9,
    "augment.copy_paste": 1.0, "augment.close_mosaic": 2, "augment.partners": 4, "augment.render": "device",
    "evaluate.confidence": 0.9, "evaluate.iou": 0.05, "evaluate.max_detections": 3, "evaluate.batch_size": 1,
    "objective.precision": 0.5, "objective.recall": 0.5, "objective.map50": 0.7, "objective.map50_95": 0.2,
}
"""Another value of each setting that is no switch; switches are turned."""

GIVEN: dict[str, dict[str, Any]] = {"quad": {"microbatch": 4}}
"""Settings that a change needs."""

NOT_SEEN = {
    **dict.fromkeys(PERMISSIONS, "decides only whether a training is refused, which tests of its own show"),
    "optimizer.backbone_lr": "is for models with an upsampling layer: engine/test_learner.py",
    "evaluate.batch_size": "rounds differently, where it does",
}
"""Settings that need not show in these trainings, and why."""

NOT_COMPARED = {"time", "seconds", "wait_seconds", "wait_share", "images_per_second", "memory_gb", "path"}
"""Fields of events."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Data sets, models and weights of each family."""
    folder = tmp_path_factory.mktemp("law")
    _make_data(folder / "plain", seed=0)
    _make_data(folder / "other", seed=9)
    _make_data(folder / "outlines", seed=0, outlines=True)  # some small, which leaves room to paste them
    _make_data(folder / "one", seed=0, names=("cat",))
    for family, table in MODELS.items():
        wider = {**table, "backbone": [[-1, 1, "Conv", [12, 3, 2]], *TINY["backbone"][1:]]}
        (folder / f"{family}.yaml").write_text(json.dumps(table))
        (folder / f"{family}-wider.yaml").write_text(json.dumps(wider))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            torch.save(build_model(table, 2).state_dict(), folder / f"{family}.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_YOLO_CACHE", str(folder / "cache"))
        yield folder


def _make_data(folder: Path, *, seed: int, outlines: bool = False, names: tuple[str, ...] = ("cat", "dog")) -> None:
    """Eight images for training and three for validation, each with two boxes.

    They are large, so that untrained models find them, but for one outline of each image of training.
    """
    rng = np.random.default_rng(seed)
    for split, count in (("train", 8), ("val", 3)):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True)
        for number in range(count):
            size = (48, 64, 3) if number % 2 else (64, 40, 3)
            cv2.imwrite(str(folder / "images" / split / f"{number}.png"), rng.integers(0, 256, size, np.uint8))
            rows = []
            for label in range(2):
                is_small = outlines and label == 1 and split == "train"
                width, height = rng.uniform(0.1, 0.2, 2) if is_small else rng.uniform(0.25, 0.6, 2)
                x, y = rng.uniform(width / 2, 1 - width / 2), rng.uniform(height / 2, 1 - height / 2)
                left, right, top, bottom = x - width / 2, x + width / 2, y - height / 2, y + height / 2
                row = (x, y, width, height)
                if outlines:
                    row = (left, top, right, top, right, bottom, left, bottom)
                rows.append(" ".join(map(str, (label % len(names), *row))))
            (folder / "labels" / split / f"{number}.txt").write_text("\n".join(rows))
    (folder / "data.yaml").write_text(json.dumps({"train": "images/train", "val": "images/val", "names": names}))


def settings_of(family: str, case: str, changed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a case, by config path."""
    settings: dict[str, Any] = {"data": "plain", "model": family}
    for tree in (BASE, CASES[case]):
        for name, value in tree.items():
            if isinstance(value, dict):
                settings |= {f"{name}.{key}": each for key, each in value.items()}
            else:
                settings[name] = value
    return {**settings, **changed}


def recipe_of(settings: Mapping[str, Any]) -> Recipe:
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        section, _, name = path.rpartition(".")
        branch = tree.setdefault(section, {}) if section else tree
        branch[name] = value
    return Recipe.model_validate(tree)


def changes_of(family: str, case: str, path: str) -> dict[str, Any]:
    """Another value of a setting than a case's."""
    usual = settings_of(family, case, {}).get(path, config_fields(Recipe)[path].info.default)
    return {path: not usual if isinstance(usual, bool) else OTHER[path]}


def is_seen(family: str, case: str, path: str) -> bool:
    """Whether a recipe may have the setting (some exclude each other), and these trainings can show it."""
    if path.startswith("objective.") and family != "anchors":
        return False  # the objective decides which epoch is best, and only the family with anchors finds a box here
    try:
        changes = {**GIVEN.get(path, {}), **changes_of(family, case, path), "model": "yolov5n"}
        recipe_of(settings_of(family, case, changes))
    except ValidationError:
        return False
    return True


FAMILY_SETTINGS = {*LOSS, "autoanchor", "evaluate.iou"}
PATHS = [path for path in config_fields(Recipe) if path not in NOT_SEEN]
NAMED = set().union(*(
    without_effect(recipe_of(settings_of("yolov5n", case, {})), Surroundings(1, has_outlines=False)) for case in CASES))
"""The settings that some case leaves without effect."""


def _tier(family: str, case: str, path: str) -> list[pytest.MarkDecorator]:
    """Every setting in one case, and in the others where the case or the family may matter; the rest takes minutes."""
    is_quick = case == "plain" and (family == "anchors" or path in FAMILY_SETTINGS)
    is_quick |= family == "anchors" and path in NAMED
    return [] if is_quick else [pytest.mark.slow]


LAW = [pytest.param(family, case, path, marks=_tier(family, case, path))
       for family in MODELS for case in CASES for path in PATHS if is_seen(family, case, path)]


class Training(NamedTuple):
    """What a training has shown."""

    digest: str  # of all that it shows
    unused: Mapping[str, str]  # its settings without effect


@pytest.fixture(scope="module")
def trained(folder: Path) -> Callable[[str, str, tuple[tuple[str, Any], ...]], Training]:
    """The training of a case with some changes, done once."""
    numbers = itertools.count()

    @functools.cache
    def train(family: str, case: str, changes: tuple[tuple[str, Any], ...]) -> Training:
        settings = settings_of(family, case, dict(changes))
        model = f"{family}-wider" if settings["model"] == "wider" else family
        settings |= {"data": str(folder / settings["data"] / "data.yaml"), "model": str(folder / f"{model}.yaml")}
        if settings.get("weights"):
            settings["weights"] = str(folder / f"{family}.pt")
        run_dir = folder / f"run{next(numbers)}"
        run_dir.mkdir()
        return watch(recipe_of(settings), run_dir)

    return train


def watch(recipe: Recipe, run_dir: Path) -> Training:
    """Train, and note the log, the last weights (by their digest in the log) and the best epoch's detections."""
    description, train, val = read_dataset(recipe)
    config = RunConfig(recipe=recipe, placement=Placement(num_workers=0, gpus_per_worker=0))
    spec = spec_of(first_record(config, train, 0.0, ["train"]), run_dir, 1, train, val)
    events: list[Event] = []
    threads = torch.get_num_threads()
    try:
        run_session(spec, WorkerContext(), Placement(nosave=True), events.append)
        shown = [str(torch.are_deterministic_algorithms_enabled())]
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    shown += [event.model_dump_json(exclude=NOT_COMPARED) for event in events]
    digest = hashlib.sha256("\n".join(shown).replace(SINGLE_CLASS, "cat").encode())
    for file in sorted(run_dir.glob("*.npy")):
        digest.update(file.read_bytes())
    unused = without_effect(spec.recipe, surroundings(spec.recipe, description, train, val, gpus=0.0))
    return Training(digest.hexdigest(), unused)


@pytest.mark.parametrize(("family", "case", "path"), LAW)
def test_a_setting_changes_its_training_or_a_line_says_why_not(
        trained: Callable[..., Training], family: str, case: str, path: str) -> None:
    given = GIVEN.get(path, {})
    before = trained(family, case, tuple(given.items()))
    after = trained(family, case, tuple((given | changes_of(family, case, path)).items()))
    assert (after.digest == before.digest) == (path in after.unused), after.unused.get(path)


def test_every_setting_is_changed_or_has_a_reason_not_to_be() -> None:
    assert set(PATHS) | set(NOT_SEEN) == set(config_fields(Recipe))
    assert {param.values[2] for param in LAW} == set(PATHS)
