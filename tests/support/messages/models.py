"""Tables of models, as files and as Python, and what is refused about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ray_yolo.config.model_facts import GROUP, plugins
from ray_yolo.core.errors import CheckpointError, ConfigError
from ray_yolo.models.blocks import C3, Concat, Conv, MaxPool2d
from ray_yolo.models.detector import Architecture, Detector
from ray_yolo.models.families import build_model, find_family, load_weights
from ray_yolo.models.heads import Anchors, Detect, Head
from ray_yolo.models.rows import Row, row
from ray_yolo.models.yaml_rows import read_architecture
from tests.support.messages import Refusal
from tests.support.packages import installed


def small(**changes: object) -> dict[str, Any]:
    """The file of a model of three rows: Conv, Conv, Detect."""
    mapping = {"anchors": [[8, 8]], "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 3, 2]]],
               "head": [[[1], 1, "Detect", ["nc", "anchors"]]]}
    return {**mapping, **changes}


def _backbone(*written: object) -> dict[str, Any]:
    return {"backbone": [list(written)]}


INPUTS = "cannot take inputs of (channels, height, width)"
OUTPUTS = ": backbone[0] Conv: argument 1 (outputs): "
NO_NUMBER = "is not a number; known names: None, True, False, nearest, nc, anchors"
NO_ROW = ": backbone[0]: a row is [from, number, module, args], but this one is "
FILES: list[tuple[dict[str, Any], str]] = [
    (_backbone(-1, 1, "Covn", [8]), ": backbone[0]: module 'Covn' is unknown; did you mean Conv? Known: Conv, …"),
    (_backbone(-1, 1, "Conv", ["8"]), f": backbone[0] Conv: argument '8' {NO_NUMBER}"),
    (_backbone(-1, 1, "Conv", ["4 + 4"]), f": backbone[0] Conv: argument '4 + 4' {NO_NUMBER}"),
    (_backbone(-1, 1, "nn.Upsample", ["None", 2, "bicubic"]),
     f": backbone[0] nn.Upsample: argument 'bicubic' {NO_NUMBER}"),
    (_backbone(-1, 1, "Conv", [8.5]), f"{OUTPUTS}Input should be a valid integer"),
    (_backbone(-1, 1, "Conv", [True]), f"{OUTPUTS}Input should be a valid integer"),
    (_backbone(-1, 1, "Conv", [0]), f"{OUTPUTS}Input should be greater than or equal to 1"),
    (_backbone(-1, 1, "Conv", [10**30]), f"{OUTPUTS}Input should be less than or equal to 32768"),
    (_backbone(-1, 1, "Conv", []), f"{OUTPUTS}Field required"),
    (_backbone(-1, 1, "Conv", [8, 3, 2, 1, 1, 9]),
     ": backbone[0] Conv: argument 6: Unexpected: Conv has 5 (outputs, kernel, stride, padding, groups)"),
    (_backbone(-1, 0, "Conv", [8]), ": backbone[0] Conv: repeats: Input should be greater than or equal to 1"),
    (_backbone([0.5], 1, "Conv", [8]), ": backbone[0] Conv: source: Input should be a valid integer"),
    (_backbone("-1", 1, "Conv", [8]), f"{NO_ROW}['-1', 1, 'Conv', [8]]"),
    (_backbone("x", "y"), f"{NO_ROW}['x', 'y']"), ({"backbone": ["Conv"]}, f"{NO_ROW}'Conv'"),
    (_backbone(-1, 2, "Concat", [1]), ": backbone[0] Concat: cannot be repeated; set its number to 1"),
    (_backbone(-1, 1, "Concat", [2]), ": backbone[0] Concat: argument 1 (dimension): Input should be 1"),
    ({"head": [[[1], 1, "Detect", [3]]]},
     ": head[0] Detect: its arguments are [nc, anchors], as given at the top of the file"),
    ({"head": []}, ": head: List should have at least 1 item after validation, not 0"),
    ({"head": "none"}, ": head: Input should be a valid list"),
    ({"anchors": [[1, 2, 3]]}, ": anchors: a level is a list of w, h, w, h, ..., but one has 3 numbers"),
    ({"anchors": 0}, ": anchors…: Input should be greater than or equal to 1"),
    ({"anchors": "3"}, ": anchors…: Input should be a valid integer"),
    ({"depth_multiple": "0.33"}, ": depth_multiple: Input should be a valid number"),
    ({"width_multiple": -1}, ": width_multiple: Input should be greater than 0"),
    ({"width_multiple": float("nan")}, ": width_multiple: Input should be a finite number"),
    ({"nc": 0}, ": nc: Input should be greater than or equal to 1"),
    ({"activation": "nn.ReLU()"}, ": activation: Extra inputs are not permitted"),
    ({"backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [8, 3, 2]], [[-1, 0], 1, "Concat", [1]]]},
     f" row 2, Concat(1, source=(-1, 0)): {INPUTS} (8, 16, 16) and (8, 32, 32): …"),
]
"""Entries of a model file, over those of `small`."""

TWO_LEVELS = (
    row(Conv, 8, kernel=3, stride=2), row(C3, 16), row(Conv, 8, kernel=3, stride=2), row(Detect, source=(1, 2)))
NUMBERS = "anchors: 2 levels with equal numbers of anchors are needed, but there are"
ANCHORS: list[tuple[Anchors, str]] = [
    ([[(1, 1)]], f"{NUMBERS} 1"), ([[(1, 1)], [(1, 1), (2, 2)]], f"{NUMBERS} 1, 2"), ([[], []], f"{NUMBERS} 0, 0"),
    ([[(1, 1)], [(1, 0)]], "anchors: every width and height is a number of pixels above 0"),
]
"""Anchors of a head with two levels."""

ROWS: list[tuple[tuple[Row, ...], str]] = [
    ((row(Conv, 8, stride=2), row(Conv, 4, stride=2), row(Concat, source=(0, 1)), row(Detect)),
     f"model row 2, Concat(1, source=(0, 1)): {INPUTS} (8, 32, 32) and (4, 16, 16): …"),
    ((row(Conv, 8), row(MaxPool2d, 3, 1, 2), row(Detect)),
     f"model row 1, MaxPool2d(3, 1, 2): {INPUTS} (8, 64, 64): …"),
    *[((row(Conv, 8), row(Conv, 8, source=source), row(Detect)),
       f"model row 1, Conv(8, 1, 1, None, 1, source={source}): its source is not an earlier row")
      for source in ((1,), (5,), (-2,), (-3,), ())],
]
"""Tables whose rows do not fit together."""

WITHOUT_ANCHORS = {"scales": {"n": [0.5, 0.25, 1024]}, "backbone": small()["backbone"],
                   "head": [[[1], 1, "Detect", ["nc"]]]}
REG_MAX = ": reg_max: must be 1 with end2end: True, else 16"
SCALED: list[tuple[dict[str, Any], str]] = [
    ({"scale": "q"}, ": scale: 'q' is none of scales: n"),
    ({"scales": {"n": [0.5, 0.25]}}, ": scales.n.2: Field required"),
    ({"scales": {"n": [0.0, 0.25, 512]}}, ": scales.n.0: Input should be greater than 0"),
    ({"anchors": 3, "end2end": True, "reg_max": 1}, ": end2end: a head with anchors has none; remove one of the two"),
    ({"end2end": True}, REG_MAX), ({"reg_max": 1}, REG_MAX), ({"reg_max": 8}, ": reg_max: Input should be 1 or 16"),
    ({"anchors": 3}, ": head[0] Detect: its arguments are [nc, anchors], as given at the top of the file"),
    ({"head": [[-1, 1, "Detect", [3]]]}, ": head[0] Detect: its arguments are [nc], as given at the top of the file"),
    ({"head": [[-1, 1, "Detect", ["nc", "anchors"]]]},
     ": head[0] Detect: argument 'anchors' is not a number; known names: None, True, False, nearest, nc"),
    ({"head": [[-1, 1, "A2C2f", [64, True, 0]], [-1, 1, "Detect", ["nc"]]]},
     f" row 2, A2C2f(16, True, 0, False): {INPUTS} (8, 16, 16): …"),
]
"""Entries of a model file, over those of one with scales and without anchors."""

PLUGINS: dict[tuple[str, ...], str] = {
    ("a = own:TOY", "b = own:TOY"): "model: 'toy' is offered by ours0 and by ours1; uninstall one of them",
    ("x = own:TAKEN",): "the package ours0 offers 'yolov5n', which is a model of ray_yolo; uninstall it",
    ("x = own:NOTHING",):
        "the package ours0: its entry point ray_yolo.families.x is no ray_yolo.config.model_facts.Plugin",
    ("x = nowhere:TOY",): "the package ours0 offers models, but cannot be imported: ModuleNotFoundError: No module "
                          "named 'nowhere'; mend or uninstall it",
    ("toyy = own:NEAR",):
        "model: 'toy' is unknown; did you mean toyy? Known: yolov5n, …, yolov3-tiny, …toyy, or a YAML file",
}
"""The entry points of installed packages, ours0 and ours1, where the model toy is asked for."""

OWN = """
from ray_yolo.config.model_facts import ModelFacts, Plugin
TOY, TAKEN, NEAR = (Plugin({name: ModelFacts('toy')}, '') for name in ('toy', 'yolov5n', 'toyy'))
NOTHING = {}
"""
"""What they offer."""

TENSORS: list[tuple[dict[str, Any], int]] = [
    ({}, 0), ({"epoch": 3, "model": {"model.0.conv.weight": 1}}, 0), ({"a": torch.zeros(1)}, 1)]
"""Weights of something else, and how many tensors are among them."""

ARGUMENTS: list[tuple[Callable[[], object], str]] = [
    (lambda: row(Conv), "argument 1 (outputs): Field required"),
    (lambda: row(Conv, 8, 200), "argument 2 (kernel): Input should be less than or equal to 127"),
    (lambda: row(Conv, 8, kernel="3"), "argument 2 (kernel): Input should be a valid integer"),
    (lambda: row(Conv, 8, 3, 1, 1, 1, 1),
     "argument 6: Unexpected: Conv has 5 (outputs, kernel, stride, padding, groups)"),
    (lambda: row(Conv, 8, secret=1), "secret: Extra inputs are not permitted"),
    (lambda: row(C3, 8, repeats=0), "repeats: Input should be greater than or equal to 1"),
    (lambda: row(Concat, repeats=2), "cannot be repeated; set its number to 1"),
]
"""Rows with other arguments than their block has."""


def _find(entries: tuple[str, ...]) -> None:
    with installed(GROUP, OWN, *entries):
        plugins.cache_clear()
        try:
            find_family("toy")
        finally:
            plugins.cache_clear()


def _refusals() -> Iterator[Refusal]:
    def case(name: str, message: str, cause: Callable[[], object]) -> Refusal:
        return Refusal(name, message, cause, ConfigError)

    for entries, message in FILES:
        yield case(f"file: {entries}", f"model{message}", lambda entries=entries: (
            read_architecture(small(**entries)).build(2)))
    for number, (anchors, message) in enumerate(ANCHORS):
        yield case(f"anchors {number}", message, partial(
            Architecture(TWO_LEVELS, anchors_px=(((4, 4),), ((8, 8),))).build, 2, anchors))
    for number, (rows, message) in enumerate(ROWS):
        yield case(f"rows {number}", message, partial(Detector, list(rows)))
    for number, rows in enumerate(((row(Conv, 8),), (row(Detect), row(Conv, 8)),
                                   (row(Conv, 8), row(Detect), row(Detect)))):
        yield case(f"head {number}", "model: the last row must be Detect, and no other row",
                   partial(Architecture(rows, 3).build, 2))
    yield case("width", "model: depth multiple 1.0 and width multiple 100000.0 make a row too large: Input should be "
               "less than or equal to 32768", partial(Architecture(TWO_LEVELS, 3, width=100000.0).build, 2))
    for number, (make, message) in enumerate(ARGUMENTS):
        yield case(f"arguments {number}", message, make)
    for name, near in {"yolov5 s": "yolov5s", "yolo5n": "yolov5n", "yolov3-tny": "yolov3-tiny"}.items():
        yield case(f"name {name}", f"model: '{name}' is unknown; did you mean {near}?…", partial(build_model, name, 3))
    for entries, message in SCALED:
        yield case(f"file without anchors: {entries}", f"model{message}", lambda entries=entries: (
            read_architecture(WITHOUT_ANCHORS | entries).build(2)))
    for points, message in PLUGINS.items():
        yield case(f"plug-ins: {points}", message, partial(_find, points))
    yield case("classes of a head without names", "model: the classes of a Head head cannot be matched by name; give "
               "the data set and the weights the same order of classes", partial(Head(3).select_classes, (1, 0, 2)))
    for state, number in TENSORS:
        yield Refusal(f"weights: {[*state]}", f"weights: none of the model's 15 tensors is among the {number} given "
                      "ones; expected names such as model.0.conv.weight", lambda state=state: load_weights(
                          build_model(small(), 2), state), CheckpointError)


REFUSALS = list(_refusals())
