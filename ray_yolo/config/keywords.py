"""Keyword arguments of the Python calls, derived from the same tables as the flags of the commands."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ray_yolo.config.flags import ALONE, Command
from ray_yolo.config.settings import ConfigField, config_fields
from ray_yolo.core.errors import InputError

Function = TypeVar("Function", bound=Callable[..., Any])

SPELLINGS = {"conf": "confidence", "max_det": "max_detections", "batch": "batch_size"}
"""Ultralytics' names of settings that have other names here."""


class Hint(NamedTuple):
    """What to write instead of a keyword of Ultralytics."""

    path: str  # the setting at it has the effect; the hint holds for calls that have this setting
    text: str


HINTS = {
    "amp": (Hint("precision", "use precision='fp32' for amp=False; the default chooses bf16 where it is fast"),),
    "augment": (Hint("imgsz", "augmented inference is not supported: a larger imgsz has most of its effect"),),
    "deterministic": (Hint("exact", "use exact=True"),),
    "device": (Hint("gpus_per_worker", "use gpus_per_worker=0 for the CPU, num_workers=N for N GPUs"),
               Hint("format", "leave it out: the export runs on the CPU")),
    "half": (Hint("precision", "use precision='fp16'"),),
    "iterations": (Hint("trials", "use trials=N"),),
    "line_width": (Hint("line_thickness", "use line_thickness=PIXELS"),),
    "nbs": (Hint("nominal_batch", "use nominal_batch=IMAGES"),),
    "plots": (Hint("noplots", "use noplots=True for plots=False; pictures are drawn by default"),),
    "pretrained": (Hint("weights", "use weights='yolov5s.pt', or YOLO('yolov5s.pt'); nothing is downloaded"),),
    "save": (Hint("stop_after", "use nosave=True for save=False: it writes a checkpoint only at the end"),
             Hint("save_json", "use save_txt=True or save_json=True; noplots=True for no pictures")),
    "show": (Hint("source", "use result.show() of each result"),),
    "show_conf": (Hint("hide_conf", "use hide_conf=True for show_conf=False"),),
    "show_labels": (Hint("hide_labels", "use hide_labels=True for show_labels=False"),),
    "time": (Hint("hours", "use hours=HOURS"), Hint("max_hours", "use max_hours=HOURS")),
    "val": (Hint("noval", "use noval=True for val=False: it validates after the last epoch only"),),
    "verbose": (Hint("stop_after", "leave it out: the call prints a line for each epoch"),
                Hint("weights", "leave it out: prediction prints nothing, validation and export a summary")),
}
"""Keywords of Ultralytics without an equal here -> what to write instead; of several hints the first that applies."""


def read_keywords(command: Command[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by path, as `settings.sourced_by_keyword` takes them.

    A keyword is a setting's name, the last name of its path where that is unique, a section, or one of SPELLINGS. A
    switch of the command is a keyword too (`half=True`). True means the value of a flag without one (`cache=True`).

    Raises:
        InputError: for a keyword in HINTS, or an unsupported flag of the command.
    """
    fields = config_fields(command.model)
    short_names = _short_names(fields)
    sections = {path.partition(".")[0] for path in fields if "." in path}
    values: dict[str, Any] = {}
    keywords: dict[str, str] = {}  # they have given the values
    for keyword, value in settings.items():
        name = keyword if keyword in fields else SPELLINGS.get(keyword, keyword)
        switch = command.switches.get(_flag(keyword)) if isinstance(value, bool) else None
        if name in sections:
            path = f"{name}.name" if isinstance(value, str) else name  # optimizer="AdamW"
        elif name in fields or name in short_names:
            path = name if name in fields else short_names[name]
            value = ALONE[path] if value is True and path in ALONE else value
        elif switch:
            if not value:
                continue
            path, value = switch
        else:
            hint = _hint(keyword, command, fields)
            if hint:
                raise InputError(f"{keyword}=: {hint}")
            path = name  # an unknown one, which the configuration refuses
        if path in values and values[path] != value:
            raise InputError(f"{keyword}=: is the same setting as {keywords[path]}=, with another value; give one of "
                             "them")
        values[path], keywords[path] = value, keyword
    return values


def _short_names(fields: Mapping[str, ConfigField]) -> dict[str, str]:
    """The last names of paths, where they are unique -> the path."""
    paths: dict[str, list[str]] = {}
    for path in fields:
        paths.setdefault(path.rpartition(".")[2], []).append(path)
    return {name: same[0] for name, same in paths.items() if len(same) == 1}


def _flag(keyword: str) -> str:
    return f"--{keyword.replace('_', '-')}"


def _hint(keyword: str, command: Command[Any], fields: Mapping[str, ConfigField]) -> str:
    """What to write instead of a keyword that this call does not have; '' if nothing is known about it."""
    if _flag(keyword) in command.unsupported:
        return command.unsupported[_flag(keyword)]
    settings = {*fields, *_short_names(fields)}
    texts = [hint.text for hint in HINTS.get(keyword, ()) if hint.path in settings]
    return texts[0] if texts else ""


def with_keywords(command: Command[Any], omit: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Decorator of a call `f(self, ..., **settings)`: gives it the signature and docstring with every setting of a
    command, for the help and the completion of notebooks.

    Args:
        omit: paths that the call does not take.
    """
    keywords = _keywords(command.model, omit)

    def describe(function: Function) -> Function:
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nSettings::\n\n{_table(keywords)}\n"
        vars(function)["__signature__"] = _signature(function, keywords)  # read by `inspect.signature`
        return function

    return describe


def _keywords(model: type[BaseModel], omit: Sequence[str]) -> dict[str, ConfigField]:
    """Every setting that a single keyword can give, by this keyword."""
    fields = config_fields(model)
    short_names = {path: name for name, path in _short_names(fields).items()}
    keywords: dict[str, ConfigField] = {}
    for path, field in fields.items():
        if path in omit:
            continue
        if path.endswith(".name"):  # optimizer="AdamW"
            keywords[path.partition(".")[0]] = field
        elif "." not in path:
            keywords[path] = field
        elif path in short_names:
            keywords[short_names[path]] = field
    return keywords


def _signature(function: Callable[..., Any], keywords: Mapping[str, ConfigField]) -> inspect.Signature:
    """The function's own parameters, then each keyword with its default."""
    own = [each for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]
    taken = {each.name for each in own}
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(field))
             for name, field in keywords.items() if name not in taken]
    return inspect.Signature([*own, *added])


def _default(field: ConfigField) -> Any:
    default = field.info.default
    return inspect.Parameter.empty if default is PydanticUndefined else default


def _table(keywords: Mapping[str, ConfigField]) -> str:
    """The settings with their defaults and descriptions, as an indented block."""
    lines = []
    for name, field in keywords.items():
        default = _default(field)
        lines.append(f"    {name}" if default is inspect.Parameter.empty else f"    {name}={default!r}")
        description = " ".join((field.info.description or "").split())
        lines += textwrap.wrap(description, 112, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)
