"""The reader and the writer of all YAML files.

YAML files are untrusted input. Tags are refused, so a file runs no code. Size, depth and aliases are limited, so it
cannot grow without bound. Duplicate keys are refused. Every key keeps its line, so that an error can name `file:line`.
Scalars follow the core schema of YAML 1.2, not PyYAML's 1.1: `1e-3` is a number; `no`, `on` and `12:30` are text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple, NoReturn

import yaml

from ray_yolo.core.errors import InputError

KeyPath = tuple[str | int, ...]

MAX_BYTES = 4 * 2**20
MAX_DEPTH = 32
MAX_VALUES = 100_000

_PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is 20 times faster, if PyYAML was built with it
_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


class YamlFile(NamedTuple):
    """Contents of a file, with line numbers."""

    path: Path
    data: dict[Any, Any]
    lines: dict[KeyPath, int]  # line (from 1) of every key and list item, by its path from the top

    def where(self, *keys: str | int) -> str:
        """`file:line` of a key, for error messages."""
        return f"{self.path}:{self.lines.get(keys, 1)}"


def load_yaml(path: str | Path) -> YamlFile:
    """A file whose top level is a mapping, with numbers, booleans and null according to YAML 1.2.

    Keys are text or whole numbers. An empty file is an empty mapping. Numbers too large for a float remain text.

    Raises:
        InputError: naming file and line, if the file is not readable, not UTF-8, not YAML, or refused by this module.
    """
    return _load(Path(path), read_scalar)


def load_text_yaml(path: str | Path, content: str | None = None) -> YamlFile:
    """The same with every scalar and key as text: `007` is '007', `true` is 'true'; only null is None.

    For callers with their own types, such as the configuration, and for names that may look like numbers.

    content: of the file, if it was read already.
    """
    return _load(Path(path), lambda text: None if text in _NULL else text, content)


def read_scalar(text: str) -> str | int | float | bool | None:
    """The value of an unquoted YAML 1.2 scalar."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        number = float(text)
        if math.isfinite(number):  # 1e999 remains text
            return number
    return text


def to_yaml(values: Mapping[str, Any]) -> str:
    """A mapping of plain values as YAML in its own order, lists on one line; the inverse of `load_yaml`."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, width=math.inf)


def _load(path: Path, scalar: Callable[[str], Any], content: str | None = None) -> YamlFile:
    text = _read_text(path) if content is None else content
    try:
        reader = _Reader(path, text, scalar)
        return YamlFile(path, reader.document(), reader.lines)
    except yaml.YAMLError as error:
        raise InputError(_syntax_message(path, text, error)) from None
    except InputError:  # it is a ValueError, too
        raise
    except (ValueError, OverflowError):  # from PyYAML's pure Python parser for "\UFFFFFFFF"
        raise InputError(f"{path}: not YAML: an escape sequence without a character") from None


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_BYTES:
        raise InputError(f"{path}: larger than {MAX_BYTES // 2**20} MiB, the limit for YAML files")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8; save the file as UTF-8, or give a YAML file") from None


def _syntax_message(path: Path, text: str, error: yaml.YAMLError) -> str:
    """One line for an error of either of PyYAML's parsers."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:  # a forbidden character; the error has only its position
        position = getattr(error, "position", 0)
        line = text.count("\n", 0, position) + 1
        return f"{path}:{line}: not YAML: control character {short(text[position:position + 1])}; is this a text file?"
    lines = text.splitlines()
    tab = mark.line < len(lines) and lines[mark.line].lstrip(" ").startswith("\t")
    advice = "; indent with spaces, not tabs" if tab else ""
    problem = str(getattr(error, "problem", None))
    if "escape character" in problem:
        advice = "; in double quotes, a backslash starts an escape: write `/`, or use single quotes"
    return f"{path}:{mark.line + 1}: not YAML: {problem}{advice}"


class _Reader:
    """Builds plain values from the parser's events; MAX_DEPTH bounds the recursion."""

    def __init__(self, path: Path, text: str, scalar: Callable[[str], Any]) -> None:
        self.path = path
        self.read_scalar = scalar
        self.lines: dict[KeyPath, int] = {}
        self.events = yaml.parse(text, Loader=_PARSER)

    def document(self) -> dict[Any, Any]:
        """The mapping of the file; empty if the file has no content."""
        next(self.events)  # start of the stream
        if isinstance(next(self.events), yaml.StreamEndEvent):
            return {}
        root = next(self.events)
        value = self.value(root, ())
        if value is not None and not isinstance(value, dict):
            self.refuse(root, "the file must consist of `key: value` lines")
        next(self.events)  # end of the document
        after = next(self.events)
        if not isinstance(after, yaml.StreamEndEvent):
            self.refuse(after, "a second document starts here; a file has one")
        return value or {}

    def value(self, event: yaml.Event, at: KeyPath) -> Any:
        """The value that starts with an event, read to its end."""
        if isinstance(event, yaml.AliasEvent):
            self.refuse(event, f"alias *{event.anchor}: write the value out instead")
        tag = getattr(event, "tag", None)
        if tag:
            self.refuse(event, f"tag {short(tag)}: tags are not supported; remove it (quote text values)")
        if len(at) > MAX_DEPTH:
            self.refuse(event, f"nested deeper than {MAX_DEPTH} levels")
        if len(self.lines) > MAX_VALUES:
            self.refuse(event, f"more than {MAX_VALUES} values")
        if isinstance(event, yaml.ScalarEvent):
            is_quoted = bool(event.style)
            return event.value if is_quoted else self.read_scalar(event.value)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(at)
        return self.mapping(at)

    def sequence(self, at: KeyPath) -> list[Any]:
        """The items up to the end of the sequence."""
        items: list[Any] = []
        for event in self.events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            path = (*at, len(items))
            self.lines[path] = _line(event)
            items.append(self.value(event, path))
        return items

    def mapping(self, at: KeyPath) -> dict[Any, Any]:
        """The keys and values up to the end of the mapping."""
        values: dict[Any, Any] = {}
        for event in self.events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self.key(event, at)
            path = (*at, key)
            if key in values:
                self.refuse(event, f"key {short(key)} is given twice, first in line {self.lines[path]}")
            self.lines[path] = _line(event)
            values[key] = self.value(next(self.events), path)
        return values

    def key(self, event: yaml.Event, at: KeyPath) -> str | int:
        """The key of a mapping; only text and whole numbers are keys."""
        if isinstance(event, yaml.ScalarEvent | yaml.AliasEvent):  # `value` refuses an alias
            key = self.value(event, (*at, ""))
            if isinstance(key, str | int) and not isinstance(key, bool):  # True is an int in Python
                return key
        self.refuse(event, "a key must be text or a whole number; quote it if it is text")

    def refuse(self, event: yaml.Event, what: str) -> NoReturn:
        raise InputError(f"{self.path}:{_line(event)}: {what}")


def _line(event: yaml.Event) -> int:
    assert event.start_mark, "parser events have marks"
    return event.start_mark.line + 1


class _Dumper(yaml.SafeDumper):
    """Quotes text that would parse as another type, and never writes an alias."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    is_safe_unquoted = text.isprintable() and isinstance(read_scalar(text), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_safe_unquoted else '"')


def _represent_list(dumper: yaml.SafeDumper, items: Sequence[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(tuple, _represent_list)
