"""Keyword arguments: every setting of the flags under one name, the command line's switches, and hints."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from ray_yolo.cli import EXPORT, PREDICT, TRAIN, TUNE, VAL
from ray_yolo.config.flags import Command
from ray_yolo.config.keywords import HINTS, read_keywords, with_keywords
from ray_yolo.config.settings import config_fields
from ray_yolo.core.errors import InputError

COMMANDS = {"train": TRAIN, "val": VAL, "predict": PREDICT, "export": EXPORT, "tune": TUNE}


def test_names_of_ultralytics_and_short_names_reach_their_settings() -> None:
    assert read_keywords(PREDICT, {"conf": 0.5, "batch": 2, "max_det": 3, "imgsz": 64}) == {
        "confidence": 0.5, "batch_size": 2, "max_detections": 3, "imgsz": 64}
    assert read_keywords(TRAIN, {"optimizer": "AdamW", "lr0": 0.1, "augment": {"mosaic": 0}}) == {
        "optimizer.name": "AdamW", "optimizer.lr0": 0.1, "augment": {"mosaic": 0}}


def test_a_flag_without_a_value_is_a_keyword_that_is_true() -> None:
    assert read_keywords(TRAIN, {"cache": True, "resume": True}) == {"cache": "ram", "resume": "auto"}
    assert read_keywords(PREDICT, {"half": True, "square": False}) == {"precision": "fp16"}


def test_one_setting_may_be_given_twice_with_one_value() -> None:
    assert read_keywords(TRAIN, {"batch": 8, "batch_size": 8}) == {"batch_size": 8}


@pytest.mark.parametrize(("name", "keyword"), [
    ("train", "amp"), ("train", "verbose"), ("train", "half"), ("train", "device"), ("train", "save"),
    ("train", "plots"), ("train", "pretrained"), ("tune", "iterations"), ("val", "verbose"), ("val", "device"),
    ("val", "save"), ("val", "plots"), ("predict", "verbose"), ("predict", "show"), ("predict", "data"),
    ("export", "half"), ("export", "device"), ("export", "verbose"), ("export", "simplify"), ("train", "val")])
def test_a_keyword_of_another_package_says_what_to_write_instead(name: str, keyword: str) -> None:
    with pytest.raises(InputError, match=f"^{keyword}=: ") as caught:
        read_keywords(COMMANDS[name], {keyword: True})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keyword", sorted(HINTS))
def test_a_hint_names_settings_of_its_call(keyword: str) -> None:
    """Each `name=` of a hint's text is accepted by every call that gives the hint."""
    met = False
    for command in COMMANDS.values():
        names = {path.rpartition(".")[2] for path in config_fields(command.model)}
        if keyword in names or f"--{keyword}" in {*command.unsupported, *command.switches}:
            continue
        try:
            read_keywords(command, {keyword: True})
        except InputError as error:
            met = True
            words = str(error).partition(": ")[2].replace("(", " ").replace(";", " ").split()
            named = [word.partition("=")[0] for word in words if "=" in word]
            own = {"amp", "save", "plots", "show_conf", "show_labels", "val"}
            assert [name for name in named if name not in names | own] == []
    assert met


@pytest.mark.parametrize("name", COMMANDS)
def test_the_signature_has_each_setting_with_its_default_and_the_docstring_describes_it(name: str) -> None:
    command: Command[Any] = COMMANDS[name]

    @with_keywords(command, omit=("weights",))
    def call(self: object, own: str = "own", **settings: Any) -> None:
        """One line."""

    parameters = inspect.signature(call).parameters
    assert list(parameters)[:2] == ["self", "own"]
    assert parameters["own"].default == "own"
    assert "weights" not in parameters
    documented = inspect.getdoc(call) or ""
    assert documented.startswith("One line.\n\nSettings::\n")
    for keyword, parameter in list(parameters.items())[2:]:
        (path,) = read_keywords(command, {keyword: "some text"})
        field = config_fields(command.model)[path]
        if parameter.default is not inspect.Parameter.empty:
            assert parameter.default == field.info.default
        assert f"\n    {keyword}" in documented
        assert " ".join((field.info.description or "").split())[:60] in " ".join(documented.split())
    flags = {path for path in command.paths if path != "weights"}
    reached = {path for keyword in list(parameters)[2:] for path in read_keywords(command, {keyword: "some text"})}
    assert flags - reached == set()
