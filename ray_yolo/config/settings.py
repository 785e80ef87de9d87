"""Builds one validated configuration from user input (defaults <- file <- flags) and records the origin of each value.

Input is text; the configuration model parses it once, for files and flags alike.
"""

from __future__ import annotations

import logging
import re
import types
from collections.abc import Iterable, Mapping
from functools import cache
from reprlib import repr as short
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ray_yolo.config.sections import SECTIONS
from ray_yolo.config.synonyms import did_you_mean
from ray_yolo.config.yaml import load_text_yaml, to_yaml
from ray_yolo.core.errors import ConfigError
from ray_yolo.core.redact import redact

_GENES = ("lr0 lrf momentum weight_decay warmup_epochs warmup_momentum warmup_bias_lr box cls cls_pw obj obj_pw "
          "anchor_t fl_gamma label_smoothing hsv_h hsv_s hsv_v degrees translate scale shear perspective flipud fliplr "
          "mosaic mixup copy_paste")
GENES = {name: f"{section}.{name}" for name in _GENES.split()
         for section, model in SECTIONS.items() if name in model.model_fields}
"""Name in YOLOv5's `hyp.*.yaml` files, in their order -> path in the recipe."""

LEGACY_GENES = {
    "iou_t": "YOLOv5's loss does not read it either",
    "anchors": "anchors come from the model file and from autoanchor",
}
"""Keys of YOLOv5's files that are accepted and ignored with a warning -> why."""

TRANSPARENT = ("recipe", "placement", "sweep", "comparison")  # sections whose names users omit
DEFAULT = "default"  # origin of a value that the user has not set

Config = TypeVar("Config", bound=BaseModel)

_log = logging.getLogger(__name__)
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "multiple of"}


class ConfigField(NamedTuple):
    """One leaf of the configuration tree: its location in the model and pydantic's description."""

    keys: tuple[str, ...]
    info: FieldInfo

    @property
    def types(self) -> tuple[Any, ...]:
        """Alternatives of its type, without None: (int,), (Literal['a', 'b'],), (float, Literal['auto'])."""
        return tuple(get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in self._alternatives)

    @property
    def _alternatives(self) -> tuple[Any, ...]:
        annotation = self.info.annotation
        is_union = get_origin(annotation) in (Union, types.UnionType)
        kinds = get_args(annotation) if is_union else (annotation,)
        return tuple(kind for kind in kinds if kind is not type(None))

    @property
    def choices(self) -> tuple[str, ...]:
        """Literal words that it accepts: ('none', 'ram', 'disk')."""
        return tuple(word for kind in self.types if get_origin(kind) is Literal for word in get_args(kind))

    @property
    def expected(self) -> str:
        """Legal values in words: 'a whole number >= 1', 'one of SGD, Adam, AdamW', 'a number or auto'."""
        alternatives = []
        for bare, annotated in zip(self.types, self._alternatives, strict=True):
            words = _words(bare)
            if not words:  # a type that has no words: the description covers all alternatives
                return self.description.rstrip(".")
            if get_origin(annotated) is Annotated:  # an alternative with bounds of its own
                words += f" {_bounds(get_args(annotated)[1:])}"
            alternatives.append(words)
        return f"{' or '.join(alternatives)} {_bounds(self.info.metadata)}".strip()

    @property
    def description(self) -> str:
        """The docstring of the field on one line."""
        return " ".join((self.info.description or "").split())


def _bounds(limits: Iterable[Any]) -> str:
    """Bounds in words: '>= 1 and <= 100'; '' without any."""
    bounds = []
    for limit in limits:
        for single in getattr(limit, "metadata", [limit]):  # pydantic's Field keeps several limits in its metadata
            for name, sign in _SIGNS.items():
                if hasattr(single, name):
                    bounds.append(f"{sign} {getattr(single, name)}")
    return " and ".join(bounds)


def _words(kind: Any) -> str:
    """A type in words; '' for those that only the field's description explains."""
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    return _WORDS.get(kind, "")


def config_fields(model: type[BaseModel]) -> Mapping[str, ConfigField]:
    """Every leaf of a model's tree by its dotted path without the sections in TRANSPARENT."""
    return _config_fields(model)  # the cached function takes any hashable: this one keeps its signature


@cache
def _config_fields(model: type[BaseModel]) -> Mapping[str, ConfigField]:
    fields = {}
    for field in _leaves_fields(model, ()):
        path = ".".join(key for key in field.keys if key not in TRANSPARENT)
        fields[path] = field
    return types.MappingProxyType(fields)  # all callers share it


def _leaves_fields(model: type[BaseModel], above: tuple[str, ...]) -> Iterable[ConfigField]:
    for name, info in model.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from _leaves_fields(section, (*above, name))
        else:
            yield ConfigField((*above, name), info)


def canonical(key: str) -> str:
    """The config path of a user's key, which may be a YOLOv5 gene (`lr0`) or start with `recipe.` or `placement.`."""
    for section in TRANSPARENT:
        key = key.removeprefix(f"{section}.")
    return GENES.get(key, key)


def explain_unknown(key: str, fields: Mapping[str, ConfigField]) -> str:
    """The message for an unknown key, with the nearest field."""
    inside = [path for path in fields if path.startswith(f"{key}.")]
    if inside:
        return f"{key!r} is a section; give one of its fields: {', '.join(inside)}"
    # Where two paths have the same last word, it means the first of them.
    spellings = {_last_word(path): path for path in reversed(list(fields))}
    word = _last_word(key) if _last_word(key) in spellings else key
    for path in fields:
        spellings[path] = path
    return f"unknown setting {key!r}{did_you_mean(word, spellings)}"


def _last_word(path: str) -> str:
    return path.rpartition(".")[2]


class SourcedValue(NamedTuple):
    """A value as the user wrote it, and its origin: 'hyp.yaml:3', '--epochs', '--set optimizer.lr0'."""

    value: object
    origin: str
    alone: bool = False  # given by itself, as a flag, --set or a keyword, and not with a file or a named recipe


def read_config_file(path: str) -> dict[str, SourcedValue]:
    """The values of a YAML file by config path.

    Keys are config paths, nested (`optimizer: {lr0: 0.1}`) or dotted (`optimizer.lr0: 0.1`), or YOLOv5's gene names
    (`lr0: 0.1`), so that YOLOv5's hyp files work unchanged. Empty sections are skipped.

    Raises:
        InputError: if the file cannot be read as YAML, see `load_yaml`.
        ConfigError: if two keys mean the same field.
    """
    file = load_text_yaml(path)
    values: dict[str, SourcedValue] = {}
    for keys, value in leaves(file.data):
        name = canonical(".".join(keys))
        origin = file.where(*keys)
        if name in values:
            raise ConfigError(f"{origin}: {name} is given twice, first at {values[name].origin}")
        values[name] = SourcedValue(value, origin)
    return values


def sourced_by_keyword(settings: Mapping[str, Any]) -> dict[str, SourcedValue]:
    """Keyword arguments by config path: fields by name, sections as mappings, genes by YOLOv5's names.

    Raises:
        ConfigError: if two of them give one field different values.
    """
    values: dict[str, SourcedValue] = {}
    for keys, value in leaves(settings):
        name = ".".join(keys)
        path = canonical(name)
        earlier = values.get(path)
        if earlier is not None and earlier.value != value:
            raise ConfigError(f"{name}=: is the same setting as {earlier.origin}, with another value; give one of them")
        values[path] = SourcedValue(value, f"{name}=", alone=True)
    return values


def leaves(section: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], object]]:
    """(keys from the top, value) of every value of a nested mapping."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


def resolve_config(model: type[Config], given: Mapping[str, SourcedValue]) -> tuple[Config, dict[str, str]]:
    """The configuration (given values, else defaults) and the origin of every field by its path.

    Raises:
        ConfigError: one line for each illegal value, with its origin.
    """
    fields = config_fields(model)
    known: dict[str, SourcedValue] = {}
    problems: list[str] = []
    for path, item in given.items():
        if path in fields:
            known[path] = item
        elif not _has_no_effect(path, item, fields):
            problems.append(f"{item.origin}: {explain_unknown(path, fields)}")
    try:
        config = model.model_validate(_tree(known, fields))
    except ValidationError as error:
        problems += _messages(error, known, fields)
    if problems:
        raise ConfigError("\n".join(problems))
    origins = {path: known[path].origin if path in known else DEFAULT for path in fields}
    return config, origins


def _has_no_effect(path: str, item: SourcedValue, fields: Mapping[str, ConfigField]) -> bool:
    """Whether an unknown key may be ignored: an empty section, or (with a warning) a legacy gene."""
    if path in LEGACY_GENES:
        _log.warning("%s: %s is ignored: %s", item.origin, path, LEGACY_GENES[path])
        return True
    return item.value is None and any(name.startswith(f"{path}.") for name in fields)


def _tree(given: Mapping[str, SourcedValue], fields: Mapping[str, ConfigField]) -> dict[str, Any]:
    """Values by path as the nested mapping that the model validates."""
    tree: dict[str, Any] = {}
    for path, item in given.items():
        *sections, last = fields[path].keys
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[last] = item.value
        is_text_field = fields[path].types == (str,)
        if not is_text_field and isinstance(item.value, str) and _WHOLE.fullmatch(item.value):
            branch[last] = int(item.value)  # validators distinguish `freeze: 10` from a list by its type
    return tree


def _messages(
    error: ValidationError, given: Mapping[str, SourcedValue], fields: Mapping[str, ConfigField]
) -> list[str]:
    """One line for each field (a union reports each of its alternatives) and each rule between fields."""
    by_keys = {field.keys: path for path, field in fields.items()}
    lines: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        keys = tuple(map(str, detail["loc"]))
        while keys and keys not in by_keys:  # below a field, pydantic names the alternative, or the item of a list
            keys = keys[:-1]
        if keys:
            path = by_keys[keys]
            lines[path] = _field_message(detail, path, given, fields[path])
        else:
            lines[detail["msg"]] = _rule_message(detail, given)
    return list(lines.values())


def _field_message(detail: ErrorDetails, path: str, given: Mapping[str, SourcedValue], field: ConfigField) -> str:
    """The message of a value that its field refuses."""
    if detail["type"] == "missing":
        return f"{path} is required: {field.description}"
    value, origin, _ = given[path]
    names_field = origin.replace("-", "_").rstrip("=").endswith(path)  # --batch-size already names batch_size
    where = origin if names_field else f"{origin}: {path}"
    if detail["type"] == "value_error":
        reason = detail["ctx"]["error"]
        return f"{where}: got {short(value)}: {reason}"
    got = "nothing" if value is None else short(value)
    return f"{where}: got {got}; expected {field.expected}"


def _rule_message(detail: ErrorDetails, given: Mapping[str, SourcedValue]) -> str:
    """The message of a rule between fields, with the origins of the fields it names."""
    text = str(detail["ctx"]["error"])
    words = set(re.findall(r"\w+", text))
    origins = dict.fromkeys(item.origin for path, item in given.items() if path in words)  # each once, in order
    return f"{', '.join(origins)}: {text}" if origins else text


def describe(config: Config, origins: Mapping[str, str], decided: Config | None = None) -> str:
    """The configuration as YAML that `read_config_file` accepts, with each value's origin as a comment. Required fields
    come first. The values are those of `decided`, which has all open settings resolved; None: none is open. Secrets are
    masked; what is read back has the masks."""
    fields = config_fields(type(config))
    required = {path for path, field in fields.items() if field.info.is_required()}
    requested = config.model_dump(mode="json")
    resolved = (decided or config).model_dump(mode="json")
    lines = []
    for path in sorted(fields, key=lambda path: path not in required):  # stable: the others keep their order
        requested_value = _value_at(requested, fields[path].keys)
        value = _value_at(resolved, fields[path].keys)
        shown = redact(value) if isinstance(value, str) else value  # before YAML, which quotes a mask
        setting = redact(to_yaml({path: shown}).rstrip())
        origin = origins[path]
        if value != requested_value:
            origin += "; decided at the start"
        lines.append(f"{setting:<40}  # {origin}")
    return "\n".join(lines)


def _value_at(tree: Any, keys: Iterable[str]) -> Any:
    """The value of a nested mapping at some keys."""
    for key in keys:
        tree = tree[key]
    return tree
